"""A whole small world for end-to-end tests: a tiny model, an in-house harness, tasks, a configuration."""

import json
import sys
from pathlib import Path

import yaml

from tests.tiny_model import make_tiny_model

# Asks the model once or twice, writes what it said, and ends. Nothing but the standard library, so it starts fast.
HARNESS = """
import json, os, sys, urllib.request

def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""

messages = [{"role": "system", "content": "Say many letters."}, {"role": "user", "content": sys.argv[1]}]
first = ask(messages)
messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Again."}]
second = ask(messages)
with open("said.txt", "w", encoding="utf-8") as file:
    file.write(first + second)
"""

# Reward: the share of characters that are letters. A random model gets some of it, and no two samples the same.
VERIFIER = """#!/bin/sh
python3 - <<'END'
import json, pathlib
text = pathlib.Path("said.txt").read_text(encoding="utf-8")
reward = sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1)
pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward}))
END
"""


def make_task(directory: Path, instruction: str) -> None:
    """One Harbor-format task."""
    (directory / "tests").mkdir(parents=True)
    (directory / "environment").mkdir()
    (directory / "task.toml").write_text('schema_version = "1.4"\n[verifier]\ntimeout_sec = 30\n')
    (directory / "instruction.md").write_text(instruction + "\n")
    (directory / "environment" / "Dockerfile").write_text("FROM scratch\nWORKDIR /app\n")
    test = directory / "tests" / "test.sh"
    test.write_text(VERIFIER)
    test.chmod(0o755)


def make_workshop(root: Path, *, steps: int = 3, groups: int = 2, rollouts: int = 4) -> Path:
    """Write everything into ``root`` and return the configuration's path."""
    make_tiny_model(root / "model")
    (root / "agent.py").write_text(HARNESS)
    for split, count in (("train", 3), ("held-out", 2)):
        for index in range(count):
            make_task(root / "tasks" / split / f"say-{index}", f"Task {index} of {split}: say letters.")
    config = {
        "model": {"path": "./model"},
        "tasks": {"train": "./tasks/train", "evaluate": "./tasks/held-out"},
        "harness": {
            "command": [sys.executable, "agent.py", "{instruction}"],
            "files": {"/app/agent.py": "./agent.py"},
            "env": {"OPENAI_BASE_URL": "{base_url}/v1", "OPENAI_API_KEY": "{key}"},
            "timeout_s": 60.0,
        },
        "runner": {"concurrency": 4},
        "sampling": {"max_tokens": 12},
        "training": {"steps": steps, "groups": groups, "rollouts": rollouts, "eval_samples": 2},
        "engine": {"dtype": "float32", "threads": 1, "cache_tokens": 4096},
        "learner": {"precision": "float32", "learning_rate": 0.001, "threads": 1},
        "output": {"dir": "./run"},
    }
    file = root / "config.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return file


def read_metrics(root: Path) -> list[dict[str, object]]:
    """The lines of the run's ``metrics.jsonl``."""
    file = root / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
