# ruff: noqa: RUF001 (DeepSeek writes its tokens with a full-width bar)
"""How a model of each family writes a turn, and its renderer."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from longrein.calls.conversation import Tool
from longrein.calls.rendering import Renderer, open_renderer
from longrein.config import ModelSection
from longrein.records import Cause
from tests.calls import families
from tests.calls.loaded import tokenizer_of

BASH = Tool(
    "bash",
    "Runs a command.",
    {"type": "object", "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}}},
)
NOTE = "Only two minutes are left."
NEW, EXTENDED, DROPPED = Cause.NEW_SESSION, Cause.EXTENDED, Cause.TEMPLATE_DROPPED_THINKING


@dataclass(frozen=True)
class Family:
    """How a model of the family writes.

    Attributes:
        call: a call of bash with these arguments, as the model samples it.
        turn: a turn out of thinking, text and a written call (either may be empty), up to and with its stop token.
        broken: what stands for ``call`` in a malformed turn.
        stops: the texts of its stop tokens.
        note: how a system message in the middle is shown.
        causes: of the four calls of a conversation: two with tool calls, one that answers, one after a user turn.
        thinks: whether it has a form for thinking.
        says: whether text may stand beside a call.
    """

    call: Callable[[dict[str, Any]], str]
    turn: Callable[[str, str, str], str]
    broken: str
    stops: set[str]
    note: str
    causes: tuple[Cause, ...]
    keys: dict[str, Any] = field(default_factory=dict)
    thinks: bool = True
    says: bool = True


def as_json(arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": "bash", key: arguments}, ensure_ascii=False)


def hermes_call(arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{as_json(arguments)}\n</tool_call>"


def qwen35_call(arguments: dict[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=bash>\n{values}</function>\n</tool_call>"


def glm_call(arguments: dict[str, Any], gap: str = "") -> str:
    pairs = (f"<arg_key>{k}</arg_key>{gap}<arg_value>{v}</arg_value>{gap}" for k, v in arguments.items())
    return f"<tool_call>bash{gap}{''.join(pairs)}</tool_call>"


def harmony_call(arguments: dict[str, Any]) -> str:
    written = json.dumps(arguments, ensure_ascii=False)
    return f"<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{written}<|call|>"


def harmony_turn(thought: str, text: str, call: str) -> str:
    said = f"<|channel|>{'commentary' if call else 'final'}<|message|>{text}{'<|end|>' if call else '<|return|>'}"
    parts = [said] * bool(text) + [call] * bool(call)
    return f"{thought}<|end|>" + "".join(f"<|start|>assistant{part}" for part in parts)


def dsml_call(arguments: dict[str, Any]) -> str:
    values = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{value}'
        "</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n{values}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


def lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        hermes_call,
        lambda thought, text, call: f"<think>\n{thought}\n</think>\n\n{lines(text, call)}<|im_end|>",
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>',
        {"<|im_end|>", "<|endoftext|>"},
        f"<|im_start|>system\n{NOTE}<|im_end|>",
        (NEW, EXTENDED, EXTENDED, DROPPED),
    ),
    "qwen3.5": Family(
        qwen35_call,
        lambda thought, text, call: f"{thought}\n</think>\n\n{lines(text, call)}<|im_end|>",
        "<tool_call>\n<function=bash>\n<parameter=command>\nls",
        {"<|im_end|>", "<|endoftext|>"},
        f"<|im_start|>user\n<system>\n{NOTE}\n</system><|im_end|>",
        (NEW, EXTENDED, EXTENDED, DROPPED),
        {"renderer": "qwen3.5"},
    ),
    "qwen3.6": Family(
        qwen35_call,
        lambda thought, text, call: f"{thought}\n</think>\n\n{lines(text, call)}<|im_end|>",
        "<tool_call>\n<function=bash>\n<parameter=command>\nls",
        {"<|im_end|>", "<|endoftext|>"},
        f"<|im_start|>user\n<system>\n{NOTE}\n</system><|im_end|>",
        (NEW, EXTENDED, EXTENDED, DROPPED),
        {"renderer": "qwen3.6"},
    ),
    "glm-4.5": Family(
        lambda arguments: glm_call(arguments, "\n"),
        lambda thought, text, call: (
            f"\n<think>{thought}</think>\n{lines(text, call)}{'<|observation|>' if call else '<|user|>'}"
        ),
        "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls",
        {"<|endoftext|>", "<|user|>", "<|observation|>"},
        f"<|system|>\n{NOTE}<|assistant|>",
        (NEW, EXTENDED, EXTENDED, DROPPED),
        {"renderer": "glm-4.5"},
    ),
    "glm-5": Family(
        glm_call,
        lambda thought, text, call: f"{thought}</think>{text}{call}{'<|observation|>' if call else '<|user|>'}",
        "<tool_call>bash<arg_key>command</arg_key><arg_value>ls",
        {"<|endoftext|>", "<|user|>", "<|observation|>"},
        f"<|system|>{NOTE}<|assistant|>",
        (NEW, EXTENDED, EXTENDED, DROPPED),
        {"renderer": "glm-5"},
    ),
    "llama-3": Family(
        lambda arguments: as_json(arguments, "parameters"),
        lambda _, text, call: f"{call or text}<|eot_id|>",
        '{"name": "bash", "parameters": {"command": "ls}',
        {"<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"},
        f"<|start_header_id|>system<|end_header_id|>\n\n{NOTE}<|eot_id|>",
        (NEW, EXTENDED, EXTENDED, EXTENDED),
        {"renderer": "llama-3"},
        thinks=False,
        says=False,
    ),
    "gpt-oss": Family(
        harmony_call,
        harmony_turn,
        '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls<|call|>',
        {"<|return|>", "<|call|>"},
        f"<|start|>developer<|message|># Instructions\n\n{NOTE}<|end|>",
        (NEW, EXTENDED, EXTENDED, DROPPED),
        {"renderer": "gpt-oss"},
    ),
    "deepseek-v3": Family(
        hermes_call,
        lambda _, text, call: f"{lines(text, call)}<｜end▁of▁sentence｜>",
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>',
        {"<｜end▁of▁sentence｜>"},
        f"<｜User｜><system>\n{NOTE}\n</system><｜Assistant｜>",
        (NEW, EXTENDED, EXTENDED, EXTENDED),
        {"renderer": "template", "tool_format": "hermes"},
        thinks=False,
    ),
    "deepseek-v4": Family(
        dsml_call,
        lambda _, text, call: f"{text}{call}<｜end▁of▁sentence｜>",
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">ls',
        {"<｜end▁of▁sentence｜>"},
        f"<system>\n{NOTE}\n</system><｜Assistant｜>",
        (NEW, EXTENDED, EXTENDED, EXTENDED),
        {"renderer": "deepseek-v4"},
        thinks=False,
    ),
    "chatml": Family(
        hermes_call,
        lambda _, text, call: f"{lines(text, call)}<|im_end|>",
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>',
        {"<|im_end|>"},
        f"<|im_start|>system\n{NOTE}<|im_end|>",
        (NEW, EXTENDED, EXTENDED, EXTENDED),
        {"tool_format": "hermes"},
        thinks=False,
    ),
}
EACH = pytest.mark.parametrize("name", FAMILIES)

Opened = Callable[..., Renderer]
"""Opens the renderer of a family, each once."""

TOKENIZERS: dict[Renderer, Any] = {}


def opener(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Opened:
    known: dict[Any, Renderer] = {}
    small: dict[str, Path] = {}

    def made(name: str, special: list[str], end: str, template: str | None = None) -> Path:
        if name not in small:
            small[name] = families.small_tokenizer(tmp_path_factory.mktemp(name), special, end, template)
        return small[name]

    def directory_of(name: str) -> Path:
        if name.startswith("qwen"):
            directory: Path = request.getfixturevalue("qwen3_directory")
            return directory
        if name == "gpt-oss":
            return families.gpt_oss_directory()
        if name.startswith("deepseek"):
            return families.deepseek_directory()
        if name.startswith("glm"):
            return made("glm", families.GLM, "<|endoftext|>")
        if name == "llama-3":
            return made("llama", families.LLAMA, "<|eot_id|>")
        return made("chatml", ["<|im_start|>", "<|im_end|>"], "<|im_end|>", families.CHATML_TEMPLATE)

    def opened(name: str, **keys: Any) -> Renderer:
        key = (name, *sorted(keys.items()))
        if key not in known:
            directory = directory_of(name)
            with pytest.MonkeyPatch.context() as patch:
                # Where the harmony library finds its vocabulary without a network.
                patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(directory))
                section = ModelSection(path=str(directory), **FAMILIES[name].keys, **keys)
                known[key] = open_renderer(directory, section)
            TOKENIZERS[known[key]] = tokenizer_of(directory)
        return known[key]

    return opened


def encoded(renderer: Renderer, text: str) -> list[int]:
    ids: list[int] = TOKENIZERS[renderer].encode(text, add_special_tokens=False)
    return ids
