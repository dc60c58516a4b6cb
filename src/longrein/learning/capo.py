"""CAPO: action tokens (which tool is called) and argument tokens have losses and parameters of their own.

The gradient is M_a⊙∇L_a + M_g⊙∇L_g, where the masks say which parameters belong to which role, in one of two forms.
*Split LoRA*: two adapters, both active in every forward pass, one learns from actions and the other from arguments.
*Neurons*: of each layer's MLP units, those most active where action (argument) tokens are predicted in successful
rollouts; all other parameters are still: their gradient is zero from the start, so that AdamW has no momentum for them,
and weight decay is applied to the chosen ones alone.

Harness-RL (capability-aligned policy optimisation); its controls are ``random`` (a partition that knows nothing of the
roles) and ``unrouted`` (both losses to all trained parameters).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from longrein.config import CapoSection
from longrein.errors import LearnerError
from longrein.forest.targets import Targets
from longrein.records import Role

ROLES = (Role.ACTION, Role.ARGUMENTS)

ADAPTERS: Mapping[Role, str] = {Role.ACTION: "action", Role.ARGUMENTS: "arguments"}

Gradients = list[Tensor | None]
Mask = Tensor | float
"""What a parameter's gradient is multiplied by: 1, 0, or a tensor that broadcasts to it."""


def role_tokens(section: CapoSection, targets: Targets, role: Role, seed: int = 0) -> NDArray[np.bool_]:
    """(T,) which targets a role's loss is made of.

    With split LoRA and control ``random``, each call's roles are dealt out anew among its tokens, as many of each.
    """
    roles = targets.role
    if section.form == "split_lora" and section.control == "random":
        roles = _shuffled(targets, seed)
    chosen = roles == role
    if ADAPTERS[role] == section.others:
        chosen = chosen | (roles == Role.OTHER)
    return np.asarray(chosen)


def _shuffled(targets: Targets, seed: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(seed)
    roles = targets.role.copy()
    for call in np.unique(targets.call):
        mine = np.flatnonzero(targets.call == call)
        roles[mine] = random.permutation(roles[mine])
    return roles


@dataclass(frozen=True, slots=True)
class RoleNorms:
    """Of the gradients before they are routed, over all trained parameters.

    Attributes:
        cosine: cos(∇L_a, ∇L_g); 0 where one of them is zero.
        action, arguments: their norms.
    """

    cosine: float
    action: float
    arguments: float


class Router:
    """Sends each role's gradient to its parameters.

    Args:
        parameters: those that are trained.
        masks: of each role, one for each parameter.
    """

    def __init__(self, parameters: Sequence[Parameter], masks: Mapping[Role, Sequence[Mask]]) -> None:
        self._parameters = list(parameters)
        self._masks = {role: list(mask) for role, mask in masks.items()}

    def take(self) -> Gradients:
        """What has been accumulated, leaving none."""
        taken: Gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return taken

    def route(self, gradients: Mapping[Role, Gradients]) -> RoleNorms:
        """Leave M_a⊙∇L_a + M_g⊙∇L_g in the parameters."""
        norms = _norms(gradients)
        for index, parameter in enumerate(self._parameters):
            total = torch.zeros_like(parameter)
            for role, mask in self._masks.items():
                gradient = gradients[role][index]
                if gradient is not None:
                    total += gradient * mask[index]
            parameter.grad = total
        return norms

    def decay(self, amount: float) -> None:
        """Multiply the chosen parameters, and no others, by 1 - ``amount``."""
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                chosen = [torch.as_tensor(mask[index], dtype=parameter.dtype) for mask in self._masks.values()]
                union = torch.stack([each.expand_as(parameter) for each in chosen]).amax(0)
                # Where the mask is 0 the factor is 1 to the bit.
                parameter.mul_(1 - amount * union)


def _norms(gradients: Mapping[Role, Gradients]) -> RoleNorms:
    one, other = (gradients[role] for role in ROLES)
    squares = [sum(float((g.double() ** 2).sum()) for g in each if g is not None) for each in (one, other)]
    both = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    product = sum(float((a.double() * b.double()).sum()) for a, b in both)
    action, arguments = (math.sqrt(square) for square in squares)
    cosine = product / (action * arguments) if action and arguments else 0.0
    return RoleNorms(cosine, action, arguments)


def adapter_router(section: CapoSection, named: Mapping[str, Parameter]) -> Router:
    """Split LoRA: each adapter's tensors belong to its role.

    Args:
        named: the trained parameters; those of an adapter carry its name.
    """
    masks = {
        role: [float(section.control == "unrouted" or f".{ADAPTERS[role]}." in f"{name}.") for name in named]
        for role in ROLES
    }
    return Router(list(named.values()), masks)


@dataclass(frozen=True, slots=True)
class Units:
    """The MLP units of each role, layer by layer.

    Attributes:
        chosen: role → (layers, units) bool.
    """

    chosen: Mapping[Role, NDArray[np.bool_]]


class MlpUnits:
    """The units of a model's MLPs: rows of ``gate_proj`` and ``up_proj``, columns of ``down_proj``.

    Args:
        module: Llama-like.

    Raises:
        LearnerError: its MLPs are made otherwise.
    """

    PARTS = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, module: PreTrainedModel) -> None:
        self._layers: list[Any] = [
            layer for layer in module.modules() if all(hasattr(layer, part) for part in self.PARTS)
        ]
        if not self._layers or any(layer.down_proj.bias is not None for layer in self._layers):
            raise LearnerError(
                f"algorithm.capo.form: neurons needs MLPs of gate_proj, up_proj and down_proj without bias, which "
                f"{module.config.model_type!r} does not have. Use split_lora."
            )
        if len({layer.down_proj.in_features for layer in self._layers}) > 1:
            raise LearnerError("algorithm.capo.form: neurons needs layers of equal width. Use split_lora.")
        self.shape = (len(self._layers), int(self._layers[0].down_proj.in_features))

    def freeze_the_rest(self, module: PreTrainedModel) -> None:
        """Train nothing but the units' weights."""
        own = {id(parameter) for parameter in self.parameters()}
        for parameter in module.parameters():
            parameter.requires_grad_(id(parameter) in own)

    def parameters(self) -> list[Parameter]:
        """Three of each layer."""
        return [getattr(layer, part).weight for layer in self._layers for part in self.PARTS]

    @contextmanager
    def watched(self, sums: NDArray[np.float64], rows: Tensor, weight: Tensor) -> Iterator[None]:
        """While entered, add each unit's positive activation at ``rows`` to ``sums`` (layers, units).

        Args:
            rows: (U,) packed tokens of the forest that is computed next.
            weight: (U,) how often each counts.
        """

        def watch(index: int) -> Any:
            def hook(layer: Any, given: tuple[Tensor, ...]) -> None:
                positive = given[0].detach()[0, rows].clamp(min=0).double()
                sums[index] += (positive * weight[:, None]).sum(0).cpu().numpy()

            return hook

        handles = [layer.down_proj.register_forward_pre_hook(watch(index)) for index, layer in enumerate(self._layers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def router(self, section: CapoSection, units: Units) -> Router:
        """Each role's units, as masks over ``parameters``."""
        chosen = dict(units.chosen)
        if section.control == "unrouted":
            union = chosen[Role.ACTION] | chosen[Role.ARGUMENTS]
            chosen = dict.fromkeys(ROLES, union)
        masks: dict[Role, list[Mask]] = {role: [] for role in ROLES}
        for role in ROLES:
            for index, layer in enumerate(self._layers):
                like = layer.down_proj.weight
                mask = torch.from_numpy(chosen[role][index]).to(like.device, like.dtype)
                masks[role] += [mask[:, None], mask[:, None], mask[None, :]]
        return Router(self.parameters(), masks)


def choose_units(section: CapoSection, activity: Mapping[Role, NDArray[np.float64]], seed: int) -> Units:
    """Of each layer, the ``share`` of units with the highest mean positive activation; at random for that control.

    Args:
        activity: role → (layers, units), means over the tokens of the role.
    """
    chosen = {}
    for role in ROLES:
        found = activity[role]
        if section.control == "random":
            found = np.random.default_rng((seed, int(role))).random(found.shape)
        count = max(1, round(section.share * found.shape[1]))
        best = np.argsort(-found, axis=1, kind="stable")[:, :count]
        mask = np.zeros(found.shape, bool)
        np.put_along_axis(mask, best, True, axis=1)
        chosen[role] = mask
    return Units(chosen)


class Capo:
    """CAPO on one model: which tokens make which loss, and where its gradient goes.

    Args:
        lora: whether adapters are trained.

    Raises:
        LearnerError: the form does not fit the model or what is trained of it.
    """

    def __init__(self, section: CapoSection, module: PreTrainedModel, *, lora: bool, seed: int = 0) -> None:
        if (section.form == "split_lora") != lora:
            need = "needs learner.lora" if not lora else "trains the model's own weights: leave learner.lora out"
            raise LearnerError(f"algorithm.capo.form: {section.form} {need}.")
        self.section = section
        self._seed = seed
        self._mlp = None if lora else MlpUnits(module)
        self.units: Units | None = None
        self.router: Router | None = None
        if self._mlp is None:
            named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
            self.router = adapter_router(section, named)
        else:
            self._mlp.freeze_the_rest(module)

    def tokens(self, targets: Targets, role: Role) -> NDArray[np.bool_]:
        """(T,) which targets a role's loss is made of."""
        return role_tokens(self.section, targets, role, self._seed)

    def coefficient(self, role: Role) -> float:
        """Weight of a role's loss."""
        return self.section.action_coefficient if role is Role.ACTION else self.section.arguments_coefficient

    def use(self, units: Units) -> None:
        """Train these units from now on."""
        assert self._mlp is not None
        self.units = units
        self.router = self._mlp.router(self.section, units)

    def probe(self, tokens: Mapping[Role, int], activity: Mapping[Role, NDArray[np.float64]]) -> str:
        """Choose the units; why not, where that cannot be done yet.

        Args:
            tokens: how many each role's activity was summed over.
            activity: role → (layers, units), sums.
        """
        absent = [ADAPTERS[role] for role in ROLES if not tokens[role]]
        if absent:
            return f"CAPO's probe found no {' and no '.join(absent)} token in a rollout that did better than its group"
        self.use(choose_units(self.section, {role: activity[role] / tokens[role] for role in ROLES}, self._seed))
        return ""

    @property
    def mlp(self) -> MlpUnits | None:
        """The MLPs that are partitioned; None with adapters."""
        return self._mlp
