"""The algorithms again, from the papers and from what the configuration says of its keys: one token at a time.

Deliberately naive: plain loops over rollouts, calls and tokens, in float64, branches where the library has clamps.
``loss`` is the loss for any choice of the keys; ``PAPERS`` are the named algorithms' objectives as their papers print
them.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longrein.config import AlgorithmSection


@dataclass(frozen=True)
class Token:
    """A sampled token: what is known of its probability under each policy.

    Attributes:
        current: log-probability now, a float64 scalar with gradient.
        entropy: of the distribution it was drawn from, a float64 scalar with gradient.
    """

    behaviour: float
    proximal: float
    current: Tensor
    entropy: Tensor
    reference: float = 0.0

    @property
    def now(self) -> float:
        return float(self.current.detach())


@dataclass(frozen=True)
class Turn:
    """A trainable call."""

    tokens: Sequence[Token]
    reward: float | None = None
    agent: str = "main"


@dataclass(frozen=True)
class Attempt:
    """A rollout."""

    reward: float
    turns: Sequence[Turn]
    cut_off: bool = False

    @property
    def tokens(self) -> list[Token]:
        return [token for turn in self.turns for token in turn.tokens]


Groups = Sequence[Sequence[Attempt]]


def optimizer_steps(groups: int, algorithm: AlgorithmSection) -> list[list[int]]:
    """Which groups each optimizer step learns from: dealt out in turn like cards, the same in every epoch."""
    hands: list[list[int]] = [[] for _ in range(algorithm.mini_batches)]
    for group in range(groups):
        hands[group % algorithm.mini_batches].append(group)
    return [hand for _ in range(algorithm.epochs) for hand in hands]


def loss(groups: Groups, algorithm: AlgorithmSection, chosen: Collection[int]) -> Tensor:
    """The loss of an optimizer step on the chosen groups; baselines are taken over all of them."""
    total = torch.zeros((), dtype=torch.float64)
    for number in sorted(chosen):
        for place, attempt in enumerate(groups[number]):
            if not trained(attempt, algorithm):
                continue
            weight = weight_of(attempt, [groups[index] for index in sorted(chosen)], algorithm)
            for index, turn in enumerate(attempt.turns):
                advantage = worth(groups, number, place, turn.agent, algorithm)
                advantage *= algorithm.discount ** (len(attempt.turns) - 1 - index)
                if algorithm.process.coefficient != 0:
                    extra = process_advantage(groups[number], attempt, index, algorithm)
                    advantage += algorithm.process.coefficient * extra
                for token in turn.tokens:
                    total = total + weight * token_loss(token, turn, attempt, advantage, algorithm)
    return total


def trained(attempt: Attempt, algorithm: AlgorithmSection) -> bool:
    return bool(attempt.tokens) and not (algorithm.cut_off == "mask" and attempt.cut_off)


def reward_of(attempt: Attempt, algorithm: AlgorithmSection) -> float:
    """DAPO, Eq. 13."""
    longest, buffer, length = algorithm.overlong_limit, algorithm.overlong_buffer, len(attempt.tokens)
    if longest is None or length <= longest - buffer:
        return attempt.reward
    if length <= longest:
        return attempt.reward + ((longest - buffer) - length) / buffer
    return attempt.reward - 1


def worth(groups: Groups, number: int, place: int, agent: str, algorithm: AlgorithmSection) -> float:
    """The advantage of a rollout: of its group's rollouts, or of those in which this agent took part."""
    rewards: list[list[float]] = []
    column = 0
    for group in groups:
        rewards.append([])
        for index, attempt in enumerate(group):
            if group is groups[number] and index == place:
                column = len(rewards[-1])
            if algorithm.baseline == "rollout" or agent in [turn.agent for turn in attempt.turns]:
                rewards[-1].append(reward_of(attempt, algorithm))
    return advantages(rewards, algorithm.advantage)[number][column]


def alike(rewards: Sequence[float]) -> bool:
    return len(rewards) < 2 or max(rewards) - min(rewards) < 1e-9


def advantages(rewards: Sequence[Sequence[float]], kind: str) -> list[list[float]]:
    everyone = [reward for group in rewards for reward in group]
    centred = [reward - statistics.fmean(group) for group in rewards for reward in group]
    found = []
    for group in rewards:
        row = []
        for place, reward in enumerate(group):
            others = [*group[:place], *group[place + 1 :]]
            if kind == "reward":
                row.append(reward)
            elif kind == "batch_std":
                row.append(
                    0.0 if alike(everyone) else (reward - statistics.fmean(everyone)) / statistics.stdev(everyone)
                )
            elif alike(group):
                row.append(0.0)
            elif kind == "group_std":
                row.append((reward - statistics.fmean(group)) / statistics.stdev(group))
            elif kind == "group_mean":
                row.append(reward - statistics.fmean(group))
            elif kind == "leave_one_out":
                row.append(reward - statistics.fmean(others))
            else:
                assert kind == "group_mean_batch_std"
                row.append((reward - statistics.fmean(group)) / statistics.stdev(centred))
        found.append(row)
    return found


def process_advantage(group: Sequence[Attempt], attempt: Attempt, index: int, algorithm: AlgorithmSection) -> float:
    """DeepSeekMath, section 4.1.3: rewards normalised over the group's, then summed from this call to the last."""
    given = [turn.reward for other in group for turn in other.turns if turn.reward is not None]
    if alike(given):
        return 0.0
    divides = algorithm.advantage in ("group_std", "batch_std", "group_mean_batch_std")
    total = 0.0
    for later in range(index, len(attempt.turns)):
        reward = attempt.turns[later].reward
        if reward is not None:
            normalised = (reward - statistics.fmean(given)) / (statistics.stdev(given) if divides else 1)
            total += algorithm.process.discount ** (later - index) * normalised
    return total


def weight_of(attempt: Attempt, step: Groups, algorithm: AlgorithmSection) -> float:
    """1/(R·T_rollout), 1/ΣT or 1/(R·L); R counts every rollout of the step, T what is trained."""
    rollouts = sum(len(group) for group in step)
    if algorithm.normalization == "rollout_mean":
        return 1 / (rollouts * len(attempt.tokens))
    if algorithm.normalization == "token_mean":
        return 1 / sum(len(other.tokens) for group in step for other in group if trained(other, algorithm))
    return 1 / (rollouts * algorithm.constant_length)


def token_loss(token: Token, turn: Turn, attempt: Attempt, advantage: float, algorithm: AlgorithmSection) -> Tensor:
    value = surrogate(token, ratio(token, turn, attempt, algorithm), advantage, algorithm)
    found = -importance(token, turn, attempt, algorithm) * value
    found = found + algorithm.kl_coefficient * divergence(token, algorithm.kl_estimator)
    return found - algorithm.entropy_coefficient * token.entropy


def members(token: Token, turn: Turn, attempt: Attempt, level: str) -> Sequence[Token]:
    return {"token": [token], "call": turn.tokens, "rollout": attempt.tokens}[level]


def ratio(token: Token, turn: Turn, attempt: Attempt, algorithm: AlgorithmSection) -> Tensor:
    """GSPO, Eq. 7 and 14: the value is the geometric mean's, the gradient this token's."""
    apart = []
    for each in members(token, turn, attempt, algorithm.ratio_level):
        apart.append(each.now - (each.behaviour if algorithm.old_policy == "behaviour" else each.proximal))
    return math.exp(statistics.fmean(apart)) * torch.exp(token.current - token.current.detach())


def surrogate(token: Token, ratio: Tensor, advantage: float, algorithm: AlgorithmSection) -> Tensor:
    lowest, highest, value = 1 - algorithm.clip_low, 1 + algorithm.clip_high, float(ratio.detach())
    if algorithm.surrogate == "policy_gradient":
        return advantage * token.current
    if algorithm.surrogate == "cispo":
        return max(lowest, min(value, highest)) * advantage * token.current
    still = torch.ones((), dtype=torch.float64)
    if advantage > 0 and value > highest:
        return still * advantage * highest
    if advantage < 0 and value < lowest:
        return still * advantage * lowest
    if advantage < 0 and algorithm.dual_clip is not None and value > algorithm.dual_clip:
        return still * advantage * algorithm.dual_clip
    return ratio * advantage


def importance(token: Token, turn: Turn, attempt: Attempt, algorithm: AlgorithmSection) -> float:
    ratios = []
    for each in members(token, turn, attempt, algorithm.importance_level):
        ratios.append(math.exp(each.proximal) / math.exp(each.behaviour))
    weight = math.prod(ratios)
    if algorithm.importance_mean == "geometric":
        weight **= 1 / len(ratios)
    too_high = weight > algorithm.importance_high
    if algorithm.importance == "none":
        return 1.0
    if algorithm.importance == "truncate":
        return algorithm.importance_high if too_high else weight
    too_low = algorithm.importance == "band" and weight < algorithm.importance_low
    return 0.0 if too_high or too_low else weight


def divergence(token: Token, estimator: str) -> Tensor:
    """Schulman 2020: of a sample from the current policy."""
    apart = token.current - token.reference
    if estimator == "k1":
        return apart
    if estimator == "k2":
        return 0.5 * apart * apart
    return math.exp(token.reference) / torch.exp(token.current) - 1 + apart


# What follows knows no keys: each objective as printed, to be maximised, for a group (or a batch) whose old policy is
# the proximal one. Its constants are the paper's.


def _group_advantages(group: Sequence[Attempt]) -> list[float]:
    rewards = [attempt.reward for attempt in group]
    if alike(rewards):
        return [0.0 for _ in rewards]
    return [(reward - statistics.fmean(rewards)) / statistics.stdev(rewards) for reward in rewards]


def _ppo(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def _token_ratio(token: Token) -> Tensor:
    return torch.exp(token.current) / math.exp(token.proximal)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()


def _token_mean(groups: Groups, worth: Sequence[Sequence[float]], low: float, high: float) -> Tensor:
    terms = []
    for group, advantages in zip(groups, worth, strict=True):
        for attempt, advantage in zip(group, advantages, strict=True):
            terms += [_ppo(_token_ratio(token), advantage, low, high) for token in attempt.tokens]
    return _sum(terms) / len(terms)


def grpo(groups: Groups) -> Tensor:
    """DeepSeekMath, arXiv:2402.03300, Eq. 3, β = 0."""
    (group,) = groups
    outputs = []
    for attempt, advantage in zip(group, _group_advantages(group), strict=True):
        terms = [_ppo(_token_ratio(token), advantage, 0.2, 0.2) for token in attempt.tokens]
        outputs.append(_sum(terms) / len(terms))
    return _sum(outputs) / len(group)


def dapo(groups: Groups) -> Tensor:
    """DAPO, arXiv:2503.14476, Eq. 8."""
    (group,) = groups
    return _token_mean(groups, [_group_advantages(group)], 0.2, 0.28)


def starpo_s(groups: Groups) -> Tensor:
    """RAGEN, arXiv:2504.20073, section 3.3: clip-higher, no KL, on the groups that are left."""
    return _token_mean(groups, [_group_advantages(group) for group in groups], 0.2, 0.28)


def dr_grpo(groups: Groups) -> Tensor:
    """Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2; the sum is divided by L = 1024."""
    (group,) = groups
    mean = statistics.fmean(attempt.reward for attempt in group)
    terms = [_ppo(_token_ratio(token), each.reward - mean, 0.2, 0.2) for each in group for token in each.tokens]
    return _sum(terms) / len(group) / 1024


def rloo(groups: Groups) -> Tensor:
    """Back to Basics, arXiv:2402.14740, section 2.3; the sum is divided by L = 1024."""
    (group,) = groups
    terms = []
    for attempt in group:
        baseline = statistics.fmean(other.reward for other in group if other is not attempt)
        sequence = _sum([token.current for token in attempt.tokens])
        terms.append((attempt.reward - baseline) * sequence)
    return _sum(terms) / len(group) / 1024


def reinforce_plus_plus(groups: Groups) -> Tensor:
    """REINFORCE++, arXiv:2501.03262: one mean and one deviation for the batch."""
    rewards = [attempt.reward for group in groups for attempt in group]
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards) or 1.0
    worth = [[(attempt.reward - mean) / deviation for attempt in group] for group in groups]
    return _token_mean(groups, worth, 0.2, 0.2)


def reinforce_plus_plus_baseline(groups: Groups) -> Tensor:
    """REINFORCE++-baseline, arXiv:2501.03262: the group's mean, the batch's deviation of what is left."""
    centred = []
    for group in groups:
        mean = statistics.fmean(attempt.reward for attempt in group)
        centred.append([attempt.reward - mean for attempt in group])
    deviation = statistics.stdev([value for row in centred for value in row]) or 1.0
    return _token_mean(groups, [[value / deviation for value in row] for row in centred], 0.2, 0.2)


def gspo(groups: Groups) -> Tensor:
    """GSPO, arXiv:2507.18071, Eq. 5 and 7: the sequence's ratio with its own gradient."""
    (group,) = groups
    terms = []
    for attempt, advantage in zip(group, _group_advantages(group), strict=True):
        apart = _sum([token.current - token.proximal for token in attempt.tokens])
        terms.append(_ppo(torch.exp(apart / len(attempt.tokens)), advantage, 3e-4, 4e-4))
    return _sum(terms) / len(group)


def cispo(groups: Groups) -> Tensor:
    """MiniMax-M1, arXiv:2506.13585, Eq. 4 and 5, no bound below."""
    (group,) = groups
    terms = []
    for attempt, advantage in zip(group, _group_advantages(group), strict=True):
        for token in attempt.tokens:
            weight = torch.clamp(_token_ratio(token), max=1.28).detach()
            terms.append(weight * advantage * token.current)
    return _sum(terms) / len(terms)


def policy_gradient(groups: Groups) -> Tensor:
    """Williams 1992; the sum is divided by L = 1024."""
    everyone = [attempt for group in groups for attempt in group]
    terms = [attempt.reward * token.current for attempt in everyone for token in attempt.tokens]
    return _sum(terms) / len(everyone) / 1024


PAPERS: Mapping[str, Callable[[Groups], Tensor]] = {
    function.__name__: function
    for function in (
        grpo,
        dapo,
        dr_grpo,
        rloo,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        gspo,
        cispo,
        starpo_s,
        policy_gradient,
    )
}
