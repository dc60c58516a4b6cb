"""Tiled attention against a dense mask over all pairs, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from longrein.errors import LearnerError
from longrein.forest.forest import Forest, grow
from longrein.learning.attention import ForestView, forest_attention, use_forest_attention
from tests.learning.models import exact_model

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


class Layer(torch.nn.Module):
    """What an attention layer says of itself."""

    num_key_value_groups = 3
    is_causal = True


def forest_of(lengths: list[int], seed: int) -> Forest:
    """A trunk, and branches that leave it and one another at random places."""
    random = np.random.default_rng(seed)
    sequences = [random.integers(0, 3, lengths[0]).astype(np.int32)]
    for length in lengths[1:]:
        other = sequences[random.integers(len(sequences))]
        kept = other[: random.integers(0, len(other) + 1)]
        sequences.append(np.concatenate([kept, random.integers(0, 3, length)]).astype(np.int32))
    return grow(sequences)[0]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=6), st.integers(0, 1000))
def test_output_and_gradient_are_those_of_a_dense_mask(lengths: list[int], seed: int) -> None:
    forest = forest_of(lengths, seed)
    size = len(forest)
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, heads, size, width, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, width in ((6, 8), (2, 8), (2, 5))
    )
    pull = torch.randn(1, size, 6, 5, generator=generator, dtype=torch.float64)
    view = ForestView(forest, CPU, torch.float64)
    found, _ = forest_attention(Layer(), query, key, value, None, scaling=0.3, forest=view)
    grads = torch.autograd.grad((found * pull).sum(), (query, key, value))
    place = torch.arange(size)
    seen = (place[None] <= place[:, None]) & (place[:, None] < torch.from_numpy(forest.last_descendant)[None])
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), attn_mask=seen, scale=0.3
    ).transpose(1, 2)
    wanted = torch.autograd.grad((expected * pull).sum(), (query, key, value))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-10)


def test_autocast_computes_in_bfloat16() -> None:
    forest = forest_of([40, 30, 20], 0)
    query, key, value = (torch.randn(1, heads, len(forest), 8) for heads in (6, 2, 2))
    exact, _ = forest_attention(Layer(), query, key, value, None, forest=ForestView(forest, CPU, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        rough, _ = forest_attention(Layer(), query, key, value, None, forest=ForestView(forest, CPU, torch.bfloat16))
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, rtol=0.05, atol=0.05)


def test_without_a_forest_it_is_plain_causal_attention() -> None:
    plain, other = exact_model(), exact_model()
    use_forest_attention(other)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, plain(ids).logits)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"sliding_window": 8}, "sliding_window"),
        ({"softcap": 30.0}, "softcap"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1, 1, 3, 3, dtype=torch.bool)}, "attention_mask"),
    ],
)
def test_a_layer_that_asks_for_more_is_refused(kwargs: dict[str, Any], says: str) -> None:
    forest = grow([np.array([1, 2, 3], np.int32)])[0]
    one = torch.zeros(1, 1, 3, 4)
    with pytest.raises(LearnerError, match=says):
        forest_attention(
            Layer(),
            one,
            one,
            one,
            kwargs.pop("attention_mask", None),
            forest=ForestView(forest, CPU, one.dtype),
            **kwargs,
        )


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (MistralForCausalLM(MistralConfig(sliding_window=16, **SHAPE)), "sliding window of 16"),
        (Gemma2ForCausalLM(Gemma2Config(**SHAPE)), "sliding_attention and capped"),
        (LlamaForCausalLM(LlamaConfig(attention_dropout=0.1, **SHAPE)), "dropout 0.1"),
    ],
    ids=["window", "capped", "dropout"],
)
def test_a_model_with_other_attention_is_refused(module: Any, says: str) -> None:
    with pytest.raises(LearnerError, match=says):
        use_forest_attention(module)
