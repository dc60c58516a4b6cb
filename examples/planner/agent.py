"""An in-house harness of three agents: a planner says who is to do the task and how, a specialist writes the command.

It knows nothing of training. Each agent is a model name at one endpoint, as it would be in production.
"""

import os
import re
import subprocess
import sys

from openai import OpenAI

client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY

PLANNER = [
    {"role": "system", "content": "Name the specialist for the task, writer or mover, and say what it is to do."},
    {"role": "user", "content": 'Put "hello" into greet.txt.'},
    {"role": "assistant", "content": 'writer: write "hello" to greet.txt'},
    {"role": "user", "content": "Rename old.txt to new.txt."},
    {"role": "assistant", "content": "mover: move old.txt to new.txt"},
]
SPECIALISTS = {
    "writer": [
        {"role": "system", "content": "Write the file with one shell command in a ```bash block."},
        {"role": "user", "content": 'write "seven" to number.txt'},
        {"role": "assistant", "content": '```bash\necho "seven" > number.txt\n```'},
    ],
    "mover": [
        {"role": "system", "content": "Move the file with one shell command in a ```bash block."},
        {"role": "user", "content": "move a.txt to b.txt"},
        {"role": "assistant", "content": "```bash\nmv a.txt b.txt\n```"},
    ],
}


def ask(agent: str, shown: list[dict[str, str]], request: str) -> str:
    messages = [*shown, {"role": "user", "content": request}]
    return client.chat.completions.create(model=agent, messages=messages).choices[0].message.content or ""


plan = re.fullmatch(r"(writer|mover): (.+)", ask("planner", PLANNER, sys.argv[1]).strip())
if plan:
    reply = ask(plan[1], SPECIALISTS[plan[1]], plan[2])
    if command := re.search(r"```bash\s*\n(.*?)\n```", reply, re.DOTALL):
        subprocess.run(command[1], shell=True, timeout=5)
