"""An agent on LangGraph: a model and a shell, in turns.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python with_langgraph.py API MODEL INSTRUCTION

API is ``chat`` or ``responses``.
"""

import subprocess
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def bash(command: str) -> str:
    """Run a shell command; returns what it printed."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace", timeout=60)
    return f"{done.stdout}{done.stderr}(exit code {done.returncode})"


def main(api: str, model: str, instruction: str) -> None:
    llm = ChatOpenAI(model=model, use_responses_api=api == "responses").bind_tools([bash])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [llm.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([bash]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    said = [("system", "Solve the task with the shell."), ("user", instruction)]
    print(graph.compile().invoke({"messages": said}, {"recursion_limit": 200})["messages"][-1].text)


main(*sys.argv[1:])
