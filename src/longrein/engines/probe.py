"""Which dtype and how many threads: measured here and now, not guessed.

The same processor is several times faster in bfloat16 or several times slower, depending on instructions it may or may
not have. And where OpenMP's idle threads spin instead of sleeping, two threads that share their cores with other
processes can be ten times slower than one: more than one is only used with ``OMP_WAIT_POLICY=PASSIVE``, which has to be
in the environment before torch is imported.
"""

import os
import time
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from longrein.engines.decoder import base_module
from longrein.engines.engine import SampleRequest
from longrein.engines.parity import checked_decoder
from longrein.engines.scheduler import Running, Scheduler

Dtype = Literal["auto", "float32", "bfloat16"]

PROMPT_TOKENS = 128
SEQUENCES = 8
STEPS = 4
ROUNDS = 2
# bfloat16 costs accuracy, another thread takes a core from the sandboxes: each must be worth it.
WORTH_BFLOAT16 = 1.15
WORTH_DOUBLE_THREADS = 1.4


def usable_threads() -> int:
    """Threads that torch may use here without harm: the cores, or 1 where idle threads spin."""
    passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    return len(os.sched_getaffinity(0)) if passive else 1


def bfloat16_may_pay(device: torch.device) -> bool:
    """Whether one small product is at least as fast in bfloat16: where the processor lacks the instructions it is up to
    a hundred times slower, and timing a whole model would take minutes.
    """
    return _product_seconds(device, torch.bfloat16) <= _product_seconds(device, torch.float32)


def _product_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """The best of four, the first of which warms up."""
    x, y = (torch.ones(rows, 512, device=device, dtype=dtype) for rows in (128, 512))
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        (x @ y)[0, 0].item()
        taken.append(time.perf_counter() - began)
    return min(taken)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Tokens per second of one setting: ``decode`` over 8 sequences, ``prefill`` of a short prompt."""

    dtype: str
    decode_threads: int
    prefill_threads: int
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """What the engine should use, and what was measured on the way (nothing if nothing was open)."""

    dtype: torch.dtype
    decode_threads: int
    prefill_threads: int
    measured: tuple[Measurement, ...] = ()


def choose(module: PreTrainedModel, dtype: Dtype, threads: int | Literal["auto"]) -> EngineChoice:
    """Pick dtype and threads for a module; what the user fixed is not measured.

    Prefill takes every core: it is short. Decoding takes one thread, and more only where a doubling pays and a core is
    left for the sandboxes. Where idle threads spin, both take one.

    Raises:
        ModelError: the architecture cannot be served.
    """
    cores = usable_threads()
    device = next(base_module(module).parameters()).device
    on_gpu = device.type != "cpu"
    if dtype == "auto" and (on_gpu or not bfloat16_may_pay(device)):
        dtype = "bfloat16" if on_gpu else "float32"
    if on_gpu and threads == "auto":
        threads = 1
    before = torch.get_num_threads()
    try:
        measured = _compare_dtypes(module, dtype, threads, cores)
        chosen = dtype if dtype != "auto" else _better_dtype(measured)
        decode = threads if threads != "auto" else 1
        if threads == "auto":
            more = _compare_threads(module, chosen, cores)
            decode = _better_threads([m for m in measured if m.dtype == chosen] + more)
            measured += more
    finally:
        torch.set_num_threads(before)
    return EngineChoice(_torch_dtype(chosen), decode, max(cores, decode), tuple(measured))


def _compare_dtypes(
    module: PreTrainedModel, dtype: Dtype, threads: int | Literal["auto"], cores: int
) -> list[Measurement]:
    decode = 1 if threads == "auto" else threads
    names = ("float32", "bfloat16") if dtype == "auto" else (dtype,) if threads == "auto" and cores > 2 else ()
    return [_measure(module, name, [decode], cores)[0] for name in names]


def _better_dtype(measured: list[Measurement]) -> Literal["float32", "bfloat16"]:
    """By the time of as many prefilled as decoded tokens."""
    seconds = {m.dtype: 1 / m.prefill + 1 / m.decode for m in measured}
    return "bfloat16" if seconds["float32"] > WORTH_BFLOAT16 * seconds["bfloat16"] else "float32"


def _compare_threads(module: PreTrainedModel, dtype: str, cores: int) -> list[Measurement]:
    """Two, four, … decoding threads as long as one core stays free."""
    counts = [2**power for power in range(1, 6) if 2**power < cores]
    return _measure(module, dtype, counts, cores) if counts else []


def _better_threads(measured: list[Measurement]) -> int:
    best = 1
    speed = {m.decode_threads: m.decode for m in measured}
    for count in sorted(speed)[1:]:
        if speed[count] < WORTH_DOUBLE_THREADS * speed[best]:
            break
        best = count
    return best


def _measure(module: PreTrainedModel, dtype: str, decode_threads: list[int], prefill_threads: int) -> list[Measurement]:
    """Time a few sequences through the engine itself: the best of two rounds, after one to warm up."""
    decoder = checked_decoder(module, _torch_dtype(dtype))
    found = []
    for count in decode_threads:
        times = []
        for _ in range(1 + ROUNDS):
            scheduler = Scheduler(
                decoder, decode_threads=count, prefill_threads=prefill_threads, max_batch=SEQUENCES, cache_tokens=4096
            )
            times.append(_time(scheduler, decoder.shape.vocabulary))
        prefill, decode = (max(rates) for rates in zip(*times[1:], strict=True))
        found.append(Measurement(dtype, count, prefill_threads, prefill, decode))
    return found


def _time(scheduler: Scheduler, vocabulary: int) -> tuple[float, float]:
    """(prefill, decode) tokens per second."""
    prompt = np.random.default_rng(0).integers(0, vocabulary, PROMPT_TOKENS + 1, dtype=np.int32)
    for index in range(SEQUENCES):
        request = SampleRequest(prompt, STEPS)
        scheduler.add(Running(request, Random(index), request.prompt_ids.tolist()))
    scheduler.step()
    prefill = scheduler.stats.prefill_tokens / scheduler.stats.prefill_seconds
    began = time.perf_counter()
    while scheduler.busy:
        scheduler.step()
    return prefill, SEQUENCES * (STEPS - 1) / (time.perf_counter() - began)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
