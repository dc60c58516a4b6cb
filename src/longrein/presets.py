"""Named algorithms are data: the choices in which each differs from the defaults of the ``algorithm`` section.

A key that the configuration sets itself replaces the preset's. The parts they are put together from are in
``learning``: advantages, surrogates, importance, shaping, losses.
"""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Shao et al. 2024, DeepSeekMath, arXiv:2402.03300: objective Eq. 3, KL estimate Eq. 4, outcome advantage section
    # 4.1.2. Its mean over outputs of the mean over tokens is ``rollout_mean``. The KL term needs a reference and is
    # off; set ``kl_coefficient`` to 0.04 for the paper's.
    "grpo": {},
    # Yu et al. 2025, DAPO, arXiv:2503.14476: objective Eq. 8 with clip-higher, token mean (Eq. 12), groups without
    # contrast collected anew (Eq. 11). Its penalty for long outputs (Eq. 13) acts once ``overlong_limit`` is set.
    "dapo": {
        "normalization": "token_mean",
        "clip_high": 0.28,
        "keep_groups": "contrast",
    },
    # Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2: neither the standard
    # deviation nor the length divides.
    "dr_grpo": {
        "advantage": "group_mean",
        "normalization": "constant",
    },
    # Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, section 2.3 (RLOO estimator). The paper sums a sequence's
    # log-probabilities: ``constant`` divides that sum by the constant L.
    "rloo": {
        "advantage": "leave_one_out",
        "surrogate": "policy_gradient",
        "normalization": "constant",
    },
    # Hu 2025, REINFORCE++, arXiv:2501.03262: advantages normalised over the whole batch. Its KL penalty inside the
    # reward is left out; ``kl_coefficient`` gives one inside the loss.
    "reinforce_plus_plus": {
        "advantage": "batch_std",
        "normalization": "token_mean",
    },
    # The same paper's form for several rollouts of a task: the group's mean first, then the batch's deviation.
    "reinforce_plus_plus_baseline": {
        "advantage": "group_mean_batch_std",
        "normalization": "token_mean",
    },
    # Zheng et al. 2025, GSPO, arXiv:2507.18071: Eq. 5 with the length-normalised ratio of Eq. 7; a rollout is the
    # sequence, so that the ratio does not depend on how it was cut into calls. Clip bounds of section 5.1. The
    # correction proximal/behaviour is the sequence's too, so that no token of it is pulled more than another.
    "gspo": {
        "ratio_level": "rollout",
        "importance_level": "rollout",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # MiniMax 2025, MiniMax-M1, arXiv:2506.13585: Eq. 4 with the weight of Eq. 5, no bound below. The paper does not
    # tell its bound above.
    "cispo": {
        "surrogate": "cispo",
        "normalization": "token_mean",
        "clip_low": 1.0,
        "clip_high": 0.28,
    },
    # Wang et al. 2025, RAGEN, arXiv:2504.20073, section 3.3 (StarPO-S): the quarter of the groups whose rewards vary
    # most, clip-higher, no KL. Its critic is left out: the group is the baseline.
    "starpo_s": {
        "keep_groups": "variance",
        "keep_share": 0.25,
        "clip_high": 0.28,
        "normalization": "token_mean",
    },
    # Williams 1992, REINFORCE, Machine Learning 8: the reward itself, no baseline.
    "policy_gradient": {
        "advantage": "reward",
        "surrogate": "policy_gradient",
        "normalization": "constant",
    },
}
