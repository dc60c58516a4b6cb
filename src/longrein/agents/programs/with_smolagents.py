"""An agent on smolagents.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python with_smolagents.py MODEL INSTRUCTION
"""

import os
import subprocess
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a shell command; returns what it printed.

    Args:
        command: the command
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace", timeout=60)
    return f"{done.stdout}{done.stderr}(exit code {done.returncode})"


def main(model: str, instruction: str) -> int:
    server = OpenAIModel(model, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = ToolCallingAgent([bash], server, max_steps=100)
    return 0 if agent.run(instruction, return_full_result=True).state == "success" else 1


sys.exit(main(*sys.argv[1:]))
