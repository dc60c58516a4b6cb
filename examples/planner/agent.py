"""An in-house harness of three agents: a planner says who is to do the task and how, a specialist writes the command.

It knows nothing of training. Each agent is a model name at one endpoint, as it would be in production.
"""

import re
import subprocess
import sys

from openai import OpenAI

client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY


def turns(system: str, *pairs: tuple[str, str]) -> list[dict[str, str]]:
    """What an agent is shown before its request: its instructions and a few examples."""
    said = [{"role": "system", "content": system}]
    for request, reply in pairs:
        said += [{"role": "user", "content": request}, {"role": "assistant", "content": reply}]
    return said


PLANNER = turns(
    "Name the specialist for the task, writer or mover, and say what it is to do.",
    ('Put "hello" into greet.txt.', 'writer: write "hello" to greet.txt'),
    ("Rename old.txt to new.txt.", "mover: move old.txt to new.txt"),
    ('Put "seven" into number.txt.', 'writer: write "seven" to number.txt'),
    ("Rename a.txt to b.txt.", "mover: move a.txt to b.txt"),
)
SPECIALISTS = {
    "writer": turns(
        "Write the file with one shell command in a ```bash block.",
        ('write "hello" to greet.txt', '```bash\necho "hello" > greet.txt\n```'),
        ('write "seven" to number.txt', '```bash\necho "seven" > number.txt\n```'),
    ),
    "mover": turns(
        "Move the file with one shell command in a ```bash block.",
        ("move old.txt to new.txt", "```bash\nmv old.txt new.txt\n```"),
        ("move a.txt to b.txt", "```bash\nmv a.txt b.txt\n```"),
    ),
}


def ask(agent: str, shown: list[dict[str, str]], request: str) -> str:
    messages = [*shown, {"role": "user", "content": request}]
    return client.chat.completions.create(model=agent, messages=messages).choices[0].message.content or ""


plan = re.fullmatch(r"(writer|mover): (.+)", ask("planner", PLANNER, sys.argv[1]).strip())
if plan:
    reply = ask(plan[1], SPECIALISTS[plan[1]], plan[2])
    if command := re.search(r"```bash\s*\n(.*?)\n```", reply, re.DOTALL):
        subprocess.run(command[1], shell=True, timeout=5)
