"""What is told of a growing reply is what the finished reply begins with, however its tokens arrive."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.calls.conversation import Conversation, Message, Tool, same_message
from longrein.calls.hermes import arguments_text
from longrein.calls.rendering import Renderer
from longrein.calls.reply import GrowingReply
from tests.calls.loaded import renderer_of, tokenizer_of
from tests.calls.properties import examples

BASH = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
PIECES = [
    "Hello ",
    "🙂é日本",
    "\n\n",
    " ",
    "<",
    "<tool",
    "</think>",
    "<think>\nHm, so.\n</think>\n\n",
    "a < b > c",
    CALL,
    '<tool_call>\n{"name": broken\n</tool_call>',
    "<tool_call>\n{",
    "<|im_end|>",
]


@pytest.fixture(scope="module")
def stands(tiny_directory: Path, qwen3_directory: Path) -> list[tuple[Renderer, Any]]:
    """Every kind of renderer with its tokenizer."""
    kinds: list[tuple[Path, dict[str, Any]]] = [
        (tiny_directory, {}),
        (tiny_directory, {"tool_format": "hermes"}),
        (qwen3_directory, {}),
        (qwen3_directory, {"renderer": "template"}),
    ]
    return [(renderer_of(directory, **keys), tokenizer_of(directory)) for directory, keys in kinds]


@examples(150)
@given(data=st.data())
def test_deltas_add_up_to_the_reply(stands: list[tuple[Renderer, Any]], data: st.DataObject) -> None:
    renderer, tokenizer = data.draw(st.sampled_from(stands))
    tools = data.draw(st.sampled_from([(), (BASH,)])) if renderer is not stands[0][0] else ()
    prompt = renderer.render(Conversation((Message("user", "a"),))).ids.tolist()
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=7)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    end = next((i for i, token in enumerate(ids) if token in renderer.stop_ids), len(ids) - 1)
    ids = ids[: end + 1]
    whole = renderer.parse(ids, prompt, tools)
    growing = GrowingReply(renderer, prompt, tools, (), live=True, pace_s=0)
    deltas = []
    while ids:
        size = data.draw(st.integers(1, len(ids)))
        deltas.append(growing.grow(ids[:size]))
        ids = ids[size:]
    message, rest = growing.finish()
    deltas.append(rest)
    assert same_message(message, whole)
    known = [delta for delta in deltas if delta is not None]
    assert "".join(delta.content for delta in known) == message.content
    assert "".join(delta.reasoning for delta in known) == (message.reasoning or "")
    calls = [(delta.first_call + i, call) for delta in known for i, call in enumerate(delta.calls)]
    assert calls == list(enumerate(message.tool_calls))
    assert len({call.call_id for call in message.tool_calls}) == len(message.tool_calls)
    assert "" not in {call.call_id for call in message.tool_calls}


def test_text_grows_and_a_call_is_told_when_it_closes(qwen3_directory: Path) -> None:
    renderer = renderer_of(qwen3_directory)
    tokenizer = tokenizer_of(qwen3_directory)
    growing = GrowingReply(renderer, [1], (BASH,), (), live=True, pace_s=0)
    told = [growing.grow([i]) for i in tokenizer.encode(f"I look now.\n{CALL}\n{CALL}<|im_end|>")]
    assert sum(bool(delta and delta.content) for delta in told) > 2
    assert [len(delta.calls) for delta in told if delta and delta.calls] == [1, 1]
    message, rest = growing.finish()
    assert rest is None
    assert len(message.tool_calls) == 2


def test_a_character_in_pieces_is_told_when_it_is_whole(tiny_directory: Path) -> None:
    renderer = renderer_of(tiny_directory)
    tokenizer = tokenizer_of(tiny_directory)
    growing = GrowingReply(renderer, [1], (), (), live=True, pace_s=0)
    ids = tokenizer.encode("🙂!", add_special_tokens=False)
    assert len(ids) > 2
    told = [growing.grow([i]) for i in ids]
    assert [delta.content for delta in told if delta] == ["🙂", "!"]


@pytest.mark.parametrize("live", [True, False])
def test_a_stop_text_ends_the_reply(tiny_directory: Path, live: bool) -> None:
    renderer = renderer_of(tiny_directory)
    tokenizer = tokenizer_of(tiny_directory)
    growing = GrowingReply(renderer, [1], (), ("END", "\nObservation:"), live=live, pace_s=0)
    told = []
    for i in tokenizer.encode("Thought: É\nObservation: it", add_special_tokens=False):
        told.append(growing.grow([i]))
        if growing.cut:
            break
    assert growing.cut
    message, rest = growing.finish()
    assert message.content == "Thought: É"
    assert "".join(delta.content for delta in [*told, rest] if delta) == "Thought: É"


def test_text_inside_an_open_call_is_no_content(qwen3_directory: Path) -> None:
    renderer, tokenizer = renderer_of(qwen3_directory), tokenizer_of(qwen3_directory)
    growing = GrowingReply(renderer, [1], (BASH,), (), live=True, pace_s=0)
    told = [growing.grow([i]) for i in tokenizer.encode(f"I look now.\n{CALL}<|im_end|>")]
    assert "".join(delta.content for delta in told if delta) == "I look now."
    assert growing.finish()[0].content == "I look now."


def test_text_behind_thinking_is_content(qwen3_directory: Path) -> None:
    renderer, tokenizer = renderer_of(qwen3_directory), tokenizer_of(qwen3_directory)
    growing = GrowingReply(renderer, [1], (BASH,), (), live=True, pace_s=0)
    told = [growing.grow([i]) for i in tokenizer.encode("<think>\nHm, so.\n</think>\n\nI look now.<|im_end|>")]
    assert "".join(delta.content for delta in told if delta) == "I look now."
    assert "".join(delta.reasoning for delta in told if delta) == "Hm, so."


@pytest.mark.parametrize("live", [True, False])
def test_a_call_that_closed_before_a_stop_text_stays(qwen3_directory: Path, live: bool) -> None:
    renderer, tokenizer = renderer_of(qwen3_directory), tokenizer_of(qwen3_directory)
    ids = tokenizer.encode(f"I look.\n{CALL}\n{CALL.replace('ls', 'STOP')}")
    one_by_one = GrowingReply(renderer, [1], (BASH,), ("STOP",), live=live, pace_s=0)
    for i in ids:
        one_by_one.grow([i])
        if one_by_one.cut:
            break
    at_once = GrowingReply(renderer, [1], (BASH,), ("STOP",), live=live, pace_s=0)
    at_once.grow(ids)
    for growing in (one_by_one, at_once):
        message, _ = growing.finish()
        assert [call.arguments for call in message.tool_calls] == ['{"command": "ls"}']
        assert "STOP" not in message.content
        assert growing.stopped_by == "STOP"


@pytest.mark.parametrize("live", [True, False])
def test_what_comes_behind_a_stop_text_is_not_told(qwen3_directory: Path, live: bool) -> None:
    renderer, tokenizer = renderer_of(qwen3_directory), tokenizer_of(qwen3_directory)
    growing = GrowingReply(renderer, [1], (BASH,), ("STOP",), live=live, pace_s=0)
    growing.grow(tokenizer.encode(f"I look. STOP\n{CALL}<|im_end|>"))
    message, _ = growing.finish()
    assert (message.content, message.tool_calls) == ("I look. ", ())


@pytest.mark.parametrize("plain", [True, False])
def test_the_token_that_ends_every_reply_is_no_stop_text(qwen3_directory: Path, plain: bool) -> None:
    renderer, tokenizer = renderer_of(qwen3_directory), tokenizer_of(qwen3_directory)
    growing = GrowingReply(renderer, [1], (), ("<|im_end|>",), live=True, plain=plain, pace_s=0)
    for i in tokenizer.encode("Done.<|im_end|>"):
        growing.grow([i])
    assert not growing.cut
    assert growing.finish()[0].content == "Done."


def test_half_a_character_in_arguments_can_be_sent_back() -> None:
    text = arguments_text({"command": "ls \ud83d é"})
    assert text.encode()
    assert json.loads(text) == {"command": "ls \ud83d é"}
    assert arguments_text({"command": "é"}) == '{"command": "é"}'
