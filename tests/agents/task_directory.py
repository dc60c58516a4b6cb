"""Makes Harbor-format task directories for tests."""

from pathlib import Path

PARTS = {
    "task.toml": 'schema_version = "1.4"\n',
    "instruction.md": "Do it.\n",
    "environment/Dockerfile": "FROM debian:stable-slim\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
}


def make_task(directory: Path, **parts: str | None) -> Path:
    """Write a good task; ``parts`` replace files by name (dots and slashes as ``_``), None leaves one out."""
    for name, text in PARTS.items():
        given = parts.get(name.replace("/", "_").replace(".", "_"), text)
        if given is not None:
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(given, encoding="utf-8")
    return directory
