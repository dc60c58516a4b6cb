"""Low-rank adapters by PEFT: attached to the module in place, merged into plain weights for whoever serves them.

Invariant: the base weights are never written, so with adapters off the module is the policy training began with.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

from longrein.config import LoraSection
from longrein.errors import LearnerError


def attach(
    module: PreTrainedModel, section: LoraSection, names: Sequence[str] = ("default",), seed: int = 0
) -> PeftModel:
    """Put fresh adapters into a module, all of them active; only they are trained from now on.

    Raises:
        LearnerError: a target names no layer of this model.
    """
    check_targets(module, section)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=list(section.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT reads an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*is_gradient_checkpointing")
        torch.manual_seed(seed)
        adapted = get_peft_model(module, config, adapter_name=names[0])
        for name in names[1:]:
            adapted.add_adapter(name, config)
    adapted.base_model.set_adapter(list(names))
    adapted.eval()
    return adapted


def check_targets(module: PreTrainedModel, section: LoraSection) -> None:
    """Raises LearnerError where a target names no layer of this model."""
    present = {name.rpartition(".")[2] for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
    unknown = [target for target in section.targets if target not in present]
    if unknown:
        raise LearnerError(
            f"learner.lora.targets: {', '.join(unknown)} name no linear layer of {module.config.model_type!r}. Linear "
            f"layers here: {', '.join(sorted(present))}."
        )


def plain_weights(module: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters that the plain transformers module would have: adapters merged, its own names, shared ones once.

    Weights without an adapter are the module's own memory, not copies.
    """
    merged: dict[str, Tensor] = {}
    layers: dict[str, Any] = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                continue
            owner, base, leaf = name.rpartition(".base_layer.")
            plain = f"{owner}.{leaf}" if base else name
            merged[plain] = parameter.detach()
            if base and leaf == "weight":
                added = [layers[owner].get_delta_weight(name) for name in layers[owner].active_adapters]
                merged[plain] = parameter.detach() + sum(added).to(parameter.dtype)
    return merged


@contextmanager
def without(adapted: PeftModel | None) -> Iterator[None]:
    """The policy that training began with, for as long as it is entered."""
    if adapted is None:
        raise LearnerError("algorithm.kl_coefficient needs learner.lora: the reference is the model without adapters.")
    with adapted.disable_adapter():
        yield
