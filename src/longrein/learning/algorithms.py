"""Named algorithms are data: a row of choices that advantages and losses know.

A preset gives every choice a value; a key that the configuration sets itself replaces the preset's. A further algorithm
is a further row, and whatever it needs that is not here yet, a further field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from longrein.config import AlgorithmSection


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What makes a gradient out of rewards; the fields mean what ``AlgorithmSection``'s keys mean."""

    advantage: Literal["group_std", "group_mean", "leave_one_out"]
    normalization: Literal["rollout_mean", "token_mean", "constant"]
    constant_length: int
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coefficient: float
    entropy_coefficient: float
    importance_cut: float | None

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens without advantage have a gradient too."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0


PRESETS: Mapping[str, Algorithm] = {
    # Shao et al. 2024, DeepSeekMath, arXiv:2402.03300: objective Eq. 3, KL estimate Eq. 4, outcome advantage section
    # 4.1.2. The paper's mean over outputs of the mean over tokens is ``rollout_mean``. Its KL term needs a reference
    # model and is left off; the importance weight corrects for a sampler whose arithmetic differs from the learner's.
    "grpo": Algorithm(
        advantage="group_std",
        normalization="rollout_mean",
        constant_length=1024,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        kl_coefficient=0.0,
        entropy_coefficient=0.0,
        importance_cut=2.0,
    ),
}


def resolve(section: AlgorithmSection) -> Algorithm:
    """The named preset, with the keys that the configuration sets itself."""
    changed = {key: getattr(section, key) for key in section.model_fields_set if key != "name"}
    return replace(PRESETS[section.name], **changed)
