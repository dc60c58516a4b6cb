"""The walk gives the hidden states and the gradient of separate sequences, for attention of any kind."""

import contextlib
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from longrein.config import LoraSection
from longrein.errors import LearnerError
from longrein.forest.forest import Forest, IndexArray, grow
from longrein.learning.adapters import attach
from longrein.learning.attention import IMPLEMENTATION, use_forest_attention
from longrein.learning.backend import Packed, check
from longrein.learning.walk import PIECE, Walk
from tests.learning.models import exact_model
from tests.tiny_model import Family

FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
# Paths are longer than this.
WINDOW = 6


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(sliding_window=WINDOW, head_dim=8, **SHAPE))


def gemma2() -> Any:
    """Windows in every other layer, capped scores in all."""
    return Gemma2ForCausalLM(Gemma2Config(sliding_window=WINDOW, head_dim=8, attn_logit_softcapping=2.0, **SHAPE))


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(Gemma3TextConfig(sliding_window=WINDOW, head_dim=8, layer_types=kinds, **SHAPE))


def lfm2() -> Any:
    """Convolutions beside attention."""
    return Lfm2ForCausalLM(Lfm2Config(layer_types=["conv", "full_attention", "conv", "conv"], **SHAPE))


def qwen3_5() -> Any:
    """Gated delta nets beside attention; their rule computes in float32 whatever its input."""
    linear = {f"linear_{each}": 8 for each in ("key_head_dim", "value_head_dim")}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(head_dim=8, layer_types=kinds, **linear, **heads, **SHAPE))


def kimi() -> Any:
    """A delta rule that writes its convolution's state in place for one token, beside latent attention."""
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    config = KimiLinearConfig(
        layer_types=kinds,
        mlp_layer_types=["dense"] * 4,
        linear_head_dim=8,
        linear_num_heads=4,
        **latent,
        **{**SHAPE, "num_key_value_heads": 4},
    )
    torch.manual_seed(0)
    return KimiLinearForCausalLM(config)


def exact(module: Any) -> Any:
    """In float64, norms too, which transformers computes in float32."""
    module = module.double().eval()
    for name, layer in list(module.named_modules()):
        kind = type(layer).__name__
        if kind.endswith("RMSNorm"):
            eps = getattr(layer, "variance_epsilon", None) or layer.eps
            norm = torch.nn.RMSNorm(len(layer.weight), eps, dtype=torch.float64)
            # Gemma's and Qwen3.5's weights are around zero.
            around = 1.0 if kind.startswith(("Gemma", "Qwen3_5")) else 0.0
            norm.weight.data.copy_(layer.weight.data + around)
            module.set_submodule(name, norm)
    return module


def forest_of(lists: list[list[int]]) -> Forest:
    return grow([np.array(each, np.int32) for each in lists])[0]


@st.composite
def forests(draw: st.DrawFn) -> tuple[Forest, IndexArray]:
    """Several roots, nodes of one token, nodes above nodes; rows anywhere, in any order, some of them repeated."""
    lists = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=12), min_size=1, max_size=6)
    forest = forest_of(draw(lists))
    rows = draw(st.lists(st.integers(0, len(forest) - 1), min_size=1, max_size=12))
    return forest, np.array(rows, np.int64)


# A long trunk, a branch off it with a node of one token, another, one more inside the trunk, and two more roots.
# The last has one token and branches at once: shorter than any window or convolution.
TRUNK = [5, 9, 2, 7, 7, 3, 8, 1, 4, 4, 6, 2]
FIXED = forest_of(
    [
        [*TRUNK, 10, *range(20, 29)],
        [*TRUNK, 10, 31],
        [*TRUNK, 10],
        [*TRUNK, *range(30, 40)],
        [*TRUNK[:7], *range(40, 44)],
        [50, 51, 52, 53],
        [55, 56],
        [55, 57],
    ]
)
EVERY_ROW = np.random.default_rng(0).permutation(np.repeat(np.arange(len(FIXED)), 2))


def pulls(rows: IndexArray, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(len(rows), width, generator=torch.Generator().manual_seed(0), dtype=dtype)


def separate(module: Any, forest: Forest, rows: IndexArray) -> Tensor:
    """One plain forward for each row, of the tokens that lead to it."""
    found = []
    distinct, places = np.unique(rows, return_inverse=True)
    for row in distinct.tolist():
        path = [k for start, stop in forest.path(row) for k in range(start, stop)]
        ids = torch.from_numpy(forest.tokens[[*path, row]]).long()
        found.append(module.base_model(ids[None], use_cache=False).last_hidden_state[0, -1])
    return torch.stack(found)[torch.from_numpy(places)]


def gradients(module: Any) -> Tensor:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.cat([torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in trained])


def apart(module: Any, walk: Walk, forest: Forest, rows: IndexArray) -> tuple[float, float]:
    """How far hidden states and gradient are from those of separate sequences: largest, and relative norm."""
    expected = separate(module, forest, rows)
    pull = pulls(rows, expected.shape[1], expected.dtype)
    module.zero_grad()
    torch.autograd.backward((expected * pull).sum())
    wanted = gradients(module)
    module.zero_grad()
    given: list[int] = []

    def ask(ready: IndexArray, hidden: Tensor) -> Tensor:
        assert not hidden.requires_grad
        torch.testing.assert_close(hidden, expected.detach()[torch.from_numpy(ready)], rtol=1e-4, atol=1e-4)
        given.extend(ready.tolist())
        return pull[torch.from_numpy(ready)]

    walk.accumulate(forest, rows, ask)
    assert sorted(given) == list(range(len(rows)))
    hidden = walk.hidden(forest, rows)
    assert not hidden.requires_grad
    return (
        float((hidden - expected.detach()).abs().max()),
        float((gradients(module) - wanted).norm() / wanted.norm()),
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@FEW
@given(drawn=forests(), kept=st.sampled_from([1_000, 8, 0]))
def test_hidden_states_and_gradient_are_those_of_separate_sequences(
    family: Family, drawn: tuple[Forest, IndexArray], kept: int
) -> None:
    """Whether all of a path is kept, its lower part or nothing."""
    module = model(family)
    states, gradient = apart(module, Walk(module, torch.float64, kept), *drawn)
    assert states <= 1e-12
    assert gradient <= 1e-9


@functools.cache
def model(family: Family) -> Any:
    return exact_model(family)


@functools.cache
def adapted_model() -> Any:
    """Adapters that are not zero."""
    adapted = attach(exact_model(), LoraSection(rank=4, alpha=8.0))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted.get_base_model()


@FEW
@given(drawn=forests())
def test_the_same_with_adapters(drawn: tuple[Forest, IndexArray]) -> None:
    """The embedding has no gradient then."""
    module = adapted_model()
    states, gradient = apart(module, Walk(module, torch.float64, 8), *drawn)
    assert states <= 1e-12
    assert gradient <= 1e-9


@pytest.mark.parametrize("kept", [1_000, 12])
@pytest.mark.parametrize("make", [mistral, gemma2, gemma3, lfm2])
def test_attention_that_only_the_model_itself_computes(make: Any, kept: int) -> None:
    module = exact(make())
    walk = Walk(module, torch.float64, kept)
    states, gradient = apart(module, walk, FIXED, EVERY_ROW)
    # Gemma 2's softmax is in float32, whatever the model is in.
    assert states <= (1e-6 if make is gemma2 else 1e-12)
    assert gradient <= (1e-6 if make is gemma2 else 1e-9)


@pytest.mark.parametrize(("make", "kept"), [(qwen3_5, 1_000), (qwen3_5, 12), (kimi, 12)])
def test_a_recurrent_state_branches_with_its_gradient(make: Any, kept: int) -> None:
    module = exact(make())
    states, gradient = apart(module, Walk(module, torch.float64, kept), FIXED, EVERY_ROW[::2])
    assert states <= 1e-4
    assert gradient <= 1e-4


def test_long_nodes_are_cut_into_pieces() -> None:
    """Longer than a piece, with branches, and a window that spans several."""
    trunk = np.random.default_rng(0).integers(0, 60, 2 * PIECE + 100).tolist()
    forest = forest_of([[*trunk, 61, *trunk[: PIECE + 50]], [*trunk, 62, 3], [*trunk[: PIECE + 30], 63, 4]])
    rows = np.append(forest.end - 1, [PIECE - 1, PIECE, 2 * PIECE])
    config = MistralConfig(sliding_window=PIECE + 200, head_dim=8, **{**SHAPE, "num_hidden_layers": 2})
    module = exact(MistralForCausalLM(config))
    states, gradient = apart(module, Walk(module, torch.float64, 2 * PIECE), forest, rows)
    assert states <= 1e-12
    assert gradient <= 1e-9


def test_gradients_are_added_to_what_is_there() -> None:
    module = exact_model()
    walk = Walk(module, torch.float64)
    pull = pulls(EVERY_ROW, module.config.hidden_size)
    once = []
    for _ in range(2):
        walk.accumulate(FIXED, EVERY_ROW, lambda ready, _: pull[torch.from_numpy(ready)])
        once.append(gradients(module).clone())
    torch.testing.assert_close(once[1], 2 * once[0], rtol=1e-9, atol=1e-12)


def test_autocast_computes_in_bfloat16() -> None:
    module = exact_model().float()
    pull = pulls(EVERY_ROW, module.config.hidden_size, torch.float32)
    found = []
    for precision in (torch.float32, torch.bfloat16):
        module.zero_grad()
        Walk(module, precision, 12).accumulate(FIXED, EVERY_ROW, lambda ready, _: pull[torch.from_numpy(ready)])
        found.append(gradients(module))
    assert 1e-6 < float((found[0] - found[1]).norm() / found[0].norm()) < 0.1


def test_many_branches_add_up_in_float32() -> None:
    """In bfloat16, a sum of equal parts stops growing at 256 of them."""
    count = 400
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, "vocab_size": 512, "num_hidden_layers": 1})
    module = LlamaForCausalLM(config).eval()
    module.get_input_embeddings().weight.data[10:] = module.get_input_embeddings().weight.data[10]
    found = []
    for branches in (1, count):
        module.zero_grad()
        forest = forest_of([[1, 2, 3, 10 + branch] for branch in range(branches)])
        rows = np.flatnonzero(forest.tokens >= 10)
        Walk(module, torch.bfloat16).accumulate(
            forest, rows, lambda _, hidden: torch.cos(torch.arange(32)) + 0 * hidden
        )
        found.append(torch.cat([module.model.layers[0].self_attn.v_proj.weight.grad.reshape(-1)]))
    assert float((found[1] - count * found[0]).norm() / (count * found[0]).norm()) < 0.05


def test_a_deep_forest_needs_no_deep_stack() -> None:
    depth = 200
    forest = forest_of([[0] * length + [1] for length in range(1, depth)])
    module = exact_model()
    walk = Walk(module, torch.float64)
    rows = np.arange(len(forest))
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        walk.accumulate(forest, rows, lambda _, hidden: torch.ones_like(hidden))
    finally:
        sys.setrecursionlimit(before)
    assert gradients(module).norm() > 0


@contextlib.contextmanager
def saved() -> Iterator[list[int]]:
    """How many numbers were kept for backward passes at most; the only entry."""
    now, most = [0], [0]

    class Keeper:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()
            now[0] += tensor.numel()
            most[0] = max(most[0], now[0])
            weakref.finalize(self, release, tensor.numel())

    def release(count: int) -> None:
        now[0] -= count

    with torch.autograd.graph.saved_tensors_hooks(Keeper, lambda keeper: keeper.tensor):
        yield most
    gc.collect()


def most_kept(lists: list[list[int]], kept: int) -> int:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    module = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **wide})).eval()
    forest = forest_of(lists)
    rows = forest.end - 1
    walk = Walk(module, torch.float32, kept)
    with saved() as most:
        walk.accumulate(forest, rows, lambda _, hidden: torch.ones_like(hidden))
    return most[0]


def test_more_branches_take_no_more_memory() -> None:
    branches = [[7] * 20 + [branch] + [3] * 99 for branch in range(8)]
    assert most_kept(branches, 10_000) <= 1.05 * most_kept(branches[:2], 10_000)


def test_a_long_path_takes_less_memory_where_less_is_kept() -> None:
    path = np.random.default_rng(0).integers(0, 60, 3_000).tolist()
    assert most_kept([path], 600) <= 0.6 * most_kept([path], 10_000)


def test_copies_of_what_lies_above_count_as_kept() -> None:
    """A path of many nodes, each of which has its own copy of the keys before it."""
    turns = [[1, 2, 3, 4, 5] * turn + [9] for turn in range(1, 41)]
    assert most_kept(turns, 200) <= 0.8 * most_kept(turns, 10_000)


def test_the_same_module_serves_both_back_ends() -> None:
    module = exact_model()
    use_forest_attention(module)
    walked = Walk(module, torch.float64).hidden(FIXED, EVERY_ROW)
    assert module.config._attn_implementation == IMPLEMENTATION
    packed = Packed(module, torch.float64).hidden(FIXED, EVERY_ROW)
    torch.testing.assert_close(walked, packed, rtol=1e-11, atol=1e-11)


def test_attention_is_put_back_after_an_error() -> None:
    module = exact_model()
    use_forest_attention(module)
    with pytest.raises(ZeroDivisionError):
        Walk(module, torch.float64).accumulate(FIXED, EVERY_ROW, lambda _, hidden: hidden / (1 // 0))
    assert module.config._attn_implementation == IMPLEMENTATION


def test_a_cache_that_cannot_be_branched_is_refused_by_name() -> None:
    shape = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
    module = FalconH1ForCausalLM(FalconH1Config(**{**SHAPE, "num_hidden_layers": 1}, **shape))
    with pytest.raises(LearnerError, match="LinearAttentionAndFullAttentionLayer"):
        Walk(module, torch.float32)


def test_a_state_that_the_model_does_not_take_up_is_found_out() -> None:
    """Mamba's scan always starts at zero."""
    module = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)).eval()
    with pytest.raises(LearnerError, match="differ from the model's own"):
        check(module, Walk(module, torch.float32))
