"""Whether each algorithm learns: small whole runs over several seeds, and what came of them as markdown.

    python -m tests.rising [NAME ...]

Gateway, harness, sandbox, verifier and learner are the real ones; the model is tiny and random, and the reward is the
share of letters in what it says. Writes the table between two marks of docs/algorithms.md.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.workshop import make_workshop, read_metrics

NAMES = ("grpo", "dapo", "rloo", "gspo", "cispo")
SEEDS = (0, 1, 2)
STEPS = 8
# At the ends of a curve, so many steps are taken together.
ENDS = 2

# With one update a step every ratio is 1; two show the algorithms that have one.
SEVERAL = {"gspo", "cispo"}

PAGE = Path(__file__).parent.parent / "docs" / "algorithms.md"
BEGIN, END = "<!-- rising: begin -->", "<!-- rising: end -->"


def rewards(name: str, seed: int) -> list[float]:
    """Mean reward of each step of one run."""
    with tempfile.TemporaryDirectory(prefix="longrein-rising-") as folder:
        config = make_workshop(Path(folder), steps=STEPS, groups=4, rollouts=8)
        changes = [f"algorithm.name={name}", f"training.seed={seed}", "learner.learning_rate=0.02"]
        changes += ["training.eval_samples=0", "tasks.evaluate=null"]
        if name in SEVERAL:
            changes.append("algorithm.mini_batches=2")
        command = [sys.executable, "-m", "longrein.cli", "train", "--config", str(config)]
        for change in changes:
            command += ["--set", change]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if ended.returncode:
            raise SystemExit(f"{name}, seed {seed}: {ended.stderr[-2000:]}")
        return [float(str(line["reward"])) for line in read_metrics(Path(folder))]


def row(name: str) -> tuple[str, bool]:
    """A line of the table, and whether every seed rose."""
    cells, rose = [], True
    for seed in SEEDS:
        curve = rewards(name, seed)
        first, last = statistics.fmean(curve[:ENDS]), statistics.fmean(curve[-ENDS:])
        cells.append(f"{first:.2f} → {last:.2f}")
        rose = rose and last > first + 0.05
        print(f"{name}, seed {seed}: {' '.join(f'{reward:.2f}' for reward in curve)}", file=sys.stderr, flush=True)
    return f"| {name} | {' | '.join(cells)} |", rose


def main() -> None:
    names = sys.argv[1:] or list(NAMES)
    rows = [row(name) for name in names]
    lines = [f"| algorithm | {' | '.join(f'seed {seed}' for seed in SEEDS)} |", "|---" * (len(SEEDS) + 1) + "|"]
    table = "\n".join([*lines, *(line for line, _ in rows)])
    print(table)
    if not sys.argv[1:]:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    sys.exit(0 if all(rose for _, rose in rows) else "some did not rise by 0.05 in every seed")


if __name__ == "__main__":
    main()
