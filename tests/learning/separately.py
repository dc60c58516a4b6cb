"""What the learner computes over a forest, without one: a plain forward of the transformers model for each call."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longrein.config import AlgorithmSection
from longrein.learning.batch import TrainBatch, TrainGroup, TrainRollout
from longrein.records import Call
from tests.learning import naive
from tests.learning.naive import Attempt, Token, Turn


def loss(
    module: PreTrainedModel,
    rollouts: Sequence[Sequence[Call]],
    rewards: Sequence[float],
    algorithm: AlgorithmSection,
    reference: Callable[[Call], Tensor] | None = None,
) -> Tensor:
    """The loss of the first optimizer step on one group of rollouts."""
    made = [TrainRollout(str(index), rewards[index], tuple(calls)) for index, calls in enumerate(rollouts)]
    known = {call.call_id: reference(call) for calls in rollouts for call in calls} if reference else None
    return naive.loss(attempts(module, TrainBatch((TrainGroup("g", tuple(made)),)), reference=known), algorithm, [0])


def attempts(
    module: PreTrainedModel,
    batch: TrainBatch,
    proximal: Mapping[str, Tensor] | None = None,
    reference: Mapping[str, Tensor] | None = None,
) -> list[list[Attempt]]:
    """A batch as the naive loss reads it.

    Args:
        proximal, reference: (C,) log-probabilities by call id; without the former, the module is the proximal policy.
    """
    return [[_attempt(module, rollout, proximal, reference) for rollout in group.rollouts] for group in batch.groups]


def _attempt(
    module: PreTrainedModel,
    rollout: TrainRollout,
    proximal: Mapping[str, Tensor] | None,
    reference: Mapping[str, Tensor] | None,
) -> Attempt:
    calls = [call for call in rollout.calls if call.train and call.delivered and len(call.completion_ids)]
    rewards = rollout.process or [None] * len(calls)
    turns = []
    for call, reward in zip(calls, rewards, strict=True):
        old = proximal[call.call_id] if proximal is not None else None
        known = reference[call.call_id] if reference is not None else None
        tokens = []
        for place, distribution in enumerate(distributions(module, call)):
            current = distribution[int(call.completion_ids[place])]
            tokens.append(
                Token(
                    behaviour=float(call.logprobs[place]),
                    proximal=float(current.detach() if old is None else old[place]),
                    current=current,
                    entropy=-(distribution.exp() * distribution).sum(),
                    reference=0.0 if known is None else float(known[place]),
                )
            )
        turns.append(Turn(tokens, reward, call.agent))
    return Attempt(rollout.reward, turns, rollout.cut_off)


def distributions(module: PreTrainedModel, call: Call) -> Tensor:
    """(C, V) log-probabilities that predict each completion token, at the call's temperature."""
    ids = torch.tensor([*call.prompt_ids.tolist(), *call.completion_ids.tolist()])[None]
    logits = module(ids, use_cache=False).logits[0]
    before = len(call.prompt_ids) - 1
    return torch.log_softmax(logits[before : before + len(call.completion_ids)] / (call.temperature or 1.0), -1)


def token_logprobs(module: PreTrainedModel, call: Call) -> Tensor:
    """(C,) of the completion's tokens."""
    return distributions(module, call).gather(1, torch.tensor(call.completion_ids.tolist())[:, None].long())[:, 0]


def gradient(module: PreTrainedModel) -> Tensor:
    """That of every trained parameter, in one vector."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.cat([(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in trained])
