"""The file tree shows the data's path: a room imports the shared modules and itself, never another room."""

import ast
from pathlib import Path

import longrein

ROOT = Path(longrein.__file__).parent
ROOMS = ("agents", "calls", "engines", "forest", "learning", "publishing")
SHARED = {"records", "errors", "config", "ledger", "waits"}
# Seams a room may speak through, although they stand in a room to its right.
SEAMS = {("calls", "longrein.engines.engine"), ("publishing", "longrein.engines.engine")}
HEAVY = {"torch", "transformers", "peft"}
MAY_COMPUTE = {"engines", "learning", "publishing"}


def imported(file: Path) -> set[str]:
    """Every module a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def rooms_left_of(room: str) -> set[str]:
    return set(ROOMS[: ROOMS.index(room)])


def test_a_room_imports_nothing_to_its_right() -> None:
    wrong = []
    for room in ROOMS:
        allowed = SHARED | {room} | rooms_left_of(room)
        for file in (ROOT / room).rglob("*.py"):
            for name in imported(file):
                parts = name.split(".")
                if parts[0] == "longrein" and len(parts) > 1 and parts[1] not in allowed and (room, name) not in SEAMS:
                    wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


def test_torch_stays_in_the_rooms_that_compute() -> None:
    wrong = []
    for file in ROOT.rglob("*.py"):
        room = file.relative_to(ROOT).parts[0]
        if room in ROOMS and room not in MAY_COMPUTE and imported(file) & {"torch", "peft"}:
            wrong.append(str(file.relative_to(ROOT)))
    assert not wrong, wrong
