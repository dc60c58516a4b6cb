"""The engine inside the process: continuous batching over one prefix cache, on the compute thread it shares with the
learner.

The event loop holds requests and hands out tokens; a pump sends one step after another to the compute thread as long
as there is work. Invariant: every sample ends, with a finish reason or an error, whatever a step does.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from longrein.engines.engine import SampleChunk, SampleRequest
from longrein.engines.parity import checked_decoder
from longrein.engines.scheduler import Running, Sampled, Scheduler, Stats
from longrein.engines.weights import context_length as own_context_length
from longrein.errors import EngineError
from longrein.records import POLICY

_Waiter = asyncio.Queue[Sampled | EngineError]


class EmbeddedEngine:
    """An ``Engine`` over a transformers module's weights, copied in ``dtype``.

    Args:
        module: a Llama-, Mistral-, Qwen2- or Qwen3-like model, bare or inside PEFT; it is read once and not kept.
        dtype: of weights, activations and cache.
        decode_threads, prefill_threads: torch threads of each kind of work.
        max_batch: sequences decoded at once; more wait.
        cache_tokens: tokens whose keys and values are kept for sharing once nothing runs.
        context_length: most tokens of prompt and completion; None is the model's own.
        executor: its one thread does all computing, the learner's included.
        seed: of the engine's own generator, for requests without a seed.

    Raises:
        ModelError: the architecture cannot be served.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        dtype: torch.dtype,
        decode_threads: int,
        prefill_threads: int,
        max_batch: int,
        cache_tokens: int,
        context_length: int | None,
        executor: ThreadPoolExecutor,
        seed: int,
    ) -> None:
        own = own_context_length(module)
        self.context_length = own if context_length is None else min(context_length, own)
        self.version = 0
        self._scheduler = Scheduler(
            checked_decoder(module, dtype),
            decode_threads=decode_threads,
            prefill_threads=prefill_threads,
            max_batch=max_batch,
            cache_tokens=cache_tokens,
        )
        self._threads = (decode_threads, prefill_threads)
        self._executor = executor
        self._random = Random(seed)
        self._waiters: dict[Running, _Waiter] = {}
        self._arriving: list[Running] = []
        self._leaving: list[Running] = []
        self._pump: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def stats(self) -> Stats:
        """The counters so far."""
        return self._scheduler.snapshot()

    @property
    def cached_tokens(self) -> int:
        """Tokens in the prefix cache."""
        return self._scheduler.cache.tokens

    def describe(self) -> str:
        """One line for people."""
        shape, cache = self._scheduler.decoder.shape, self._scheduler.cache
        name = str(shape.dtype).removeprefix("torch.")
        size = cache.capacity * shape.bytes_per_token / 2**30
        decode, prefill = self._threads
        return (
            f"engine in {name} on {shape.device.type}, {decode} thread{'s' * (decode > 1)} decoding, {prefill} "
            f"prefilling, prefix cache of {cache.capacity} tokens ({size:.1f} GiB)"
        )

    def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """Yield chunks until one carries a finish reason; closing the iterator early cancels the sample.

        Raises:
            EngineError: at once, if the request cannot be served; from the iterator, if the engine fails.
        """
        self._validate(request)
        return self._stream(request)

    async def publish(self, weights: Mapping[str, Any], version: int, policy: str = POLICY) -> None:
        """Serve new weights: transformers' parameter names → tensors, all or the changed ones. It serves one policy,
        whatever that is called.

        Raises:
            EngineError: samples are in flight, or a name or shape is unknown (nothing is loaded then).
        """
        if self._waiters:
            raise EngineError(
                f"publish of version {version}: {len(self._waiters)} samples are in flight. Close the gate and let "
                "them end first."
            )
        await self._compute(self._scheduler.publish, weights, version)
        self.version = version

    async def close(self) -> None:
        """Cancel what is in flight and free the memory."""
        self._closed = True
        self._fail(EngineError("the engine was closed while the sample was in flight."))
        if self._pump is not None:
            await asyncio.wait([self._pump])
        with contextlib.suppress(EngineError):  # the executor may have been shut down before
            await self._compute(self._scheduler.reset)

    async def _stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        if self._closed:
            raise EngineError("the engine is closed.")
        random = self._random if request.seed is None else Random(request.seed)
        sequence = Running(request, random, request.prompt_ids.tolist())
        waiter = self._waiters[sequence] = _Waiter()
        self._arriving.append(sequence)
        self._start_pump()
        try:
            while True:
                chunk = _chunk([await waiter.get(), *_rest(waiter)])
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            if self._waiters.pop(sequence, None) is not None:
                self._leaving.append(sequence)
                self._start_pump()

    def _start_pump(self) -> None:
        if not self._closed and (self._pump is None or self._pump.done()):
            self._pump = asyncio.get_running_loop().create_task(self._run(), name="longrein-engine")

    async def _run(self) -> None:
        """Step after step until nothing waits, runs or leaves."""
        while self._waiters or self._leaving:
            arriving, self._arriving = self._arriving, []
            leaving, self._leaving = self._leaving, []
            try:
                sampled = await self._compute(self._step, arriving, leaving)
            except EngineError as error:
                self._fail(error)
                continue
            for each in sampled:
                waiter = self._waiters.get(each.sequence)
                if waiter is not None:
                    waiter.put_nowait(each)
                    if each.finish_reason is not None:
                        del self._waiters[each.sequence]

    def _step(self, arriving: list[Running], leaving: list[Running]) -> list[Sampled]:
        """On the compute thread."""
        for sequence in arriving:
            self._scheduler.add(sequence)
        for sequence in leaving:
            self._scheduler.drop(sequence)
        try:
            return self._scheduler.step()
        except BaseException:
            # Half a step may have happened: nothing of what is there can be trusted.
            self._scheduler.reset()
            raise

    async def _compute(self, work: Any, *args: Any) -> Any:
        """Run ``work`` on the compute thread; whatever it raises becomes an EngineError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"the embedded engine failed: {type(error).__name__}: {error}") from error

    def _fail(self, error: EngineError) -> None:
        """End every sample with ``error``."""
        for waiter in self._waiters.values():
            waiter.put_nowait(error)
        self._waiters.clear()
        self._arriving.clear()

    def _validate(self, request: SampleRequest) -> None:
        ids = np.asarray(request.prompt_ids)
        vocabulary = self._scheduler.decoder.shape.vocabulary
        problem = None
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            problem = f"prompt_ids must be a non-empty row of integers, not shape {ids.shape} of {ids.dtype}"
        elif ids.min() < 0 or ids.max() >= vocabulary:
            problem = f"prompt_ids reach from {ids.min()} to {ids.max()}; the vocabulary has 0 to {vocabulary - 1}"
        elif request.max_tokens < 1:
            problem = f"max_tokens is {request.max_tokens}; at least 1 is needed"
        elif ids.size + request.max_tokens > self.context_length:
            problem = (
                f"{ids.size} prompt tokens and {request.max_tokens} to sample exceed the context length of "
                f"{self.context_length}"
            )
        elif not 0 <= request.temperature < float("inf"):
            problem = f"temperature is {request.temperature}; it must be 0 (greedy) or a positive number"
        elif not 0 < request.top_p <= 1:
            problem = f"top_p is {request.top_p}; it must be above 0 and at most 1"
        elif request.top_k < 0:
            problem = f"top_k is {request.top_k}; it must be 0 (all) or more"
        if problem is not None:
            raise EngineError(f"sample: {problem}.")


def _rest(waiter: _Waiter) -> list[Sampled | EngineError]:
    """What else has arrived."""
    return [waiter.get_nowait() for _ in range(waiter.qsize())]


def _chunk(arrived: list[Sampled | EngineError]) -> SampleChunk:
    """One chunk of what arrived for a sample, in order."""
    tokens = []
    for each in arrived:
        if isinstance(each, EngineError):
            raise EngineError(str(each)) from each
        tokens.append(each)
    return SampleChunk(
        [each.token for each in tokens],
        [each.logprob for each in tokens],
        tokens[-1].version,
        tokens[-1].finish_reason,
    )
