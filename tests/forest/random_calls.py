"""Random rollouts that do what harnesses do: extend, branch, retry the same body, start sub-sessions, play completions
back, hang up before the reply arrives, and share prompts (and, with few distinct tokens, samples) with other rollouts.
"""

import numpy as np
from hypothesis import strategies as st

from longrein.records import Call, Cause

VOCABULARY = 6


def make_call(
    prompt: list[int],
    completion: list[int],
    *,
    call_id: str = "c0",
    rollout_id: str = "r0",
    index: int = 0,
    delivered: bool = True,
    temperature: float = 1.0,
    logprobs: list[float] | None = None,
    roles: list[int] | None = None,
) -> Call:
    """A call of these tokens; whatever else it holds does not matter here."""
    return Call(
        call_id=call_id,
        rollout_id=rollout_id,
        index=index,
        agent="main",
        dialect="chat",
        request={},
        reply={},
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.array(logprobs if logprobs is not None else [-1.0] * len(completion), np.float32),
        versions=np.zeros(len(completion), np.int32),
        temperature=temperature,
        policy="policy",
        finish_reason="stop",
        cause=Cause.NEW_SESSION,
        delivered=delivered,
        roles=None if roles is None else np.array(roles, np.uint8),
    )


def tokens(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, VOCABULARY - 1), min_size=least, max_size=most)


@st.composite
def rollouts(draw: st.DrawFn, most_rollouts: int = 4, most_calls: int = 5) -> list[list[Call]]:
    """Calls of each rollout."""
    shared = draw(tokens(1, 6))
    made: list[list[Call]] = []
    for number in range(draw(st.integers(0, most_rollouts))):
        calls: list[Call] = []
        for index in range(draw(st.integers(0, most_calls))):
            made_before = [call for other in made for call in other] + calls
            kind = draw(st.sampled_from(["extend", "branch", "retry", "fresh", "own"]))
            prompt = _prompt(draw, kind, calls, made_before, shared)
            completion = draw(tokens(0, 5))
            calls.append(
                make_call(
                    prompt,
                    completion,
                    call_id=f"r{number}c{index}",
                    rollout_id=f"r{number}",
                    index=index,
                    delivered=draw(st.sampled_from([True, True, True, False])),
                    temperature=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
                    logprobs=[-draw(st.integers(1, 30)) / 10 for _ in completion],
                    roles=draw(st.none() | st.just([draw(st.integers(0, 2)) for _ in completion])),
                )
            )
        made.append(calls)
    return made


def _prompt(draw: st.DrawFn, kind: str, calls: list[Call], before: list[Call], shared: list[int]) -> list[int]:
    if kind == "extend" and calls:
        last = calls[-1]
        return [*last.prompt_ids.tolist(), *last.completion_ids.tolist(), *draw(tokens(0, 4))]
    if kind == "branch" and before:
        other = draw(st.sampled_from(before))
        whole = [*other.prompt_ids.tolist(), *other.completion_ids.tolist()]
        return [*whole[: draw(st.integers(1, len(whole)))], *draw(tokens(0, 4))]
    if kind == "retry" and before:
        return list(draw(st.sampled_from(before)).prompt_ids.tolist())
    if kind == "own":
        return draw(tokens(1, 6))
    return [*shared, *draw(tokens(0, 4))]
