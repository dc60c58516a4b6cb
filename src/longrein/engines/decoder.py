"""A small decoder for Llama-like transformers modules, made for few operations per token.

It computes what the module computes, with query, key and value in one product, gate and up in another, and attention
left to whoever calls it: a packed prefill and a decoding step differ in nothing else.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from longrein.engines.linear import Linear
from longrein.errors import EngineError, ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class Attend(Protocol):
    """Attention of the N tokens at hand against whatever they may see."""

    def __call__(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """Store the new keys and values, and attend.

        Args:
            queries: (N, Hq, D), rotated and scaled.
            keys_values: (N, 2 Hk, D), rotated keys first, then values.

        Returns:
            (N, Hq D).
        """
        ...


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that caches and attention need to know."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def keys_values(self, tokens: int) -> Tensor:
        """(L, 2, Hk, n, D), not initialised."""
        size = (self.layers, 2, self.kv_heads, tokens, self.head_dim)
        return torch.empty(size, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class _Layer:
    norm_in: Tensor  # (d,)
    qkv: Linear  # ((Hq + 2 Hk) D, d)
    qk_norm: Tensor | None  # (Hq + Hk, D)
    out: Linear  # (d, Hq D)
    norm_mlp: Tensor  # (d,)
    gate_up: Linear  # (2 I, d)
    down: Linear  # (d, I)


class Decoder:
    """Serves a transformers module's weights, copied into fused buffers of ``dtype``.

    Raises:
        ModelError: the architecture is not one of those computed here.
    """

    def __init__(self, module: PreTrainedModel, dtype: torch.dtype) -> None:
        module = base_module(module)
        _refuse_unsupported(module)
        config: Any = module.config
        weights = dict(named_weights(module))
        device = weights["model.embed_tokens.weight"].device
        attention: Any = module.model.layers[0].self_attn
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        self.shape = Shape(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=attention.head_dim,
            vocabulary=weights["model.embed_tokens.weight"].shape[0],
            dtype=dtype,
            device=device,
        )
        self._eps = float(config.rms_norm_eps)
        rotary: Any = module.model.rotary_emb
        self._frequencies = rotary.inv_freq.detach().to(device, torch.float32, copy=True)  # (D/2,)
        self._rope_scale = float(rotary.attention_scaling)
        scale = torch.ones(self.shape.heads + self.shape.kv_heads, 1, device=device)
        scale[: self.shape.heads] = float(attention.scaling)
        self._scale = scale  # (Hq + Hk, 1): the softmax scale rides on the rotation of the queries
        self._places: dict[str, list[_Place]] = {}
        with torch.inference_mode():
            self._build(weights, tied="lm_head.weight" not in weights or _is_tied(module))

    def _build(self, weights: Mapping[str, Tensor], tied: bool) -> None:
        self._embedding = self._vector(weights, "model.embed_tokens.weight")
        self._norm = self._vector(weights, "model.norm.weight")
        self._layers = [self._layer(weights, f"model.layers.{i}.") for i in range(self.shape.layers)]
        self._head = self._linear(weights, "model.embed_tokens" if tied else "lm_head")
        if tied:
            self._places["lm_head.weight"] = self._places["model.embed_tokens.weight"]

    def _layer(self, weights: Mapping[str, Tensor], at: str) -> _Layer:
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        return _Layer(
            norm_in=self._vector(weights, f"{at}input_layernorm.weight"),
            qkv=self._linear(weights, *(f"{attention}{name}_proj" for name in "qkv")),
            qk_norm=self._head_norms(weights, f"{attention}q_norm.weight", f"{attention}k_norm.weight"),
            out=self._linear(weights, f"{attention}o_proj"),
            norm_mlp=self._vector(weights, f"{at}post_attention_layernorm.weight"),
            gate_up=self._linear(weights, f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=self._linear(weights, f"{mlp}down_proj"),
        )

    def _vector(self, weights: Mapping[str, Tensor], name: str) -> Tensor:
        target = weights[name].detach().to(self.shape.dtype, copy=True).contiguous()
        self._places.setdefault(name, []).append(_Place(target, slice(None), weights[name].shape))
        return target

    def _head_norms(self, weights: Mapping[str, Tensor], query: str, key: str) -> Tensor | None:
        if query not in weights:
            return None
        heads, kv_heads, dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        target = torch.empty(heads + kv_heads, dim, dtype=self.shape.dtype, device=self.shape.device)
        for name, rows in ((query, slice(0, heads)), (key, slice(heads, None))):
            target[rows] = weights[name]
            self._places[name] = [_Place(target, rows, weights[name].shape)]
        return target

    def _linear(self, weights: Mapping[str, Tensor], *names: str) -> Linear:
        """One matrix of several, stacked by output rows."""
        parts = [weights[f"{name}.weight"] for name in names]
        bias = None
        if f"{names[0]}.bias" in weights:
            bias = torch.cat([weights[f"{name}.bias"] for name in names]).to(self.shape.dtype)
        linear = Linear(torch.cat(parts).detach().to(self.shape.dtype), bias)
        start = 0
        for name, part in zip(names, parts, strict=True):
            rows = slice(start, start + part.shape[0])
            self._places.setdefault(f"{name}.weight", []).append(_Place(linear, rows, part.shape))
            if bias is not None:
                self._places[f"{name}.bias"] = [_Place(bias, rows, part.shape[:1])]
            start += part.shape[0]
        return linear

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy named transformers parameters, all or some, into the fused buffers; nothing is copied if one is wrong.

        Raises:
            EngineError: a name or a shape that this model does not have.
        """
        stacked: dict[Linear, list[tuple[slice, Tensor]]] = {}
        plain: list[tuple[Tensor, slice, Tensor]] = []
        for name, tensor in weights.items():
            for place in self._find(name, tensor):
                if isinstance(place.target, Linear):
                    stacked.setdefault(place.target, []).append((place.rows, tensor))
                else:
                    plain.append((place.target, place.rows, tensor))
        with torch.inference_mode():
            for target, rows, tensor in plain:
                target[rows] = tensor.to(target.device, target.dtype)
            for linear, parts in stacked.items():
                dense = linear.dense()
                for rows, tensor in parts:
                    dense[rows] = tensor.to(dense.device, dense.dtype)
                linear.store(dense)

    def _find(self, name: str, tensor: Tensor) -> "list[_Place]":
        places = self._places.get(name)
        if places is None:
            near = difflib.get_close_matches(name, self._places, n=1) or ["none is close"]
            raise EngineError(f"publish: the model has no parameter {name!r} (nearest: {near[0]}). Nothing was loaded.")
        if tensor.shape != places[0].shape:
            raise EngineError(
                f"publish: {name} was given with shape {tuple(tensor.shape)}, the model has {tuple(places[0].shape)}. "
                "Nothing was loaded."
            )
        return places

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states of N tokens, after the last norm.

        Args:
            ids: (N,) int64.
            positions: (N,) int64, each token's place in its own sequence.
            attend: what the tokens see.

        Returns:
            (N, d).
        """
        rotated = self.shape.heads + self.shape.kv_heads
        cos, sin = self._rotation(positions)
        x = functional.embedding(ids, self._embedding)
        width = (x.shape[1],)
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(x, width, layer.norm_in, self._eps)
            heads = layer.qkv(normed).view(x.shape[0], -1, self.shape.head_dim)
            self._rotate(heads[:, :rotated], layer.qk_norm, cos, sin)
            x = layer.out(attend(index, heads[:, : self.shape.heads], heads[:, self.shape.heads :])).add_(x)
            gate_up = layer.gate_up(functional.rms_norm(x, width, layer.norm_mlp, self._eps))
            gate, up = gate_up.chunk(2, 1)
            x = layer.down(functional.silu(gate).mul_(up)).add_(x)
        return functional.rms_norm(x, width, self._norm, self._eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, d) → (N, V), in the decoder's dtype."""
        return self._head(hidden)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine, and sine with its first half negated, (N, Hq + Hk, D); the queries' carry the softmax scale."""
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale
        both = torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)
        cos, sin = ((part[:, None] * self._scale).to(self.shape.dtype) for part in both)
        return cos, sin

    def _rotate(self, heads: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> None:
        """Norm and rotate queries and keys, (N, Hq + Hk, D), in place."""
        if norm is not None:
            heads.copy_(functional.rms_norm(heads, heads.shape[2:], None, self._eps).mul_(norm))
        swapped = heads.roll(self.shape.head_dim // 2, 2)
        heads.mul_(cos).addcmul_(swapped, sin)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a named parameter lives: rows of a fused matrix, or of a tensor."""

    target: Linear | Tensor
    rows: slice
    shape: torch.Size


def base_module(module: PreTrainedModel) -> PreTrainedModel:
    """The transformers module inside a PEFT wrapper, or the module itself."""
    unwrap = getattr(module, "get_base_model", None)
    return module if unwrap is None else unwrap()


def named_weights(module: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Transformers' own names and parameters; adapters inside the module are left out."""
    for name, parameter in module.named_parameters():
        if "lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


def _is_tied(module: PreTrainedModel) -> bool:
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def _refuse_unsupported(module: PreTrainedModel) -> None:
    config: Any = module.config
    problems = []
    if config.model_type not in FAMILIES:
        problems.append(f"its family is {config.model_type!r}; known are {', '.join(FAMILIES)}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        problems.append(f"it has layers of kind {', '.join(sorted(kinds))}")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True) and not kinds:
        problems.append(f"it attends through a sliding window of {config.sliding_window} tokens")
    if getattr(config, "hidden_act", "silu") != "silu":
        problems.append(f"its activation is {config.hidden_act!r}, not 'silu'")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        problems.append(f"its rotary embedding is {rope!r}; known are {', '.join(STATIC_ROPE)}")
    if problems:
        raise ModelError(
            f"the embedded engine cannot serve {type(module).__name__}: {'; '.join(problems)}. Choose a Llama-, "
            "Mistral- or Qwen2/3-like model with full attention."
        )
