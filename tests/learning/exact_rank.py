"""What a rank runs in the tests: a float64 model, so that results can be compared far below float32's rounding."""

from pathlib import Path

import torch

from longrein.config import AlgorithmSection, LearnerSection
from longrein.learning.adapters import attach
from longrein.learning.attention import use_forest_attention
from longrein.learning.backend import Packed
from longrein.learning.fsdp import serve
from longrein.learning.learner import Body, EmbeddedLearner
from longrein.learning.precision import checkpoint_activations
from longrein.learning.ranks import ALONE, Ranks
from tests.learning import models


def open_exact(
    directory: Path, config: LearnerSection, algorithm: AlgorithmSection, steps: int | None, ranks: Ranks = ALONE
) -> EmbeddedLearner:
    """``EmbeddedLearner.open`` in float64."""
    module = models.exact(directory)
    use_forest_attention(module)
    if config.activation_checkpointing:
        checkpoint_activations(module)
    adapted = attach(module, config.lora) if config.lora else None
    if adapted is not None:
        module.to(torch.float64)
    ranks.shard(module)
    body = Body(module, adapted, Packed(module, torch.float64), torch.float64, 1, directory, ranks)
    return EmbeddedLearner(body, config, algorithm, steps=steps)


def main() -> None:
    """A rank's life."""
    serve(open_exact)
