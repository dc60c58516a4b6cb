"""A tiny random model with its own tokenizer and chat template, made on the spot."""

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Family = Literal["llama", "qwen2", "qwen3"]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = [
    "system user assistant tool",
    "You work in a Linux shell. Answer every task with exactly one bash code block and nothing else.",
    "```bash\necho hello > greet.txt\n```\n```bash\ncat notes.txt | wc -l\n```",
    "Create a file named out.txt that contains exactly the word river. Then submit the task.",
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la"}}\n</tool_call>',
    "<returncode>0</returncode>\n<output>\napple stone cloud\n</output>",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 entries with ChatML's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_tiny_model(directory: Path, family: Family = "llama", seed: int = 0) -> Path:
    """Save model, tokenizer and template into ``directory`` (made if absent) and return it."""
    tokenizer = make_tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=16, **shape))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
