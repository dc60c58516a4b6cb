"""A learner's state on disk: weights as transformers loads them, the adapter as PEFT loads it, and the optimizer."""

import pickle
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from longrein.errors import LearnerError
from longrein.learning.capo import ADAPTERS, ROLES, Units
from longrein.learning.ranks import Ranks

WEIGHTS = "model.safetensors"
ADAPTER = "adapter"
OPTIMIZER = "optimizer.pt"
UNITS = "units.safetensors"
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
)


def save_weights(directory: Path, module: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """``model.safetensors`` and ``config.json``."""
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    module.config.save_pretrained(directory)
    if module.generation_config is not None:
        module.generation_config.save_pretrained(directory)


def load_weights(directory: Path, module: PreTrainedModel, ranks: Ranks) -> None:
    """Copy ``model.safetensors`` into a module's parameters, or into what this rank has of them.

    Raises:
        LearnerError: a file is missing or damaged, or belongs to another model; nothing is copied then.
    """
    found = _read(directory / WEIGHTS)
    own = dict(module.named_parameters())
    different = sorted(found.keys() ^ own.keys()) + [
        name for name in sorted(found.keys() & own.keys()) if found[name].shape != own[name].shape
    ]
    if different:
        raise LearnerError(
            f"{directory / WEIGHTS} belongs to another model: {len(different)} parameters differ in name or shape, "
            f"{different[0]} first. Give the model this run began with."
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(ranks.like(parameter, found[name]))


def adapter(adapted: PeftModel, name: str) -> dict[str, Tensor]:
    """An adapter's tensors under PEFT's names."""
    found: dict[str, Tensor] = get_peft_model_state_dict(adapted, adapter_name=name)
    return found


def save_adapters(directory: Path, adapted: PeftModel, adapters: Mapping[str, Mapping[str, Tensor]]) -> None:
    """``adapter/adapter_model.safetensors`` and its configuration, for PEFT; one folder in it for each of several.

    Args:
        adapters: of each name, what ``adapter`` gave.
    """
    for name, state in adapters.items():
        target = _adapter_folder(directory, name)
        target.mkdir(parents=True)
        tensors = {key: tensor.contiguous() for key, tensor in state.items()}
        save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
        adapted.peft_config[name].save_pretrained(target)


def load_adapters(directory: Path, adapted: PeftModel, names: Sequence[str], ranks: Ranks) -> None:
    """Copy adapters' weights into the module, or into what this rank has of them.

    Raises:
        LearnerError: a file is missing or damaged, or an adapter has other layers or another rank.
    """
    for name in names:
        _load_adapter(_adapter_folder(directory, name) / "adapter_model.safetensors", adapted, name, ranks)


def _adapter_folder(directory: Path, name: str) -> Path:
    return directory / ADAPTER if name == "default" else directory / ADAPTER / name


def _load_adapter(file: Path, adapted: PeftModel, name: str, ranks: Ranks) -> None:
    found = _read(file)
    own = adapter(adapted, name)
    if {key: tensor.shape for key, tensor in found.items()} != {key: tensor.shape for key, tensor in own.items()}:
        raise LearnerError(
            f"{file} has other layers or another rank than learner.lora says. Set it as it was when this was saved."
        )
    state = {key: ranks.like(own[key], tensor) for key, tensor in found.items()}
    set_peft_model_state_dict(adapted, state, adapter_name=name)


def save_units(directory: Path, units: Units) -> None:
    """``units.safetensors``: which MLP units each role has, (layers, units) each."""
    save_file({ADAPTERS[role]: torch.from_numpy(units.chosen[role]) for role in ROLES}, directory / UNITS)


def load_units(directory: Path, shape: tuple[int, int]) -> Units | None:
    """The units that were chosen; None where none were yet.

    Raises:
        LearnerError: the file is damaged or belongs to another model.
    """
    file = directory / UNITS
    if not file.exists():
        return None
    found = _read(file)
    if any(ADAPTERS[role] not in found or tuple(found[ADAPTERS[role]].shape) != shape for role in ROLES):
        raise LearnerError(f"{file} belongs to another model: it should hold {shape} units for each role.")
    return Units({role: found[ADAPTERS[role]].numpy() for role in ROLES})


def save_optimizer(directory: Path, state: Mapping[str, Any], updates: int) -> None:
    """``optimizer.pt``."""
    torch.save({"updates": updates, "optimizer": state}, directory / OPTIMIZER)


def load_optimizer(directory: Path, optimizer: torch.optim.Optimizer, ranks: Ranks) -> int:
    """Restore the optimizer; return how many updates were made.

    Raises:
        LearnerError: the file is missing or damaged, or was written for other parameters.
    """
    file = directory / OPTIMIZER
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        rates = [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups]
        ranks.load_optimizer_state(optimizer, state["optimizer"])
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise LearnerError(f"{file} cannot be read as this learner's optimizer: {error}") from error
    # What the configuration says now, not what it said when this was saved.
    for group, (rate, betas, decay) in zip(optimizer.param_groups, rates, strict=True):
        group.update(lr=rate, betas=betas, weight_decay=decay)
    return int(state["updates"])


def copy_tokenizer(source: Path, directory: Path) -> None:
    """The tokenizer and chat template the model came with, so that what is saved can be served as it is."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise LearnerError(f"{file} cannot be read: {error}") from error
    return tensors
