"""The loss again, naively: one plain forward of the transformers model per call, one token at a time."""

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longrein.learning.algorithms import Algorithm
from longrein.records import Call


def loss(
    module: PreTrainedModel,
    rollouts: Sequence[Sequence[Call]],
    rewards: Sequence[float],
    algorithm: Algorithm,
    reference: Callable[[Call], Tensor] | None = None,
) -> Tensor:
    """The loss of one group of rollouts, GRPO with rollout mean."""
    total = torch.zeros((), dtype=torch.float64)
    mean, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    for calls, reward in zip(rollouts, rewards, strict=True):
        trained = [call for call in calls if call.delivered]
        count = sum(len(call.completion_ids) for call in trained)
        for call in trained:
            known = reference(call) if reference is not None else None
            for place, distribution in enumerate(distributions(module, call)):
                token = int(call.completion_ids[place])
                current = distribution[token]
                ratio = torch.exp(current - current.detach())
                importance = min(math.exp(float(current.detach()) - float(call.logprobs[place])), 2.0)
                term = -ratio * (reward - mean) / spread * importance
                if known is not None:
                    apart = known[place] - current
                    term = term + algorithm.kl_coefficient * (torch.exp(apart) - apart - 1)
                entropy = -(distribution.exp() * distribution).sum()
                term = term - algorithm.entropy_coefficient * entropy
                total = total + term / (count * len(rollouts))
    return total


def distributions(module: PreTrainedModel, call: Call) -> Tensor:
    """(C, V) log-probabilities that predict each completion token, at the call's temperature."""
    ids = torch.tensor([*call.prompt_ids.tolist(), *call.completion_ids.tolist()])[None]
    logits = module(ids, use_cache=False).logits[0]
    before = len(call.prompt_ids) - 1
    return torch.log_softmax(logits[before : before + len(call.completion_ids)] / (call.temperature or 1.0), -1)


def token_logprobs(module: PreTrainedModel, call: Call) -> Tensor:
    """(C,) of the completion's tokens."""
    return distributions(module, call).gather(1, torch.tensor(call.completion_ids.tolist())[:, None].long())[:, 0]
