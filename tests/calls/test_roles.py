# ruff: noqa: RUF001 (DeepSeek writes its tokens with a full-width bar)
"""Each sampled token has the role of what it says, in every form of tool call; what only looks like a call has none.

What is expected is known from how a reply was put together, byte by byte, not from reading it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longrein.calls import hermes
from longrein.calls.conversation import Conversation, Message, Tool, ToolCall
from longrein.calls.rendering import Renderer, open_renderer
from longrein.calls.roles import Reading, RoleReader
from longrein.config import ModelSection
from longrein.records import Call, Role, RoleArray
from tests.calls import families
from tests.calls.loaded import tokenizer_of
from tests.calls.properties import examples
from tests.calls.serving import serving
from tests.calls.spoken import (
    BASH,
    EACH,
    FAMILIES,
    TOKENIZERS,
    Family,
    Opened,
    dsml_call,
    encoded,
    glm_call,
    qwen35_call,
)

TYPES = {"text": "string", "more": "string", "count": "integer", "part": "number", "sure": "boolean"}
PROPERTIES = {
    **{key: {"type": name} for key, name in TYPES.items()},
    "list": {"type": "array"},
    "table": {"type": "object"},
}
NAMES = ("bash", "write_file", "mcp__disk__read", "b", "name", "text")
TOOLS = tuple(Tool(name, "Does it.", {"type": "object", "properties": PROPERTIES}) for name in NAMES)

ONE_CALL_A_TURN = ("llama-3", "gpt-oss")


@dataclass
class Said:
    """A reply as it is put together: its text, and which of its characters have a role."""

    text: str = ""
    marks: list[tuple[int, int, Role]] = field(default_factory=list)

    def add(self, text: str, role: Role = Role.OTHER) -> None:
        if role is not Role.OTHER:
            self.marks.append((len(self.text), len(self.text) + len(text), role))
        self.text += text

    def __add__(self, other: "Said | str") -> "Said":
        said = Said(self.text, list(self.marks))
        other = Said(other) if isinstance(other, str) else other
        said.marks += [(start + len(self.text), end + len(self.text), role) for start, end, role in other.marks]
        said.text += other.text
        return said

    def within(self, frame: str) -> "Said":
        """In the place of the one ``CALL`` of a frame."""
        before, _, after = frame.partition(CALL)
        return Said(before) + self + after

    def of_bytes(self) -> list[Role]:
        """The role of each byte."""
        roles = [Role.OTHER] * len(self.text)
        for start, end, role in self.marks:
            roles[start:end] = [role] * (end - start)
        return [role for role, character in zip(roles, self.text, strict=True) for _ in character.encode()]


CALL = "\ue0ff"
"""Stands for a call in a frame; other characters from here stand for its name and its values."""


def written(call: str, name: str, arguments: dict[str, Any], *, quoted: bool) -> Said:
    """A call whose name and values are put in the places of a written one: ``quoted``, where values are JSON."""
    said = Said()
    for i, value in enumerate(arguments.values()):
        place = f'"{chr(0xE000 + i)}"'
        if not isinstance(value, str):
            call = (
                call.replace(place, place[1]) if quoted else call.replace(f'"true">{place[1]}', f'"false">{place[1]}')
            )
    for character in call.replace("bash", "\ue0fe"):
        if character == "\ue0fe":
            said.add(name, Role.ACTION)
        elif "\ue000" <= character < "\ue0fe":
            value = list(arguments.values())[ord(character) - 0xE000]
            text = json.dumps(value, ensure_ascii=False)
            if isinstance(value, str):
                text = text[1:-1] if quoted else value
            said.add(text, Role.ARGUMENTS)
        else:
            said.add(character)
    return said


def call_of(family: Family, name: str, arguments: dict[str, Any]) -> Said:
    places = {key: chr(0xE000 + i) for i, key in enumerate(arguments)}
    quoted = family.call not in TAGGED
    return written(family.call(places), name, arguments, quoted=quoted)


TAGGED = (qwen35_call, dsml_call, FAMILIES["glm-4.5"].call, glm_call)


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """The bytes of each token of a byte-level vocabulary."""
    added = tokenizer.added_tokens_decoder
    texts = tokenizer.convert_ids_to_tokens(ids)
    return [
        text.encode() if token in added else bytes(BYTE_OF[character] for character in text)
        for token, text in zip(ids, texts, strict=True)
    ]


def _byte_of() -> dict[str, int]:
    """The printable stand-ins of bytes, as GPT-2 set them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{chr(byte): byte for byte in shown}, **{chr(256 + i): byte for i, byte in enumerate(hidden)}}


BYTE_OF = _byte_of()


def expected(said: Said, parts: Sequence[bytes]) -> list[int]:
    """The role of most bytes of each token's characters; of equals one that is not other, then the first."""
    whole = said.text.encode()
    assert b"".join(parts) == whole
    told = said.of_bytes()
    roles, at = [], 0
    for part in parts:
        first, after = at, at + len(part)
        # A token with a piece of a character stands over all of it.
        while first > 0 and whole[first] & 0xC0 == 0x80:
            first -= 1
        while after < len(whole) and whole[after] & 0xC0 == 0x80:
            after += 1
        here = told[first:after] if part else []
        at += len(part)
        roles.append(max(here, key=lambda role: (here.count(role), role != Role.OTHER)) if here else Role.OTHER)
    return [int(role) for role in roles]


def reading(
    renderer: Renderer, text: str, tools: Sequence[Tool] = TOOLS, reply: Message | None = None
) -> tuple[list[int], Reading, Message]:
    ids = encoded(renderer, text)
    prompt = renderer.render(Conversation((Message("user", "Go."),), tuple(tools))).ids.tolist()
    reply = reply or renderer.parse(ids, prompt, tools)
    return ids, RoleReader(renderer).read(ids, prompt, tools, reply.tool_calls), reply


def holds(renderer: Renderer, said: Said, *calls: tuple[str, dict[str, Any]]) -> None:
    """The parser reads these calls, and every token has the role that is expected."""
    ids, read, reply = reading(renderer, said.text)
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == list(calls)
    assert read.unknown == ""
    assert read.roles.dtype == np.uint8
    assert read.roles.tolist() == expected(said, pieces(TOKENIZERS[renderer], ids))


ODD: list[dict[str, Any]] = [
    {},
    {"text": "ls -la"},
    {"text": "echo '日本語  🙂\t“é”' > a.txt", "count": 5},
    {"text": "cat <<'E'\n  two\n\n\tlines \nE", "sure": False, "part": -0.25},
    {"text": "printf '%s\\n' \"a\\\\b\"", "more": "👩‍👩‍👧 naïve"},
    {"table": {"a": [1, {"b": "c, “d” }"}], "text": None}, "list": [], "count": 0},
    {"list": ["bash", {"name": "bash", "arguments": {}}]},
    {"text": "bash", "more": "bash"},
    {"text": "text", "more": "more: text"},
    {"text": '{"name": "bash", "arguments": {"text": "ls"}}'},
    {"text": "", "more": "x", "sure": True},
    {"text": "5", "count": 12345678901234567890},
]


@EACH
@pytest.mark.parametrize("arguments", ODD, ids=range(len(ODD)))
def test_names_and_values_have_their_roles(name: str, arguments: dict[str, Any], opened: Opened) -> None:
    family, renderer = FAMILIES[name], opened(name)
    call = call_of(family, "bash", arguments)
    holds(renderer, call.within(family.turn("I think bash, text.", "I bash, 5.", CALL)), ("bash", arguments))


@EACH
@pytest.mark.parametrize("tool", NAMES)
def test_a_name_is_found_where_it_is_called(name: str, tool: str, opened: Opened) -> None:
    family, renderer = FAMILIES[name], opened(name)
    call = call_of(family, tool, {"text": tool, "more": f"{tool} {tool}"})
    frame = family.turn(f"{tool} or name: {tool}", f'"{tool}" it is.', CALL)
    holds(renderer, call.within(frame), (tool, {"text": tool, "more": f"{tool} {tool}"}))


def calls_in(name: str, *calls: Said) -> Said:
    """Several calls one behind the other, as the family writes them."""
    gap = "\n" * (name in ("qwen3", "chatml", "deepseek-v3"))
    said = calls[0]
    for call in calls[1:]:
        said = said + gap + call
    return said


@EACH
def test_each_of_several_calls_has_its_own(name: str, opened: Opened) -> None:
    if name in ONE_CALL_A_TURN:
        pytest.skip("one call a turn is all that the family's form holds")
    family, renderer = FAMILIES[name], opened(name)
    asked: list[tuple[str, dict[str, Any]]]
    asked = [("bash", {"text": "ls"}), ("b", {"text": "ls", "count": 1}), ("bash", {"text": "ls"})]
    asked += [("bash", {}), ("bash", {"text": "pwd"}), ("b", {})]
    said = calls_in(name, *(call_of(family, tool, arguments) for tool, arguments in asked))
    holds(renderer, said.within(family.turn("Hm.", "So.", CALL)), *asked)


@EACH
def test_a_malformed_call_behind_a_good_one_has_no_role(name: str, opened: Opened) -> None:
    if name in ONE_CALL_A_TURN:
        pytest.skip("one call a turn is all that the family's form holds")
    family, renderer = FAMILIES[name], opened(name)
    broken = family.broken.replace('"command"', '"text"').replace("command", "text")
    said = calls_in(name, call_of(family, "bash", {"text": "ls"}), Said(broken))
    holds(renderer, said.within(family.turn("", "", CALL)), ("bash", {"text": "ls"}))


@pytest.mark.parametrize("name", ["qwen3", "chatml", "deepseek-v3"])
def test_a_malformed_call_in_front_of_a_good_one_has_no_role(name: str, opened: Opened) -> None:
    family, renderer = FAMILIES[name], opened(name)
    broken = '<tool_call>\n{"name": "bash", "arguments": {"text": "ls"}}}\n</tool_call>'
    said = calls_in(name, Said(broken), call_of(family, "bash", {"text": "ls"}))
    holds(renderer, said.within(family.turn("", "", CALL)), ("bash", {"text": "ls"}))


THINKING = [name for name, family in FAMILIES.items() if family.thinks]


@pytest.mark.parametrize("name", [name for name in THINKING if not name.startswith("glm")])
def test_a_call_that_is_only_thought_has_no_role(name: str, opened: Opened) -> None:
    """The thought call is the same as the one that is made."""
    family, renderer = FAMILIES[name], opened(name)
    arguments = {"text": "ls “é”", "count": 3}
    call = call_of(family, "bash", arguments)
    thought = call.text if name != "gpt-oss" else 'to=functions.bash {"text": "ls “é”", "count": 3}'
    holds(renderer, call.within(family.turn(f"First {thought} then.", "", CALL)), ("bash", arguments))


@pytest.mark.parametrize("name", ["qwen3", "chatml", "deepseek-v3"])
def test_a_call_that_text_quotes_has_no_role(name: str, opened: Opened) -> None:
    family, renderer = FAMILIES[name], opened(name)
    call = call_of(family, "bash", {"text": "ls"})
    quoted = '{"name": "bash", "arguments": {"text": "ls"}}'
    holds(renderer, call.within(family.turn("", f"I say {quoted} as:", CALL)), ("bash", {"text": "ls"}))


@pytest.mark.parametrize("name", ["qwen3.5", "glm-5"])
def test_a_call_written_in_a_value_is_a_value(name: str, opened: Opened) -> None:
    family, renderer = FAMILIES[name], opened(name)
    inner = call_of(family, "b", {}).text.strip().replace("<tool_call>", "").replace("</tool_call>", "")
    asked: list[tuple[str, dict[str, Any]]]
    asked = [("write_file", {"text": f"as {inner} so", "more": "x"}), ("b", {})]
    said = calls_in(name, *(call_of(family, tool, arguments) for tool, arguments in asked))
    holds(renderer, said.within(family.turn("Hm.", "", CALL)), *asked)


@pytest.mark.parametrize("name", ["qwen3", "chatml", "llama-3"])
def test_a_name_written_with_escapes_is_found(name: str, opened: Opened) -> None:
    renderer = opened(name)
    said = Said('{"name": "')
    said.add("b\\u0061sh", Role.ACTION)
    said.add(f'" , "{"parameters" if name == "llama-3" else "arguments"}":\n{{ "text" :"')
    said.add("l\\u0073", Role.ARGUMENTS)
    said.add('","count":')
    said.add("1e3", Role.ARGUMENTS)
    said.add("} }")
    frame = f"{CALL}<|eot_id|>" if name == "llama-3" else f"<tool_call>{CALL}</tool_call><|im_end|>"
    holds(renderer, said.within(frame), ("bash", {"text": "ls", "count": 1000.0}))


def test_of_a_repeated_argument_the_last_counts(opened: Opened) -> None:
    tagged = Said("<tool_call>\n<function=")
    tagged.add("bash", Role.ACTION)
    tagged.add(">\n<parameter=text>\nold\n</parameter>\n<parameter=count>\n")
    tagged.add("1", Role.ARGUMENTS)
    tagged.add("\n</parameter>\n<parameter=text>\n")
    tagged.add("new", Role.ARGUMENTS)
    tagged.add("\n</parameter>\n</function>\n</tool_call><|im_end|>")
    holds(opened("qwen3.5"), Said("</think>") + tagged, ("bash", {"text": "new", "count": 1}))
    as_json = Said('<tool_call>{"name": "')
    as_json.add("bash", Role.ACTION)
    as_json.add('", "arguments": {"text": "old", "text": "')
    as_json.add("new", Role.ARGUMENTS)
    as_json.add('"}}</tool_call><|im_end|>')
    holds(opened("qwen3"), as_json, ("bash", {"text": "new"}))


def test_arguments_that_are_no_object_are_one_value(opened: Opened) -> None:
    for value, inner in (('"ls \\"é\\""', 'ls \\"é\\"'), ("[1, 2]", "[1, 2]")):
        said = Said('<tool_call>{"name": "')
        said.add("bash", Role.ACTION)
        before, _, after = f'", "arguments": {value}}}</tool_call><|im_end|>'.partition(inner)
        said.add(before)
        said.add(inner, Role.ARGUMENTS)
        said.add(after)
        ids, read, reply = reading(opened("qwen3"), said.text)
        assert len(reply.tool_calls) == 1 and not read.unknown
        assert read.roles.tolist() == expected(said, pieces(TOKENIZERS[opened("qwen3")], ids))


@EACH
def test_a_reply_without_calls_has_no_roles(name: str, opened: Opened) -> None:
    family, renderer = FAMILIES[name], opened(name)
    for text, tools in (
        (family.turn("bash", "bash it is.", ""), TOOLS),
        (family.turn("", "", family.broken), TOOLS),
        (family.turn("", "", family.call({"command": "ls"})), ()),
    ):
        ids, read, reply = reading(renderer, text, tools)
        assert reply.tool_calls == () and read.unknown == ""
        assert read.roles.tolist() == [Role.OTHER] * len(ids)


@EACH
def test_a_reply_cut_by_length_keeps_what_was_called(name: str, opened: Opened) -> None:
    if name in ONE_CALL_A_TURN:
        pytest.skip("one call a turn is all that the family's form holds")
    family, renderer = FAMILIES[name], opened(name)
    first, second = (call_of(family, "bash", {"text": text}) for text in ("ls", "pwd"))
    said = calls_in(name, first, Said(second.text[: second.text.index("pwd") + 2]))
    holds(renderer, said.within(family.turn("", "", CALL).partition(CALL)[0] + CALL), ("bash", {"text": "ls"}))


# ---- any arguments

LETTERS = st.sampled_from([*"ab 5\n\t\"'\\{}[]:,.<>/=", "é", "日", "🙂", "\u200d", "bash", "text", "name", "</"])
TEXTS = st.lists(LETTERS, max_size=12).map("".join)


@EACH
@examples(30)
@given(data=st.data())
def test_roles_part_the_tokens_and_arguments_hold_the_values(name: str, opened: Opened, data: st.DataObject) -> None:
    family, renderer = FAMILIES[name], opened(name)
    # Templates trim values in tags.
    text = TEXTS if family.call not in TAGGED else TEXTS.map(str.strip)
    nested = st.recursive(st.none() | st.integers() | text, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
    kinds = {"text": text, "more": text, "count": st.integers(), "sure": st.booleans(), "list": st.lists(nested)}
    keys = data.draw(st.lists(st.sampled_from(sorted(kinds)), unique=True))
    arguments = {key: data.draw(kinds[key]) for key in keys}
    tool = data.draw(st.sampled_from(NAMES))
    frame = family.turn(data.draw(TEXTS), data.draw(TEXTS), CALL)
    said = call_of(family, tool, arguments).within(frame)
    ids, read, reply = reading(renderer, said.text)
    parts = pieces(TOKENIZERS[renderer], ids)
    if [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] != [(tool, arguments)]:
        return
    assert read.unknown == ""
    assert read.roles.tolist() == expected(said, parts)
    held = b"".join(part for part, role in zip(parts, read.roles.tolist(), strict=True) if role == Role.ARGUMENTS)
    for start, end, role in said.marks:
        if role is Role.ARGUMENTS:
            assert within(said, parts, start, end) in held


def within(said: Said, parts: Sequence[bytes], start: int, end: int) -> bytes:
    """What the tokens hold that lie wholly within characters: all of them, where none lies over an end."""
    first, after = (len(said.text[:at].encode()) for at in (start, end))
    ends = np.cumsum([len(part) for part in parts]).tolist()
    inside = (part for part, stop in zip(parts, ends, strict=True) if first <= stop - len(part) and stop <= after)
    return b"".join(inside)


# ---- other forms and other tokenizers

KIMI = [
    *["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<think>", "</think>"],
    *["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"],
    "<|tool_call_argument_begin|>",
]
MINIMAX = ["]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"]
QWEN = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
LAGUNA = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<assistant>", "</assistant>", "〈|EOS|〉"]
# Family, its special tokens, a turn with two calls (¹name¹ and ²value² stand for their roles).
OTHERS = {
    "kimi-k2": (
        KIMI,
        "<|im_end|>",
        "bash.<|tool_calls_section_begin|><|tool_call_begin|>functions.¹bash¹:0<|tool_call_argument_begin|>"
        '{"text": "²ls é²", "count": ²5²}<|tool_call_end|><|tool_call_begin|>functions.¹bash¹:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
    ),
    "minimax-m2": (
        MINIMAX,
        "[e~[",
        'bash.</think>So.<minimax:tool_call>\n<invoke name="¹bash¹">\n<parameter name="text">²ls é²</parameter>\n'
        '<parameter name="count">²5²</parameter>\n</invoke>\n<invoke name="¹bash¹">\n</invoke>\n'
        "</minimax:tool_call>[e~[",
    ),
    "nemotron-3": (
        [*QWEN, "<tool_response>", "</tool_response>"],
        "<|im_end|>",
        "bash.</think>\n<tool_call>\n<function=¹bash¹>\n<parameter=text>\n²ls é²\n</parameter>\n<parameter=count>\n²5²"
        "\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=¹bash¹>\n</function>\n</tool_call><|im_end|>",
    ),
    "laguna-xs.2": (
        LAGUNA,
        "〈|EOS|〉",
        "</think>bash.<tool_call>¹bash¹\n<arg_key>text</arg_key>\n<arg_value>²ls é²</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>²5²</arg_value>\n</tool_call>\n<tool_call>¹bash¹\n</tool_call>〈|EOS|〉",
    ),
}


def marked(text: str) -> Said:
    """Text in which ``¹name¹`` and ``²value²`` have their roles."""
    said = Said()
    for part in re.split("(¹.*?¹|².*?²)", text):
        role = {"¹": Role.ACTION, "²": Role.ARGUMENTS}.get(part[:1], Role.OTHER)
        said.add(part if role is Role.OTHER else part[1:-1], role)
    return said


def own(directory: Path, **keys: Any) -> Renderer:
    renderer = open_renderer(directory, ModelSection(path=str(directory), **keys))
    TOKENIZERS[renderer] = tokenizer_of(directory)
    return renderer


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_of_the_package(name: str, tmp_path: Path) -> None:
    special, end, text = OTHERS[name]
    renderer = own(families.small_tokenizer(tmp_path, special, end), renderer=name)
    holds(renderer, marked(text), ("bash", {"text": "ls é", "count": 5}), ("bash", {}))


DEEPSEEK_CALLS = (
    "<｜begin▁of▁sentence｜>{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<｜Assistant｜>{{ m['content'] }}{% if m['tool_calls'] %}<｜tool▁calls▁begin｜>"
    "{% for c in m['tool_calls'] %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c['function']['name'] }}\n```json\n"
    "{{ c['function']['arguments'] | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    "<｜end▁of▁sentence｜>{% else %}<｜User｜>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


def test_deepseek_v3s_own_form_through_its_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(families.deepseek_directory())
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(DEEPSEEK_CALLS, encoding="utf-8")
    renderer = own(tmp_path, renderer="template")
    text = (
        "bash:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>¹bash¹\n```json\n"
        '{"text": "²ls é²", "count": ²5²}\n```<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>¹bash¹\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    )
    holds(renderer, marked(text), ("bash", {"text": "ls é", "count": 5}), ("bash", {}))


CODER_CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}{% for c in m['tool_calls'] %}<tool_call>\n<function={{ c['function']['name'] }}>\n"
    "{% for k, v in c['function']['arguments'].items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_calls_in_tags_through_a_template(tmp_path: Path) -> None:
    renderer = own(families.small_tokenizer(tmp_path, QWEN, "<|im_end|>", CODER_CALLS), renderer="template")
    text = (
        "bash:<tool_call>\n<function=¹bash¹>\n<parameter=text>\n²ls é²\n</parameter>\n<parameter=count>\n²5²\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=¹bash¹>\n</function>\n</tool_call><|im_end|>"
    )
    holds(renderer, marked(text), ("bash", {"text": "ls é", "count": 5}), ("bash", {}))


def sentencepiece_tokenizer(directory: Path) -> Path:
    """Pieces with ``▁`` for a space and bytes for what has no piece, as Llama 2 and Mistral write text."""
    letters = [chr(code) for code in range(33, 127)] + ["▁", "▁bash", "ls", '▁"', '":', "tool", '"}', "é", "本", '本"}']
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("▁", '"'), ('"', ":"), ("l", "s"), ('"', "}"), ("本", '"}')]
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(vocabulary)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = families.CHATML_TEMPLATE
    fast.save_pretrained(directory)
    return directory


def test_pieces_and_bytes_in_the_way_of_sentencepiece(tmp_path: Path) -> None:
    renderer = own(sentencepiece_tokenizer(tmp_path), tool_format="hermes")
    text = (
        'bash <tool_call>\n{"name": "¹bash¹", "arguments": {"text": "² ls 🙂日é²", "more": "²\n本²"}}\n</tool_call>'
    ).replace("\n本", "\\n本")
    said = marked(text + "<|im_end|>")
    ids, read, reply = reading(renderer, said.text)
    assert [json.loads(call.arguments) for call in reply.tool_calls] == [{"text": " ls 🙂日é", "more": "\n本"}]
    assert read.unknown == ""
    tokenizer = TOKENIZERS[renderer]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert '本"}' in tokens
    assert sum(token.startswith("<0x") for token in tokens) == 7 + 2
    parts = [
        bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("▁", " ").encode()
        for token in tokens
    ]
    parts[0] = parts[0].removeprefix(b" ")
    assert read.roles.tolist() == expected(said, parts)
    assert read.roles.tolist().count(Role.ARGUMENTS) == 1 + 1 + 1 + 4 + 3 + 1 + 2 + 1


class OfBytes:
    """A renderer whose tokens are any bytes: what a text is cut into, be it within a character."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.vocabulary = [b"a", *parts]
        self.ids = [*range(1, len(parts) + 1)]

    def encode(self, text: str, *, begin: bool) -> Any:
        assert text == "a"
        return np.zeros(1, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.vocabulary[i] for i in ids).decode("utf-8", "replace")

    def parse(self, ids: list[int], prompt_ids: list[int], tools: Sequence[Tool]) -> Message:
        text, blocks = hermes.split(self.decode(ids))
        calls = (ToolCall("", block.name, block.arguments) for block in blocks if block.name is not None)
        return Message("assistant", text, tuple(calls))


@examples(200)
@given(data=st.data())
def test_text_may_be_cut_into_tokens_anywhere(data: st.DataObject) -> None:
    asked = [
        (data.draw(st.sampled_from(NAMES)), {"text": data.draw(TEXTS)}) for _ in range(data.draw(st.integers(1, 2)))
    ]
    said = calls_in("chatml", *(call_of(FAMILIES["chatml"], tool, arguments) for tool, arguments in asked))
    said = Said(data.draw(TEXTS)) + said + data.draw(TEXTS)
    whole = said.text.encode()
    # No token is as long as a call.
    longest = data.draw(st.integers(1, 20))
    cuts = sorted({*data.draw(st.sets(st.integers(1, len(whole) - 1))), *range(longest, len(whole), longest)})
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    renderer: Any = OfBytes(parts)
    calls = renderer.parse(renderer.ids, [], ()).tool_calls
    if [(call.name, json.loads(call.arguments)) for call in calls] != asked:
        return
    read = RoleReader(renderer).read(renderer.ids, [], (), calls)
    assert read.unknown == ""
    assert read.roles.tolist() == expected(said, parts)


# ---- what cannot be told


def test_a_form_that_is_not_known_is_said_so(tmp_path: Path) -> None:
    special = [
        *["<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"],
        *["<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<|image|>", "<image|>"],
        *["<|audio>", "<|audio|>", "<audio|>", "<|video|>", '<|"|>'],
    ]
    renderer = own(families.small_tokenizer(tmp_path, special, "<eos>"), renderer="gemma4")
    # The second time, what text quotes in a known form is not the call.
    for text in ("", '{"name": "bash", "arguments": {"text": "ls"}} '):
        ids, read, reply = reading(renderer, f'{text}<|tool_call>call:bash{{text:<|"|>ls<|"|>}}<tool_call|><turn|>')
        assert [call.name for call in reply.tool_calls] == ["bash"]
        assert read.unknown == "the reply's calls are not written in a known form: bash"
        assert read.roles.tolist() == [Role.OTHER] * len(ids)


def test_a_reply_that_the_tokens_do_not_say_is_said_so(opened: Opened) -> None:
    """What only looks like a call is none, though a reply that somebody made up names it."""
    family, renderer = FAMILIES["qwen3"], opened("qwen3")
    call = family.call({"text": "ls"})
    made_up = Message("assistant", "", (ToolCall("", "bash", '{"text": "ls"}'),))
    for text in (
        family.turn(f"Say {call}", "No.", ""),
        family.turn("", "No.", family.call({"text": "pwd"})),
        family.turn(f"Say {call}", f"No {call[11:-12]}.", ""),
    ):
        ids, read, _ = reading(renderer, text, reply=made_up)
        assert read.unknown and read.roles.tolist() == [Role.OTHER] * len(ids)


def test_very_deep_arguments_do_no_harm(opened: Opened) -> None:
    deep = "[" * 300 + "]" * 300
    text = f'<tool_call>{{"name": "bash", "arguments": {{"list": {deep}}}}}</tool_call><|im_end|>'
    ids, read, reply = reading(opened("qwen3"), text)
    assert len(reply.tool_calls) == 1 and not read.unknown
    assert read.roles.tolist().count(Role.ARGUMENTS) > 0 and len(read.roles) == len(ids)


# ---- recording

BASH_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>'


async def recorded(directory: Path, *replies: str, tools: Sequence[Tool] = (BASH,), **body: Any) -> list[Call]:
    async with serving(directory, *replies) as house:
        key = house.open()
        for _ in replies:
            asked = {"messages": [{"role": "user", "content": "Go."}], **body}
            if tools:
                asked["tools"] = [tool.as_function() for tool in tools]
            async with house.begun(key, asked) as reply:
                await reply.aread()
        return house.notebook.calls


def decoded(directory: Path, call: Call, roles: RoleArray, role: Role) -> str:
    return str(tokenizer_of(directory).decode(call.completion_ids[roles == role].tolist()))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_recorded_with_its_roles(qwen3_directory: Path, stream: bool) -> None:
    (call,) = await recorded(qwen3_directory, f"bash:\n{BASH_CALL}", stream=stream)
    assert call.roles is not None and call.roles.shape == call.completion_ids.shape and call.roles.dtype == np.uint8
    assert decoded(qwen3_directory, call, call.roles, Role.ACTION) == "bash"
    assert decoded(qwen3_directory, call, call.roles, Role.ARGUMENTS) == "ls é"


async def test_a_call_cut_at_a_stop_text_keeps_its_roles(qwen3_directory: Path) -> None:
    (call,) = await recorded(qwen3_directory, f"{BASH_CALL}\n{BASH_CALL.replace('ls é', 'STOP it')}", stop="STOP")
    assert call.roles is not None
    assert decoded(qwen3_directory, call, call.roles, Role.ARGUMENTS) == "ls é"


async def test_text_is_recorded_without_roles(qwen3_directory: Path) -> None:
    assert [call.roles for call in await recorded(qwen3_directory, "bash", BASH_CALL, tools=())] == [None, None]
