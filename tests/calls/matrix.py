"""Installs every known harness, drives each through a tool loop of 2 and of 12 calls, and writes the table of
``docs/harnesses.md``.

    python -m tests.calls.matrix
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from longrein.agents import harnesses
from tests.calls.clients import CLIENTS, Client, Played, play
from tests.tiny_model import make_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"
TURNS = (2, 12)
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
HEADER = (
    "| harness | version | dialect | streams | tool calls | model calls | branches | tokens begin as | trained tokens "
    "| exact | task solved |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def row(client: Client, turns: int, played: Played) -> str:
    version = harnesses.profile(client.profile).version
    causes = ", ".join(f"{cause} {count}" for cause, count in played.causes.items())
    cells = (
        client.name,
        version,
        "/".join(sorted({call.dialect for call in played.calls})),
        _yes(played.streamed),
        turns,
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


async def main() -> int:
    """0 if every harness solved the task on one branch, token for token."""
    rows, good = "", True
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "tokenizer"
        make_tokenizer().save_pretrained(model)
        for client in CLIENTS:
            harnesses.install(harnesses.profile(client.profile))
            for turns in TURNS:
                with tempfile.TemporaryDirectory(dir=root) as folder:
                    played = await play(client, model, Path(folder), turns)
                rows += row(client, turns, played)
                print(rows.splitlines()[-1], flush=True)
                if not (played.exact and played.reward == 1 and played.branches == 1):
                    good = False
                    print(f"{played.outcome}\n{played.output[-2000:]}", file=sys.stderr)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{HEADER}{rows}{END}{after}", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
