"""A forest computed node by node, depth first, with the model's own attention: sliding windows, capped scores, linear
attention, whatever it is.

Invariant: what is kept at any time belongs to one path. A node is computed on top of what its ancestors left there,
detached (keys and values, or a recurrent state); its backward pass runs after those of all its descendants, from the
gradients that they left in what it gave them, and leaves the same for its ancestors.

This relies on how models of transformers 5 use a cache (read in 5.23): a layer of attention hands its new keys and
values to ``update`` and attends to what that returns; masks are made from ``get_mask_sizes``; a layer of linear
attention reads its states before its forward pass and hands on the next ones. The cache's layers are this module's own,
because transformers' ``LinearAttentionLayer`` copies each state over the last one (``update_conv_state``,
``update_recurrent_state``), and models write into the convolution state themselves for one token, unless the layer says
that it records its past: a second branch could not start where the first did, and the gradient would be lost.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from longrein.errors import LearnerError
from longrein.forest.forest import Forest, IndexArray
from longrein.learning.attention import IMPLEMENTATION
from longrein.learning.backend import Pull

# Tokens of one path whose activations are kept until their backward pass; those above are computed once more for it.
KEPT = 16_384
# Where a path is longer, its nodes are computed in pieces of so many tokens.
PIECE = 512
# A node keeps copies of its ancestors' keys and values: so many tokens of those take the memory of one token computed.
COPIES = 8

State = tuple[Tensor, ...]
"""What one layer of one node hands to the node's children."""


@dataclass(slots=True)
class _Node:
    """An unbranched stretch of tokens, a whole node of the forest or a piece of one.

    Attributes:
        start, stop: its tokens.
        past: how many tokens its ancestors have.
        above: its parent.
        first, last: which of the rows, in the order of tokens, lie in it.
        inner: whether it has children.
        height: memory it takes with the highest path below it, in tokens.
        twice: whether its activations are not kept, but computed once more.
        picked: (K, d) hidden states at its rows.
        made: for each layer, what it hands to its children, with the graph that made it.
        given: the same, detached, where its gradient is gathered; layers of linear attention only.
    """

    start: int
    stop: int
    past: int
    above: "_Node | None"
    first: int
    last: int
    inner: bool = False
    height: float = 0.0
    twice: bool = False
    picked: Tensor | None = None
    made: list[State] = field(default_factory=list)
    given: list[State] = field(default_factory=list)

    def forget(self) -> None:
        """What the forward pass made; not what it gave its children."""
        self.picked, self.made = None, []


class Walk:
    """Node by node, with the attention that the model has when this is made. See ``Backend``.

    Args:
        module: a transformers causal language model.
        precision: autocast dtype; the parameters' own dtype means no autocast.
        kept: tokens of one path whose activations are kept. What lies above them is computed twice, so that memory does
            not grow with the length of a path but for its keys and values.

    Raises:
        LearnerError: a layer keeps something that cannot be branched here; names it.
    """

    def __init__(self, module: PreTrainedModel, precision: torch.dtype, kept: int = KEPT) -> None:
        self._module = module
        self._precision = precision
        self._kept = kept
        own = str(module.config._attn_implementation)
        self._implementation = "sdpa" if own == IMPLEMENTATION else own
        _layers(module, 0)

    def hidden(self, forest: Forest, rows: IndexArray) -> Tensor:
        order = np.argsort(rows, kind="stable")
        found = []
        with torch.no_grad(), self._own_attention():
            layers = _layers(self._module, _longest(forest))
            for node, entered in _visits(_nodes(forest, rows[order], self._kept)):
                if entered:
                    self._compute(forest, rows[order], node, layers)
                    found.append(node.picked)
                    node.forget()
                else:
                    node.given = []
        back = torch.from_numpy(np.argsort(order)).to(self._device)
        return torch.cat([states for states in found if states is not None]).index_select(0, back)

    def accumulate(self, forest: Forest, rows: IndexArray, pull: Pull) -> None:
        order = np.argsort(rows, kind="stable")
        with self._own_attention():
            layers = _layers(self._module, _longest(forest))
            for node, entered in _visits(_nodes(forest, rows[order], self._kept)):
                if entered and node.twice:
                    with torch.no_grad():
                        self._compute(forest, rows[order], node, layers)
                    node.forget()
                elif entered or node.twice:
                    self._compute(forest, rows[order], node, layers)
                if not entered:
                    _backward(node, layers, order, pull)

    def _compute(self, forest: Forest, rows: IndexArray, node: _Node, layers: list[Any]) -> None:
        """Forward: fills in ``picked``, ``made`` and, the first time, ``given``."""
        own = self._module.get_input_embeddings().weight
        for index, layer in enumerate(layers):
            layer.begin(node.past, node.above.given[index] if node.above else ())
        with torch.autocast(own.device.type, self._precision, enabled=self._precision != own.dtype):
            states = self._module.base_model(
                input_ids=torch.from_numpy(forest.tokens[node.start : node.stop]).long().to(own.device)[None],
                position_ids=torch.from_numpy(forest.positions[node.start : node.stop]).long().to(own.device)[None],
                past_key_values=Cache(layers=layers),
                use_cache=True,
            ).last_hidden_state
        places = torch.from_numpy(rows[node.first : node.last] - node.start).to(own.device)
        node.picked = states[0].index_select(0, places)
        node.made = [layer.made for layer in layers]
        node.given = node.given or [layer.give() for layer in layers]

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._module.get_input_embeddings().weight.device
        return device

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """The module may serve another back end too, which has its attention changed."""
        before = self._module.config._attn_implementation
        self._module.set_attn_implementation(self._implementation)
        try:
            yield
        finally:
            self._module.set_attn_implementation(before)


def _backward(node: _Node, layers: list[Any], order: IndexArray, pull: Pull) -> None:
    """From the gradients at the node's rows and in what it gave its children; the node keeps nothing."""
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    if node.picked is not None and len(node.picked):
        outputs.append(node.picked)
        gradients.append(pull(order[node.first : node.last], node.picked.detach()))
    if node.inner:
        for layer, made, given in zip(layers, node.made, node.given, strict=True):
            for output, gradient in zip(made, layer.take(node, given), strict=True):
                if gradient is not None and output.requires_grad:
                    outputs.append(output)
                    gradients.append(gradient.to(output.dtype))
    node.forget()
    node.given = []
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _nodes(forest: Forest, rows: IndexArray, kept: int) -> list[_Node]:
    """The forest's nodes in preorder, cut into pieces if a path is longer than what is kept.

    Args:
        rows: ascending.
    """
    step = PIECE if _longest(forest) > kept else max(len(forest), 1)
    nodes: list[_Node] = []
    lowest: list[_Node] = []  # the last piece of each node of the forest
    for start, end, parent in zip(forest.start.tolist(), forest.end.tolist(), forest.parent.tolist(), strict=True):
        above = lowest[parent] if parent >= 0 else None
        for begin in range(start, end, step):
            stop = min(begin + step, end)
            first, last = np.searchsorted(rows, [begin, stop]).tolist()
            above = _Node(begin, stop, int(forest.positions[begin]), above, first, last)
            nodes.append(above)
        lowest.append(nodes[-1])
    for node in reversed(nodes):
        node.height += node.stop - node.start + node.past / COPIES
        if node.above is not None:
            node.above.inner = True
            node.above.height = max(node.above.height, node.height)
        # A node without children is done at once.
        node.twice = node.inner and node.height > kept
    return nodes


def _longest(forest: Forest) -> int:
    """Tokens of the longest path."""
    return int(forest.positions.max()) + 1 if len(forest) else 0


def _visits(nodes: Sequence[_Node]) -> Iterator[tuple[_Node, bool]]:
    """Each node when it is entered (True) and when all below it is done (False), depth first; nodes are in preorder."""
    open_nodes: list[_Node] = []
    for node in nodes:
        while open_nodes and open_nodes[-1] is not node.above:
            yield open_nodes.pop(), False
        open_nodes.append(node)
        yield node, True
    while open_nodes:
        yield open_nodes.pop(), False


class _Trail:
    """The keys, or the values, of one layer along the current path, each at its position, and their gradient.

    A node's descendants write behind it only, so what it saw is still there when it is computed once more.

    Args:
        length: L, of the longest path.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._states: Tensor | None = None  # (1, H, L, D)
        self._gradient: Tensor | None = None

    def extend(self, own: Tensor, low: int, past: int) -> Tensor:
        """Put a node's own (1, H, n, D) at ``past``; return (1, H, past - low + n, D), what it attends to."""
        if self._states is None:
            self._states = own.new_zeros(*own.shape[:2], self._length, own.shape[3])
        joined: Tensor = own if low == past else _Join.apply(own, self, low, past)  # type: ignore[no-untyped-call]
        self._states[:, :, past : past + own.shape[2]] = own.detach()
        return joined

    def between(self, low: int, past: int) -> Tensor:
        assert self._states is not None
        return self._states[:, :, low:past]

    def add(self, low: int, gradient: Tensor) -> None:
        """Many nodes add to one key, so their sum is kept in at least float32."""
        if self._gradient is None:
            assert self._states is not None
            dtype = torch.promote_types(self._states.dtype, torch.float32)
            self._gradient = torch.zeros_like(self._states, dtype=dtype)
        self._gradient[:, :, low : low + gradient.shape[2]] += gradient

    def take(self, node: _Node) -> Tensor | None:
        """The gradient at a node's positions, and zero there from now on, for the next branch."""
        if self._gradient is None:
            return None
        part = self._gradient[:, :, node.past : node.past + node.stop - node.start]
        taken = part.clone()
        part.zero_()
        return taken


class _Join(torch.autograd.Function):
    """A node's own keys behind those of its ancestors, whose gradient stays on the trail."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, trail: _Trail, low: int, past: int) -> Tensor:
        ctx.trail, ctx.low, ctx.before = trail, low, past - low
        return torch.cat([trail.between(low, past), own], 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.trail.add(ctx.low, gradient[:, :, : ctx.before])
        return gradient[:, :, ctx.before :], None, None, None


class _Attention(DynamicLayer):  # type: ignore[misc]
    """A cache layer of attention.

    Args:
        length: of the longest path.
        window: how many tokens a token sees, itself included; None for all before it.
    """

    def __init__(self, length: int, window: int | None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.made: State = ()
        self._window = window
        self._keys, self._values = _Trail(length), _Trail(length)
        self._past = self._seen = 0

    def begin(self, past: int, given: State) -> None:
        self._past = self._seen = past

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.made = (key_states, value_states)
        self._seen = self._past + key_states.shape[2]
        return (
            self._keys.extend(key_states, self._low(), self._past),
            self._values.extend(value_states, self._low(), self._past),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._past - self._low() + query_length, self._low()

    def get_seq_length(self) -> int:
        return self._seen

    def give(self) -> State:
        """Nothing: it is on the trail."""
        return ()

    def take(self, node: _Node, given: State) -> tuple[Tensor | None, ...]:
        return self._keys.take(node), self._values.take(node)

    def _low(self) -> int:
        return 0 if self._window is None else max(0, self._past - self._window + 1)


class _Linear(LinearAttentionLayer):  # type: ignore[misc]
    """A cache layer of linear attention: the last inputs of its convolution (1, C, K) and its recurrent state."""

    def __init__(self) -> None:
        super().__init__()
        # Else one token takes another way, which writes into the state and has no backward pass on a GPU.
        self.record_past = True

    @property
    def made(self) -> State:
        """Without a recurrent state where the layer is a convolution only."""
        return tuple(state for state in (self.conv_states[0], self.recurrent_states[0]) if state is not None)

    def begin(self, past: int, given: State) -> None:
        self.has_previous_state[0] = bool(given)
        # Copies: some models write into a state that they are given.
        copies = [*(state.clone() for state in given), None, None]
        self.conv_states[0], self.recurrent_states[0] = copies[:2]

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        if conv_kernel_size is None:
            raise LearnerError(
                "the model's linear attention does not say how wide its convolution is, so it cannot be branched."
            )
        before = self.conv_states[0]
        whole = conv_states if before is None else torch.cat([before, conv_states], -1)
        short = max(0, conv_kernel_size - whole.shape[-1])
        self.conv_states[0] = torch.nn.functional.pad(whole, (short, 0))[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent_states[0] = recurrent_states
        return recurrent_states

    def give(self) -> State:
        return tuple(state.detach().clone().requires_grad_() for state in self.made)

    def take(self, node: _Node, given: State) -> tuple[Tensor | None, ...]:
        return tuple(state.grad for state in given)


class _Nothing(DummyLayer):  # type: ignore[misc]
    """A cache layer of a layer that keeps nothing."""

    made: State = ()

    def begin(self, past: int, given: State) -> None: ...

    def give(self) -> State:
        return ()

    def take(self, node: _Node, given: State) -> tuple[Tensor | None, ...]:
        return ()


def _layers(module: PreTrainedModel, length: int) -> list[Any]:
    """A layer for each that the model's own cache would have."""
    makers: dict[type, Callable[[Any], Any]] = {
        DynamicLayer: lambda _: _Attention(length, None),
        DynamicSlidingWindowLayer: lambda layer: _Attention(length, layer.sliding_window),
        LinearAttentionLayer: lambda _: _Linear(),
        DummyLayer: lambda _: _Nothing(),
    }
    wanted = DynamicCache(config=module.config).layers
    strange = {type(layer).__name__ for layer in wanted if type(layer) not in makers}
    if any(getattr(layer, "number_of_states", 1) != 1 for layer in wanted):
        strange.add("several convolutions in a layer")
    if strange:
        raise LearnerError(
            f"model {module.config.model_type!r} keeps {' and '.join(sorted(strange))}, which the embedded learner "
            "does not branch. Use a model of full, sliding-window or linear attention (Qwen3.5, Gemma 3, Mistral)."
        )
    return [makers[type(layer)](layer) for layer in wanted]
