"""Installs every known harness, drives each through loops of 2 and of 12 commands, and of 2 with thinking, and writes
the table of ``docs/harnesses.md``. With names, only these profiles' rows are made anew.

    python -m tests.calls.matrix [NAME…]
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from longrein.agents import harnesses
from tests.calls.clients import CLIENTS, Client, Played, Run, play
from tests.tiny_model import make_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
HEADER = (
    "| harness | version | dialect | streams | steps | model calls | branches | tokens begin as | trained tokens "
    "| exact | task solved |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def row(client: Client, run: Run, played: Played) -> str:
    version = harnesses.profile(client.profile).version
    causes = ", ".join(f"{cause} {count}" for cause, count in played.causes.items())
    cells = (
        client.name,
        version,
        "/".join(sorted({call.dialect for call in played.calls})),
        _yes(played.streamed),
        run,
        len(played.calls),
        played.branches,
        causes,
        played.trained_tokens,
        _yes(played.exact),
        _yes(played.reward == 1),
    )
    return f"| {' | '.join(map(str, cells))} |\n"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


async def main(names: Sequence[str]) -> int:
    """0 if every harness solved the task, token for token, on the branches it is known to make."""
    asked = {harnesses.profile(name).name for name in names} or {client.profile for client in CLIENTS}
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {client.name: kept(client, table) for client in CLIENTS}
    good = True
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "tokenizer"
        make_tokenizer().save_pretrained(model)
        for client in CLIENTS:
            if client.profile not in asked:
                continue
            harnesses.install(harnesses.profile(client.profile))
            rows[client.name] = ""
            for run in client.runs:
                with tempfile.TemporaryDirectory(dir=root) as folder:
                    played = await play(client, model, Path(folder), run.turns, thinking=run.thinking)
                made = row(client, run, played)
                rows[client.name] += made
                print(made, end="", flush=True)
                if not (played.exact and played.reward == 1 and played.branches == client.branches(run.turns)):
                    good = False
                    print(f"{played.outcome}\n{played.output[-2000:]}", file=sys.stderr)
    PAGE.write_text(f"{before}{BEGIN}{HEADER}{''.join(rows.values())}{END}{after}", encoding="utf-8")
    return 0 if good else 1


def kept(client: Client, table: str) -> str:
    """The rows that the table has of a client."""
    return "".join(line for line in table.splitlines(keepends=True) if line.startswith(f"| {client.name} |"))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
