"""Which sequences are computed when: admit, prefill, decode one token for all, end some.

A prompt's keys and values but the last token's come from the prefix cache, or from one packed pass that computes what
is missing there. The last token is the sequence's first decoding step, so sampling happens in one place, and a prompt
that is wholly cached needs no prefill at all. When a sequence ends, what it generated joins the cache: the next turn of
its conversation finds it there. Everything here runs on the compute thread.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import torch
from torch import Tensor

from longrein.engines.cache import Node, PrefixCache
from longrein.engines.cascade import CascadeStep, Segment, shared_nodes
from longrein.engines.decoder import Decoder
from longrein.engines.engine import FinishReason, SampleRequest
from longrein.engines.prefill import prefill
from longrein.engines.sampling import Choice, sample
from longrein.engines.tails import Tails
from longrein.records import IntArray

# Tokens of one prefill pass; bounds the memory of its activations.
PASS_TOKENS = 4096


@dataclass(slots=True)
class Stats:
    """Counters since the start.

    Attributes:
        prefill_tokens: prompt tokens computed in prefill passes.
        reused_tokens: prompt tokens that were cached, or computed once for several prompts.
        decode_steps, decoded_tokens: steps, and the tokens sampled in them.
        prefill_seconds, decode_seconds: time on the compute thread.
    """

    prefill_tokens: int = 0
    reused_tokens: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Running:
    """A request on its way through the engine.

    Attributes:
        ids: prompt and completion so far; all but the last have keys and values.
        leaf: where the prompt (without its last token) ends in the cache.
        row: of the tails.
        segments: nodes it attends to together with others.
        copied: tail columns that hold copies of cached nodes; the generated ones follow.
        columns: tail columns in use.
    """

    request: SampleRequest
    random: Random
    ids: list[int]
    leaf: Node | None = None
    row: int = -1
    segments: list[Segment] = field(default_factory=list)
    copied: int = 0
    columns: int = 0

    @property
    def cached_prompt(self) -> IntArray:
        """The prompt without its last token."""
        return self.request.prompt_ids[:-1]

    @property
    def sampled(self) -> int:
        """Completion tokens so far."""
        return len(self.ids) - len(self.request.prompt_ids)

    def choice(self) -> Choice:
        """How its next token is drawn."""
        request = self.request
        return Choice(self.random.random(), request.temperature, request.top_p, request.top_k)

    def finish_reason(self) -> FinishReason | None:
        """Why the newest token is the last, if it is."""
        if self.ids[-1] in self.request.stop_ids:
            return "stop"
        return "length" if self.sampled >= self.request.max_tokens else None


@dataclass(frozen=True, slots=True)
class Sampled:
    """One new token of one sequence."""

    sequence: Running
    token: int
    logprob: float
    version: int
    finish_reason: FinishReason | None


class Scheduler:
    """The engine's state between steps.

    Args:
        decode_threads, prefill_threads: torch threads of each kind of work (CPU).
        max_batch: sequences decoded at once.
        cache_tokens: tokens the prefix cache keeps.
    """

    def __init__(
        self, decoder: Decoder, *, decode_threads: int, prefill_threads: int, max_batch: int, cache_tokens: int
    ) -> None:
        self.decoder = decoder
        self.cache = PrefixCache(cache_tokens)
        self.version = 0
        self.stats = Stats()
        self._threads = {"decode": decode_threads, "prefill": prefill_threads}
        self._max_batch = max_batch
        self._tails = Tails(decoder.shape)
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._waiting or self._running)

    def add(self, sequence: Running) -> None:
        """Queue a sequence; it joins when there is room."""
        self._waiting.append(sequence)

    def drop(self, sequence: Running) -> None:
        """Forget a cancelled sequence, wherever it is."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._leave(sequence)

    def reset(self) -> None:
        """Forget all sequences and everything cached, and free the memory."""
        self._waiting.clear()
        self._running.clear()
        self._tails.clear()
        self.cache.clear()

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Serve new weights. What was computed with the old ones is forgotten."""
        self.decoder.load(weights)
        self.reset()
        self.version = version

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """Admit what fits, then decode one token for every running sequence."""
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
            self._place(admitted)
        self._close_gaps()
        sampled = self._decode() if self._running else []
        self.cache.evict()
        return sampled

    def _admit(self) -> list[Running]:
        admitted: list[Running] = []
        while self._waiting and len(self._running) + len(admitted) < self._max_batch:
            wanted = len(self._waiting[0].cached_prompt)
            if self.cache.locked_tokens + wanted > self.cache.capacity and (self._running or admitted):
                break
            sequence = self._waiting.popleft()
            sequence.leaf = self.cache.insert(sequence.cached_prompt)
            self.cache.lock(sequence.leaf)
            admitted.append(sequence)
        return admitted

    def _prefill(self, admitted: Sequence[Running]) -> None:
        began = time.perf_counter()
        # A dictionary, for nodes in order and each once: parents come before children.
        fresh = list({node: None for sequence in admitted for node in _path(sequence) if node.keys_values is None})
        torch.set_num_threads(self._threads["prefill"])
        batch: list[Node] = []
        for node in fresh:
            if batch and sum(map(len, batch)) + len(node) > PASS_TOKENS:
                prefill(self.decoder, batch)
                batch = []
            batch.append(node)
        if batch:
            prefill(self.decoder, batch)
        computed = sum(map(len, fresh))
        self.stats.prefill_tokens += computed
        self.stats.reused_tokens += sum(len(sequence.cached_prompt) for sequence in admitted) - computed
        self.stats.prefill_seconds += time.perf_counter() - began

    def _place(self, admitted: Sequence[Running]) -> None:
        """Give new sequences their rows, and move nodes that have become shared out of the tails they lie in."""
        everyone = [*self._running, *admitted]
        wanted = shared_nodes([_path(sequence) for sequence in everyone])
        segments = {part.node: part for sequence in self._running for part in sequence.segments if part.current}
        for node in wanted:
            segments.setdefault(node, Segment(node, node.start, node.computed()))
        held = {sequence.row for sequence in self._running}
        free = iter([row for row in range(self._max_batch) if row not in held])
        for sequence in self._running:
            together = {part.node for part in sequence.segments if part.current}
            if any(node in wanted and node not in together for node in _path(sequence)):
                self._fill(sequence, segments)
        for sequence in admitted:
            sequence.row = next(free)
            self._fill(sequence, segments)
        self._running.extend(admitted)

    def _fill(self, sequence: Running, segments: Mapping[Node, Segment]) -> None:
        """Lay out a sequence's row afresh: segments by reference, other nodes copied, what it generated at the end."""
        path = _path(sequence)
        sequence.segments = [segments[node] for node in path if node in segments]
        parts = [node.computed() for node in path if node not in segments]
        generated = sequence.columns - sequence.copied
        if generated:
            parts.append(self._tails.read(sequence.row, sequence.copied, sequence.columns))
        self._tails.reserve(sequence.row + 1, sum(part.shape[3] for part in parts) + 1)
        sequence.columns = self._tails.fill(sequence.row, parts)
        sequence.copied = sequence.columns - generated

    def _close_gaps(self) -> None:
        """Move the last rows into those that have become free: a step computes rows 0…B-1."""
        count = len(self._running)
        free = set(range(count)) - {sequence.row for sequence in self._running}
        for sequence in self._running:
            if sequence.row >= count:
                target = free.pop()
                self._tails.move(sequence.row, target, sequence.columns)
                sequence.row = target
        self._running.sort(key=lambda sequence: sequence.row)

    def _decode(self) -> list[Sampled]:
        began = time.perf_counter()
        running, device = list(self._running), self.decoder.shape.device
        torch.set_num_threads(self._threads["decode"])
        columns = [sequence.columns for sequence in running]
        self._tails.reserve(len(running), max(columns) + 1, shrink=True)
        attend = CascadeStep(self._tails, [sequence.segments for sequence in running], columns)
        ids = torch.tensor([sequence.ids[-1] for sequence in running], device=device)
        positions = torch.tensor([len(sequence.ids) - 1 for sequence in running], device=device)
        logits = self.decoder.logits(self.decoder.forward(ids, positions, attend))
        tokens, logprobs = sample(logits, [sequence.choice() for sequence in running])
        sampled = [self._append(*each) for each in zip(running, tokens, logprobs, strict=True)]
        self.stats.decode_steps += 1
        self.stats.decoded_tokens += len(sampled)
        self.stats.decode_seconds += time.perf_counter() - began
        return sampled

    def _append(self, sequence: Running, token: int, logprob: float) -> Sampled:
        sequence.columns += 1
        sequence.ids.append(token)
        reason = sequence.finish_reason()
        if reason is not None:
            self._keep(sequence)
            self._leave(sequence)
        return Sampled(sequence, token, logprob, self.version, reason)

    def _keep(self, sequence: Running) -> None:
        """Put what a sequence generated into the cache."""
        leaf = self.cache.insert(np.array(sequence.ids[:-1], np.int32))
        offset = sequence.copied - len(sequence.cached_prompt)
        for node in leaf.path():
            if node.keys_values is None:
                node.keys_values = self._tails.read(sequence.row, node.start + offset, node.end + offset)

    def _leave(self, sequence: Running) -> None:
        self._running.remove(sequence)
        assert sequence.leaf is not None
        self.cache.unlock(sequence.leaf)

    def snapshot(self) -> Stats:
        """A copy of the counters."""
        return replace(self.stats)


def _path(sequence: Running) -> list[Node]:
    assert sequence.leaf is not None, "only admitted sequences have a path"
    return sequence.leaf.path()
