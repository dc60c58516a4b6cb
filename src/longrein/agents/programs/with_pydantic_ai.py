"""An agent on Pydantic AI.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python with_pydantic_ai.py PROVIDER:MODEL INSTRUCTION
"""

import subprocess
import sys

from pydantic_ai import Agent
from pydantic_ai.usage import UsageLimits


def bash(command: str) -> str:
    """Run a shell command; returns what it printed."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace", timeout=60)
    return f"{done.stdout}{done.stderr}(exit code {done.returncode})"


def main(model: str, instruction: str) -> None:
    agent = Agent(model, instructions="Solve the task with the shell.", tools=[bash])
    print(agent.run_sync(instruction, usage_limits=UsageLimits(request_limit=100)).output)


main(*sys.argv[1:])
