"""Ranks: the processes that make an update together, each holding a part of every decoder layer (FSDP2, ZeRO-3).

Every rank has the whole batch and makes the same plan from it, so nothing but gradients, parameters and figures is
exchanged. Invariant: all ranks make the same sequence of passes. A layer is gathered in every pass, so a rank that
made one pass more would wait for the others without end; where a rank has no micro-batch left it makes an idle pass.

Embedding, head and the last norm are whole on every rank: the head is used apart from the module's forward, at the
rows that predict something. Their gradients are summed over the ranks before the step, so they stay equal to the bit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from longrein.errors import LearnerError
from longrein.forest.forest import from_parents
from longrein.forest.packing import MicroBatch
from longrein.learning.passes import Tally

T = TypeVar("T")

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slot:
    """One pass of a rank.

    Attributes:
        together: how many micro-batches all ranks compute in it.
    """

    part: MicroBatch
    together: int


class Ranks(Protocol):
    """What an update asks of the ranks that make it. Every method is called on all of them, in the same order."""

    @property
    def writes(self) -> bool:
        """Whether this rank writes what is saved."""
        ...

    def shard(self, module: PreTrainedModel) -> None:
        """Keep only this rank's part of each decoder layer."""
        ...

    def first(self, value: T) -> T:
        """The first rank's value."""
        ...

    def share(self, parts: Sequence[MicroBatch]) -> list[Slot]:
        """This rank's passes over some micro-batches, as many as every other rank's."""
        ...

    def sum(self, values: Values) -> Values:
        """The sum over ranks, entry by entry."""
        ...

    def merged(self, tally: Tally) -> Tally:
        """What all ranks measured."""
        ...

    def groups(self, parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        ...

    def clip(self, parameters: Sequence[Parameter], limit: float) -> float:
        """Sum gradients over ranks, scale them to a norm of at most ``limit``; the norm before that."""
        ...

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors with nothing missing, on the CPU where they had to be gathered; empty on ranks that do not write."""
        ...

    def like(self, own: Tensor, given: Tensor) -> Tensor:
        """The part of a whole tensor that this rank has of ``own``."""
        ...

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """``state_dict`` of the same optimizer in one process."""
        ...

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Restore what ``optimizer_state`` gave, with any number of ranks.

        Raises:
            ValueError, KeyError, RuntimeError: it is of other parameters.
        """
        ...


class Alone:
    """One process. See ``Ranks``."""

    writes = True

    def shard(self, module: PreTrainedModel) -> None:
        pass

    def first(self, value: T) -> T:
        return value

    def share(self, parts: Sequence[MicroBatch]) -> list[Slot]:
        return [Slot(part, 1) for part in parts]

    def sum(self, values: Values) -> Values:
        return values

    def merged(self, tally: Tally) -> Tally:
        return tally

    def groups(self, parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
        return [{"params": list(parameters)}]

    def clip(self, parameters: Sequence[Parameter], limit: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def like(self, own: Tensor, given: Tensor) -> Tensor:
        return given

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)


ALONE = Alone()


class Several:
    """This process is one of ``torch.distributed``'s default group, which is open. See ``Ranks``."""

    def __init__(self) -> None:
        self.number, self.count = dist.get_rank(), dist.get_world_size()
        self._order: list[Parameter] = []

    @property
    def writes(self) -> bool:
        return self.number == 0

    def shard(self, module: PreTrainedModel) -> None:
        """Raises LearnerError where the decoder layers cannot be told."""
        body = module.base_model
        layers = getattr(body, "layers", None)
        if not isinstance(layers, torch.nn.ModuleList):
            raise LearnerError(
                f"learner.kind: fsdp needs a model whose decoder layers are `layers` of its body; "
                f"{module.config.model_type!r} has none. Use learner.kind: embedded."
            )
        mesh = init_device_mesh(next(module.parameters()).device.type, (self.count,))
        inside = {id(parameter) for parameter in layers.parameters()}
        for layer in layers:
            _summing(fully_shard(layer, mesh=mesh))
        # The body holds none of its own, but one root lets a layer be gathered while the one before is computed.
        apart = {parameter for parameter in module.parameters() if id(parameter) not in inside}
        _summing(fully_shard(body, mesh=mesh, ignored_params=apart))

    def first(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def share(self, parts: Sequence[MicroBatch]) -> list[Slot]:
        return dealt(parts, self.number, self.count)

    def sum(self, values: Values) -> Values:
        found = torch.from_numpy(np.array(values, np.float64))
        dist.all_reduce(found)
        return found.numpy()

    def merged(self, tally: Tally) -> Tally:
        every: list[Tally] = [tally] * self.count
        dist.all_gather_object(every, tally)
        whole = Tally(loss=sum(each.loss for each in every))
        for each in every:
            whole.target += each.target
            whole.logprob += each.logprob
            whole.clipped_low += each.clipped_low
            whole.clipped_high += each.clipped_high
            whole.kl += each.kl
        return whole

    def groups(self, parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
        """Sharded and whole ones apart: the fused step takes no mixture."""
        self._order = list(parameters)
        sharded, whole = _apart(parameters)
        return [{"params": group} for group in (sharded, whole) if group]

    def clip(self, parameters: Sequence[Parameter], limit: float) -> float:
        sharded, whole = _apart(parameters)
        self._sum_gradients(whole)
        total = self.sum(np.array([_square(sharded)]))[0] + _square(whole)
        norm = math.sqrt(total) if math.isfinite(total) else math.nan
        factor = min(1.0, limit / (norm + 1e-6))
        for gradient in _local_gradients([*sharded, *whole]):
            gradient.mul_(factor)
        return norm

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            gathered = _whole(tensor)
            if self.writes:
                found[name] = gathered.cpu()
        return found

    def like(self, own: Tensor, given: Tensor) -> Tensor:
        if not isinstance(own, DTensor):
            return given
        pieces = given.chunk(self.count)
        # Fewer rows than ranks: the last ranks have none.
        mine = pieces[self.number] if self.number < len(pieces) else given[:0]
        local = own.to_local()
        mine = mine.to(local.device, local.dtype, copy=True)
        return DTensor.from_local(
            mine, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
        )

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = {}
        for index, parameter in enumerate(self._order):
            if parameter in optimizer.state:
                state[index] = {name: _whole(value).cpu() for name, value in optimizer.state[parameter].items()}
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        return {"state": state, "param_groups": [{**group, "params": list(range(len(self._order)))}]}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        (group,) = state["param_groups"]
        if len(group["params"]) != len(self._order):
            raise ValueError(f"it is of {len(group['params'])} parameters, not of {len(self._order)}")
        restored: dict[Tensor, dict[str, Any]] = {}
        for index, parameter in enumerate(self._order):
            found = state["state"].get(index)
            if found is not None:
                if found["exp_avg"].shape != parameter.shape:
                    raise ValueError(f"its parameter {index} has another shape")
                restored[parameter] = {name: self._part(parameter, value) for name, value in found.items()}
        optimizer.state.clear()
        optimizer.state.update(restored)

    def _part(self, parameter: Parameter, value: Tensor) -> Tensor:
        return self.like(parameter, value) if value.dim() else value.to(parameter.device, copy=True)

    def _sum_gradients(self, whole: Sequence[Parameter]) -> None:
        """Of parameters that every rank has; one that no rank has a gradient for gets none."""
        somewhere = self.sum(np.array([float(parameter.grad is not None) for parameter in whole])) > 0
        for parameter, found in zip(whole, somewhere, strict=True):
            if found:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)


def dealt(parts: Sequence[MicroBatch], number: int, count: int) -> list[Slot]:
    """The passes of rank ``number``: in each round the longest micro-batches that are left, one for each rank.

    A round takes as long as its longest, because every layer is gathered in step. This order makes both the sum of
    these and the number of rounds least, which giving the next to the rank with the fewest tokens does not.
    """
    order = sorted(parts, key=lambda part: -len(part.forest))
    rounds = [order[begin : begin + count] for begin in range(0, len(order), count)]
    return [Slot(each[number] if number < len(each) else idle(each[0]), len(each)) for each in rounds]


def idle(part: MicroBatch) -> MicroBatch:
    """A pass over one token that predicts nothing: it runs through every layer and adds a gradient of 0."""
    none = np.zeros(0, np.int64)
    return MicroBatch(from_parents(part.forest.tokens[:1], np.array([-1])), none, none)


def _summing(module: FSDPModule) -> None:
    """Sum gradients, where FSDP takes their mean: a micro-batch's weights are shares of the whole batch already."""
    module.set_gradient_divide_factor(1.0)
    # Else it scales and sums in one operation, which gloo does not have.
    module.set_force_sum_reduction_for_comms(True)


def _apart(parameters: Sequence[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    """Those that are sharded, and those that every rank has whole."""
    sharded: list[Parameter] = []
    whole: list[Parameter] = []
    for parameter in parameters:
        (sharded if isinstance(parameter, DTensor) else whole).append(parameter)
    return sharded, whole


def _local_gradients(parameters: Sequence[Parameter]) -> list[Tensor]:
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in found]


def _square(parameters: Sequence[Parameter]) -> float:
    """Sum of the squares of this rank's part of the gradients."""
    return sum(float(gradient.double().square().sum()) for gradient in _local_gradients(parameters))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
