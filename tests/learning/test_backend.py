"""Back ends: checked against the model itself, chosen by measured cost; FlexAttention's forward against the tiles."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from longrein.config import LoraSection
from longrein.errors import LearnerError
from longrein.forest.forest import Forest, IndexArray, grow
from longrein.learning.adapters import attach
from longrein.learning.attention import ForestView, forest_attention, use_forest_attention
from longrein.learning.backend import Backend, Packed, Pull, check
from longrein.learning.costs import Faster, choose_backend, measure, predict
from longrein.learning.walk import Walk

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(sliding_window=4, **SHAPE)).eval()


def granite() -> Any:
    """Divides its logits, which a bare head does not."""
    return GraniteForCausalLM(GraniteConfig(logits_scaling=4.0, **SHAPE)).eval()


def forest_of(trunk: int, branches: int, length: int) -> Forest:
    random = np.random.default_rng(0)
    shared = random.integers(0, 60, trunk)
    tails = [np.append(first, random.integers(0, 60, length)) for first in range(branches)]
    return grow([np.concatenate([shared, tail]).astype(np.int32) for tail in tails])[0]


def opened(module: Any, name: str) -> Backend:
    if name == "walk":
        return Walk(module, torch.float32)
    use_forest_attention(module)
    return Packed(module, torch.float32)


@pytest.mark.parametrize("name", ["packed", "walk"])
def test_a_back_end_agrees_with_the_model(name: str) -> None:
    module = llama()
    module.model.norm.weight.grad = torch.ones(32)
    check(module, opened(module, name))
    assert module.get_input_embeddings().weight.grad is None
    assert float(module.model.norm.weight.grad.sum()) == 32


def test_a_model_with_adapters_is_checked_too() -> None:
    module = attach(llama(), LoraSection(rank=2)).get_base_model()
    check(module, opened(module, "walk"))
    with pytest.raises(LearnerError, match="'llama': the gradients"):
        check(module, Detached(module))
    assert not module.get_input_embeddings().weight.requires_grad
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("name", ["packed", "walk"])
def test_a_head_that_is_not_plain_is_found_out(name: str) -> None:
    module = granite()
    with pytest.raises(LearnerError, match="'granite': the logits"):
        check(module, opened(module, name))


class Detached:
    """Right states, but a gradient that stays in its branch, as if a cache had no gradient."""

    def __init__(self, module: Any) -> None:
        self.walk = Walk(module, torch.float32)
        self.module = module

    def hidden(self, forest: Forest, rows: IndexArray) -> Tensor:
        return self.walk.hidden(forest, rows)

    def accumulate(self, forest: Forest, rows: IndexArray, pull: Pull) -> None:
        inner = set(forest.parent.tolist())
        leaves = [node not in inner for node in forest.node_of[rows]]
        some = np.flatnonzero(leaves)
        self.walk.accumulate(forest, rows[some], lambda ready, states: pull(some[ready], states))


def test_a_gradient_that_is_lost_is_found_out() -> None:
    module = llama()
    with pytest.raises(LearnerError, match="'llama': the gradients"):
        check(module, Detached(module))


def test_the_back_end_asked_for_is_taken() -> None:
    assert isinstance(choose_backend(llama(), torch.float32, "packed"), Packed)
    assert isinstance(choose_backend(llama(), torch.float32, "walk"), Walk)
    assert isinstance(choose_backend(llama(), torch.float32, "fastest"), Faster)
    assert isinstance(choose_backend(llama(), torch.float32), Packed)


def test_a_model_with_attention_of_its_own_is_walked() -> None:
    assert isinstance(choose_backend(mistral(), torch.float32), Walk)
    with pytest.raises(LearnerError, match="sliding window of 4"):
        choose_backend(mistral(), torch.float32, "packed")


def test_a_model_that_none_can_compute_is_refused_with_all_reasons() -> None:
    with pytest.raises(LearnerError, match=r"the logits.*the logits"):
        choose_backend(granite(), torch.float32)


class Timed:
    """Computes nothing, in a time of its own that passes by a known rule."""

    def __init__(self, *cost: float) -> None:
        self.cost = np.array(cost)
        self.now = 0.0
        self.asked = 0

    def hidden(self, forest: Forest, rows: IndexArray) -> Tensor:
        self.asked += 1
        return torch.zeros(len(rows), 32)

    def accumulate(self, forest: Forest, rows: IndexArray, pull: Pull) -> None:
        self.asked += 1
        self.now += predict(self.cost, forest)


@pytest.mark.parametrize("cost", [(2e-3, 3e-6, 0.1), (2e-3, 0.0, 0.1), (2e-3, 3e-6, 0.0), (2e-3, 0.0, 0.0)])
def test_costs_are_found_by_timing(cost: tuple[float, ...]) -> None:
    timed = Timed(*cost)
    np.testing.assert_allclose(measure(llama(), timed, lambda: timed.now), cost, rtol=1e-6, atol=1e-9)


def test_no_cost_is_negative() -> None:
    """As where a longer pass is faster per token than a short one."""
    timed = Timed(2e-3, -1e-6, -1e-2)
    found = measure(llama(), timed, lambda: timed.now)
    assert (found >= 0).all()
    assert found[0] > 0


def test_a_cost_counts_tokens_pairs_and_nodes() -> None:
    forest = forest_of(10, 3, 4)
    pairs = sum(len([k for k in range(q + 1) if forest.last_descendant[k] > q]) for q in range(len(forest)))
    assert [predict(np.eye(3)[which], forest) for which in range(3)] == [len(forest), pairs, 4]


def test_each_forest_goes_to_the_faster_back_end() -> None:
    module = llama()
    packed, walk = Timed(1.0, 0.1, 0.0), Timed(1.0, 0.0, 50.0)
    faster = Faster(module, {"packed": packed, "walk": walk})
    faster.costs = {"packed": packed.cost, "walk": walk.cost}
    bushy, long = forest_of(5, 20, 3), forest_of(200, 2, 10)
    assert (faster.choose(bushy), faster.choose(long)) == ("packed", "walk")
    packed.asked = walk.asked = 0
    faster.hidden(bushy, np.zeros(1, np.int64))
    faster.accumulate(long, np.zeros(1, np.int64), lambda _, hidden: hidden)
    assert (packed.asked, walk.asked) == (1, 1)


def test_measuring_leaves_gradients_alone() -> None:
    module = llama()
    module.model.norm.weight.grad = torch.ones(32)
    measure(module, Walk(module, torch.float32))
    assert module.get_input_embeddings().weight.grad is None
    assert float(module.model.norm.weight.grad.sum()) == 32


class Layer(torch.nn.Module):
    """What an attention layer says of itself."""

    num_key_value_groups = 3
    is_causal = True


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("shape", [(1, 1, 0), (40, 3, 50), (200, 4, 130)])
def test_flex_attention_gives_what_the_tiles_give(shape: tuple[int, int, int]) -> None:
    """Forward only: it has no backward on a CPU."""
    forest = forest_of(*shape)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(forest), 16, generator=generator) for heads in (6, 2, 2))
    with torch.no_grad():
        tiled, flexed = (
            forest_attention(
                Layer(),
                query,
                key,
                value,
                None,
                scaling=0.3,
                forest=ForestView(forest, torch.device("cpu"), torch.float32, flex),
            )[0]
            for flex in (False, True)
        )
    torch.testing.assert_close(flexed, tiled, rtol=1e-5, atol=1e-5)
