"""An agent on the OpenAI Agents SDK.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python with_openai_agents.py API MODEL INSTRUCTION

API is ``responses`` or ``chat_completions``.
"""

import subprocess
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def bash(command: str) -> str:
    """Run a shell command; returns what it printed."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace", timeout=60)
    return f"{done.stdout}{done.stderr}(exit code {done.returncode})"


def main(api: str, model: str, instruction: str) -> None:
    set_default_openai_api(api)
    agent = Agent(name="shell", instructions="Solve the task with the shell.", tools=[bash], model=model)
    print(Runner.run_sync(agent, instruction, max_turns=100).final_output)


main(*sys.argv[1:])
