"""Tiny models for the learner's tests, made once per process."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from longrein.config import AlgorithmSection, LearnerSection
from longrein.learning.learner import EmbeddedLearner
from tests.tiny_model import Family, make_tiny_model


@functools.cache
def directory(family: Family = "llama") -> Path:
    """A saved tiny model, kept until the process ends."""
    return make_tiny_model(Path(_root().name) / family, family)


@functools.cache
def _root() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="longrein-test-")


def exact_model(family: Family = "llama") -> PreTrainedModel:
    """A fresh float64 copy with transformers' own attention.

    Its norms are torch's: transformers' compute in float32 whatever their input, which would hide differences.
    """
    return exact(directory(family))


def exact(saved: Path) -> PreTrainedModel:
    """The same of a directory."""
    module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        saved, dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    for name, layer in list(module.named_modules()):
        if type(layer).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(len(layer.weight), layer.variance_epsilon, dtype=torch.float64)
            norm.load_state_dict(layer.state_dict())
            module.set_submodule(name, norm)
    return module


def learner(algorithm: dict[str, Any] | None = None, **config: Any) -> EmbeddedLearner:
    """A float32 learner on one thread."""
    section = LearnerSection(
        **{"precision": "float32", "forest": "packed", "threads": 1, "learning_rate": 1e-3, **config}
    )
    return EmbeddedLearner.open(directory(), section, AlgorithmSection(**(algorithm or {})))
