"""What the decoder takes, refuses, and notices by itself."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from longrein.engines.decoder import Decoder
from longrein.engines.linear import Linear
from longrein.engines.parity import checked_decoder
from longrein.engines.prefill import logits_alone
from longrein.errors import ModelError

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SMALL | changes))).eval()


@pytest.mark.parametrize(
    "module",
    [
        llama(tie_word_embeddings=False),
        llama(tie_word_embeddings=True),
        llama(attention_bias=True, mlp_bias=True),
        llama(head_dim=16),
        llama(num_key_value_heads=4),
        llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        llama(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
        MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)).eval(),
    ],
    ids=["own head", "tied", "biases", "wide heads", "no groups", "yarn", "llama3 rope", "mistral"],
)
def test_it_computes_what_the_module_computes(module: PreTrainedModel) -> None:
    decoder = checked_decoder(module, torch.float32)
    ids = torch.randint(0, 100, (200,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = logits_alone(decoder, ids).log_softmax(1)
        theirs = module(input_ids=ids[None]).logits[0].log_softmax(1)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


# peft asks transformers for a property under its old name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_peft_module_is_served_by_its_base() -> None:
    module = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    decoder = checked_decoder(module, torch.float32)
    decoder.load({"model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)})


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)), "family is 'gpt2'"),
        (MistralForCausalLM(MistralConfig(**SMALL, sliding_window=16)), "sliding window of 16"),
        (
            Qwen2ForCausalLM(Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1)),
            "layers of kind sliding_attention",
        ),
        (llama(hidden_act="gelu"), "activation is 'gelu'"),
        (llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "embedding is 'dynamic'"),
    ],
    ids=["gpt2", "window", "window layers", "activation", "rope"],
)
def test_what_it_cannot_compute_is_refused_by_name(module: PreTrainedModel, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Decoder(module, torch.float32)


def test_an_unforeseen_difference_is_noticed() -> None:
    module = llama()
    layer: Any = module.model.layers[1].mlp
    layer.act_fn = torch.nn.GELU()
    with pytest.raises(ModelError, match="computes LlamaForCausalLM differently"):
        checked_decoder(module, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_matrix_comes_back_unchanged(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 33).to(dtype)
    linear = Linear(weight)
    assert torch.equal(linear.dense(), weight)
    linear.dense().zero_()
    assert torch.equal(linear.dense(), weight), "dense() must be a copy"
    x = torch.randn(5, 33).to(dtype)
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight), atol=0.1, rtol=0.02)
