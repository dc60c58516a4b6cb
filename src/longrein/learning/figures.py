"""What an update measured, gathered while it runs and told when it is done."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from longrein.config import AlgorithmSection
from longrein.forest.packing import total_tokens
from longrein.forest.targets import Targets
from longrein.learning.batch import TrainBatch, Work
from longrein.learning.capo import RoleNorms
from longrein.learning.importance import Weights, effective_sample_size, importance_weights
from longrein.learning.passes import Tally

Values = NDArray[np.float64]

QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True, slots=True)
class AgeReport:
    """What targets of one age are like; an age is how many versions older than the policy the sampler was.

    Attributes:
        tokens: how many.
        effective_sample_size: of the importance weights before they are cut, as a share of their number.
        importance_cut: share of the weights that were truncated or left out.
        ratio_p01, _p50, _p99: quantiles of the ratio proximal/behaviour, at the level it is taken.
        clip_fraction_low, _high: share of targets, over all passes, whose surrogate was clipped.
        kl_behaviour: k3 estimate of KL(behaviour‖proximal), in nats.
        entropy: mean of -log p of the sampled tokens, an estimate in nats.
        logprob_difference_mean: |proximal - behaviour| log-probability.
    """

    tokens: int
    effective_sample_size: float
    importance_cut: float
    ratio_p01: float
    ratio_p50: float
    ratio_p99: float
    clip_fraction_low: float
    clip_fraction_high: float
    kl_behaviour: float
    entropy: float
    logprob_difference_mean: float


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update did. Means, shares and differences are over the targets computed.

    Attributes:
        learned: whether the weights moved.
        why_not: if they did not, or not as often as they should have, why.
        loss: the weighted sum, a mean over the optimizer steps.
        grad_norm: before clipping, a mean over the optimizer steps.
        learning_rate: of the last optimizer step.
        optimizer_steps: made.
        tokens_trained: targets in the loss, those without advantage included.
        tokens_stale: targets left out because they are older than the batch allows.
        tokens_flat: tokens of all trainable calls with nothing shared.
        tokens_forest: distinct tokens among them.
        tokens_computed: tokens computed with gradient: without what no credited target needs, with what was computed
            again.
        micro_batches: passes they took.
        logprob_difference_mean, _p99, _max: |proximal - behaviour| log-probability.
        ratio_outside: share of targets whose proximal/behaviour ratio lies outside 0.8 to 1.2.
        importance_cut: share of importance weights that were truncated or left out.
        effective_sample_size: of the importance weights before that, as a share of their number.
        ratio_p01, _p50, _p99: quantiles of that ratio, at the level it is taken.
        clip_fraction: share of targets, over all passes, whose surrogate was clipped, and of it below and above.
        kl_behaviour: k3 estimate of KL(behaviour‖proximal), in nats.
        kl: mean estimate of KL to the reference; 0 where there is none.
        entropy: mean of -log p of the sampled tokens, an estimate in nats.
        by_age: the same for the targets of each version age.
        roles: CAPO's gradients, a mean over the optimizer steps.
        seconds_learning: of this update.
        policies: reports of further policies.
    """

    learned: bool
    why_not: str
    loss: float
    grad_norm: float
    learning_rate: float
    optimizer_steps: int
    tokens_trained: int
    tokens_stale: int
    tokens_flat: int
    tokens_forest: int
    tokens_computed: int
    micro_batches: int
    groups: int
    groups_with_contrast: int
    logprob_difference_mean: float
    logprob_difference_p99: float
    logprob_difference_max: float
    ratio_outside: float
    importance_cut: float
    effective_sample_size: float
    ratio_p01: float
    ratio_p50: float
    ratio_p99: float
    clip_fraction: float
    clip_fraction_low: float
    clip_fraction_high: float
    kl_behaviour: float
    kl: float
    entropy: float
    by_age: Mapping[str, AgeReport]
    roles: RoleNorms | None
    seconds_learning: float
    policies: Mapping[str, "UpdateReport"] = field(default_factory=dict)


@dataclass(slots=True)
class Figures:
    """Gathered over the optimizer steps of an update.

    Attributes:
        norms: gradient norm before each step.
        rate: of the last.
        steps: made.
        why_not: why one was not made.
        roles: CAPO's gradients at each.
    """

    tally: Tally = field(default_factory=Tally)
    norms: list[float] = field(default_factory=list)
    rate: float = 0.0
    steps: int = 0
    why_not: str = ""
    roles: list[RoleNorms] = field(default_factory=list)

    def report(
        self, batch: TrainBatch, work: Work, algorithm: AlgorithmSection, proximal: Values | None, seconds: float
    ) -> UpdateReport:
        """Everything that is told of the update.

        Args:
            proximal: (T,) where it was computed beforehand; else the passes' own log-probabilities are proximal.
        """
        targets = work.merged.targets
        visits = _Visits.of(self.tally)
        if proximal is None:
            # What was not computed counts as sampled by the learner itself.
            proximal = targets.logprob.astype(np.float64)
            proximal[visits.target] = visits.logprob
        seen = np.unique(visits.target)
        weights = importance_weights(algorithm, targets, proximal)
        age = batch.version - targets.version
        whole = _age_report(seen, visits, targets, proximal, weights)
        apart = np.abs(proximal - targets.logprob)[seen] if len(seen) else np.zeros(1)
        ratio = np.exp(proximal - targets.logprob)[seen]
        return UpdateReport(
            learned=self.steps > 0,
            why_not=self.why_not,
            loss=self.tally.loss / max(len(self.norms), 1),
            grad_norm=sum(self.norms) / max(len(self.norms), 1),
            learning_rate=self.rate,
            optimizer_steps=self.steps,
            tokens_trained=len(targets) - int(work.stale.sum()),
            tokens_stale=int(work.stale.sum()),
            tokens_flat=work.merged.tokens_flat,
            tokens_forest=len(work.merged.forest),
            tokens_computed=total_tokens(work.parts),
            micro_batches=len(work.parts),
            groups=work.credit.groups,
            groups_with_contrast=work.credit.groups_with_contrast,
            logprob_difference_mean=float(apart.mean()),
            logprob_difference_p99=float(np.quantile(apart, 0.99, method="higher")),
            logprob_difference_max=float(apart.max()),
            ratio_outside=_share((ratio < 0.8) | (ratio > 1.2)),
            importance_cut=whole.importance_cut,
            effective_sample_size=whole.effective_sample_size,
            ratio_p01=whole.ratio_p01,
            ratio_p50=whole.ratio_p50,
            ratio_p99=whole.ratio_p99,
            clip_fraction=whole.clip_fraction_low + whole.clip_fraction_high,
            clip_fraction_low=whole.clip_fraction_low,
            clip_fraction_high=whole.clip_fraction_high,
            kl_behaviour=whole.kl_behaviour,
            kl=float(visits.kl.mean()) if len(visits.kl) else 0.0,
            entropy=whole.entropy,
            by_age={
                str(value): _age_report(seen[age[seen] == value], visits, targets, proximal, weights)
                for value in np.unique(age[seen]).tolist()
            },
            roles=_mean(self.roles),
            seconds_learning=seconds,
        )


def _mean(norms: list[RoleNorms]) -> RoleNorms | None:
    if not norms:
        return None
    columns = zip(*((each.cosine, each.action, each.arguments) for each in norms), strict=True)
    return RoleNorms(*(sum(column) / len(norms) for column in columns))


@dataclass(frozen=True, slots=True)
class _Visits:
    """V targets computed with gradient, those of several steps several times."""

    target: NDArray[np.int64]
    logprob: Values
    clipped_low: NDArray[np.bool_]
    clipped_high: NDArray[np.bool_]
    kl: Values

    @classmethod
    def of(cls, tally: Tally) -> "_Visits":
        return cls(
            np.concatenate([np.zeros(0, np.int64), *tally.target]),
            np.concatenate([np.zeros(0), *tally.logprob]),
            np.concatenate([np.zeros(0, bool), *tally.clipped_low]),
            np.concatenate([np.zeros(0, bool), *tally.clipped_high]),
            np.concatenate([np.zeros(0), *tally.kl]),
        )


def _age_report(
    chosen: NDArray[np.int64], visits: _Visits, targets: Targets, proximal: Values, weights: Weights
) -> AgeReport:
    mine = np.isin(visits.target, chosen)
    ratio = weights.ratio[chosen]
    low, middle, high = np.quantile(ratio, QUANTILES).tolist() if len(chosen) else (0.0, 0.0, 0.0)
    apart = (proximal - targets.logprob)[chosen]
    return AgeReport(
        tokens=len(chosen),
        effective_sample_size=effective_sample_size(ratio),
        importance_cut=_share(weights.cut[chosen]),
        ratio_p01=low,
        ratio_p50=middle,
        ratio_p99=high,
        clip_fraction_low=_share(visits.clipped_low[mine]),
        clip_fraction_high=_share(visits.clipped_high[mine]),
        kl_behaviour=float((np.exp(apart) - apart - 1).mean()) if len(chosen) else 0.0,
        entropy=float(-visits.logprob[mine].mean()) if mine.any() else 0.0,
        logprob_difference_mean=float(np.abs(apart).mean()) if len(chosen) else 0.0,
    )


def _share(chosen: NDArray[np.bool_]) -> float:
    return float(chosen.mean()) if len(chosen) else 0.0
