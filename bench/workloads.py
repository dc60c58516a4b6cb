"""Three shapes that agents' calls take, made from a seed, and the rows that trainers without a forest make of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from longrein.records import Call, Cause, IntArray


@dataclass(frozen=True)
class Size:
    """Of one group of rollouts.

    Attributes:
        rollouts: in the group, all of one task.
        calls: of a rollout's main thread.
        prompt: tokens of the system prompt and the task.
        sampled: tokens of a reply.
        observed: tokens that the harness adds between calls.
        vocabulary: token ids are below this.
    """

    rollouts: int
    calls: int
    prompt: int
    sampled: int
    observed: int
    vocabulary: int


class Maker:
    """Random tokens, and the calls of one rollout."""

    def __init__(self, size: Size, shared: np.random.Generator, rollout: int) -> None:
        self.size = size
        self.task = shared.integers(0, size.vocabulary, size.prompt).astype(np.int32)
        self.helper = shared.integers(0, size.vocabulary, size.prompt).astype(np.int32)
        self.calls: list[Call] = []
        self._random = np.random.default_rng((1, rollout))
        self._rollout = str(rollout)

    def tokens(self, count: int) -> IntArray:
        return self._random.integers(0, self.size.vocabulary, count).astype(np.int32)

    def call(self, prompt: IntArray, sampled: int | None = None) -> IntArray:
        """One call; what was sampled."""
        completion = self.tokens(self.size.sampled if sampled is None else sampled)
        self.calls.append(
            Call(
                call_id=f"{self._rollout}.{len(self.calls)}",
                rollout_id=self._rollout,
                index=len(self.calls),
                agent="main",
                dialect="chat",
                request={},
                reply={},
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=np.full(len(completion), -10.0, np.float32),
                versions=np.zeros(len(completion), np.int32),
                temperature=1.0,
                policy="policy",
                finish_reason="stop",
                cause=Cause.NEW_SESSION,
            )
        )
        return completion

    def thread(self, prompt: IntArray, calls: int) -> IntArray:
        """Calls of which each extends the last; the prompt of the next."""
        for _ in range(calls):
            prompt = np.concatenate([prompt, self.call(prompt), self.tokens(self.size.observed)])
        return prompt


def append_only(maker: Maker) -> None:
    """One conversation that grows."""
    maker.thread(maker.task, maker.size.calls)


def sub_agents(maker: Maker) -> None:
    """A main thread that sends out two sub-agents with one system prompt and is compacted once: it asks for a summary
    of itself and goes on from that.
    """
    size = maker.size
    before = size.calls // 2
    prompt = maker.thread(maker.task, before)
    for _ in range(2):
        maker.thread(np.concatenate([maker.helper, maker.tokens(size.observed)]), max(1, size.calls // 3))
        prompt = np.concatenate([prompt, maker.tokens(size.observed)])
    summary = maker.call(np.concatenate([prompt, maker.tokens(size.observed)]), 2 * size.sampled)
    maker.thread(np.concatenate([maker.task, summary, maker.tokens(size.observed)]), size.calls - before)


def thinking_dropped(maker: Maker) -> None:
    """A conversation whose replies begin with thinking that the next prompt leaves out: half of what is sampled."""
    prompt = maker.task
    for _ in range(maker.size.calls):
        answer = maker.call(prompt)[maker.size.sampled // 2 :]
        prompt = np.concatenate([prompt, answer, maker.tokens(maker.size.observed)])


WORKLOADS: dict[str, Callable[[Maker], None]] = {
    "append-only": append_only,
    "sub-agents and compaction": sub_agents,
    "thinking dropped": thinking_dropped,
}


def make(name: str, size: Size) -> list[list[Call]]:
    """The calls of each rollout of a group."""
    rollouts = []
    for number in range(size.rollouts):
        maker = Maker(size, np.random.default_rng(0), number)
        WORKLOADS[name](maker)
        rollouts.append(maker.calls)
    return rollouts


@dataclass(frozen=True)
class Row:
    """A sequence to train on.

    Attributes:
        tokens: (L,).
        places: (T,) where among them the sampled tokens are.
        targets: (T,) which of the batch's targets they are, counted over calls and their tokens.
    """

    tokens: IntArray
    places: IntArray
    targets: IntArray


def row_per_call(rollouts: list[list[Call]]) -> list[Row]:
    return [row for calls in rollouts_targets(rollouts) for row in calls]


def row_per_session(rollouts: list[list[Call]]) -> list[Row]:
    """Calls of a rollout that extend one another are one row: of an append-only rollout, all of them."""
    sessions: list[Row] = []
    for calls in rollouts_targets(rollouts):
        own: list[Row] = []
        for row in calls:
            before = next((k for k, other in enumerate(own) if extends(row, other)), None)
            if before is None:
                own.append(row)
            else:
                places = np.concatenate([own[before].places, row.places])
                own[before] = Row(row.tokens, places, np.concatenate([own[before].targets, row.targets]))
        sessions += own
    return sessions


def rollouts_targets(rollouts: list[list[Call]]) -> Iterator[list[Row]]:
    """The rows of each rollout's calls."""
    count = 0
    for calls in rollouts:
        rows = []
        for call in calls:
            sampled = np.arange(len(call.completion_ids), dtype=np.int32)
            tokens = np.concatenate([call.prompt_ids, call.completion_ids])
            rows.append(Row(tokens, len(call.prompt_ids) + sampled, count + sampled))
            count += len(sampled)
        yield rows


def extends(row: Row, other: Row) -> bool:
    """Whether a row's prompt starts with all of another."""
    length = len(other.tokens)
    return length <= int(row.places[0]) and np.array_equal(row.tokens[:length], other.tokens)
