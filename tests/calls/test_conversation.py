"""What counts as the same conversation."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from longrein.calls.conversation import (
    Conversation,
    Message,
    Tool,
    ToolCall,
    calls_are_valid,
    chain,
    digest_message,
    digest_tools,
    parsed_arguments,
    results_failed,
    same_reasoning,
)
from tests.calls.properties import examples

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=5), json_values, max_size=4)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant":
        given_arguments = draw(st.lists(arguments, max_size=2))
        calls = tuple(ToolCall(f"c{i}", "f", json.dumps(value)) for i, value in enumerate(given_arguments))
    return Message(role, draw(st.text(max_size=20)), calls)


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


def echoed(message: Message) -> Message:
    """As another client would play it back: other ids, other spacing, other key order."""
    calls = tuple(
        ToolCall(
            f"other-{call.call_id}",
            call.name,
            json.dumps(reversed_keys(json.loads(call.arguments)), separators=(",", ":"), ensure_ascii=False),
        )
        for call in message.tool_calls
    )
    return replace(message, tool_calls=calls, tool_call_id="other")


@examples(60)
@given(st.lists(messages(), max_size=6))
def test_an_echo_is_the_same_conversation(history: list[Message]) -> None:
    assert chain(history) == chain([echoed(message) for message in history])


@examples(60)
@given(st.lists(messages(), min_size=1, max_size=6), st.data())
def test_a_changed_word_is_another_conversation(history: list[Message], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(history) - 1))
    changed = list(history)
    changed[at] = replace(changed[at], content=changed[at].content + "x")
    before, after = chain(history), chain(changed)
    assert before[: at + 1] == after[: at + 1]
    assert not set(before[at + 1 :]) & set(after[at + 1 :])


def test_malformed_arguments_are_compared_as_text() -> None:
    one = Message("assistant", "", (ToolCall("a", "f", '{"x": '),))
    assert digest_message(one) == digest_message(replace(one, tool_calls=(ToolCall("b", "f", '{"x": '),)))
    assert digest_message(one) != digest_message(replace(one, tool_calls=(ToolCall("a", "f", '{"x":'),)))


def test_no_arguments_are_an_empty_object() -> None:
    assert digest_message(Message("assistant", "", (ToolCall("a", "f", ""),))) == digest_message(
        Message("assistant", "", (ToolCall("a", "f", "{}"),))
    )


def test_reasoning_counts_only_where_both_have_it() -> None:
    thought = Message("assistant", "a", reasoning="because")
    assert same_reasoning([thought], [replace(thought, reasoning=None)])
    assert same_reasoning([thought], [replace(thought, reasoning=" because\n")])
    assert not same_reasoning([thought], [replace(thought, reasoning="why not")])


def test_tools_are_compared_by_content_not_by_key_order() -> None:
    one = Tool("f", "d", {"type": "object", "properties": {"a": {}, "b": {}}})
    other = Tool("f", "d", {"properties": {"b": {}, "a": {}}, "type": "object"})
    assert digest_tools([one]) == digest_tools([other])
    assert digest_tools([one]) != digest_tools([replace(one, description="e")])


def test_demonstrations_stand_behind_the_leading_system_messages() -> None:
    system, user, shown = Message("system", "s"), Message("user", "u"), Message("user", "shown")
    assert Conversation((system, user)).after_system([shown]).messages == (system, shown, user)
    assert Conversation((user,)).after_system([shown]).messages == (shown, user)
    assert Conversation((system,)).after_system([shown]).messages == (system, shown)


def test_a_whole_number_is_the_same_however_it_is_written() -> None:
    one, other, third = (
        Message("assistant", tool_calls=(ToolCall("", "f", text),)) for text in ('{"x": 1.0}', '{"x":1}', '{"x": 1.5}')
    )
    assert digest_message(one) == digest_message(other) != digest_message(third)
    assert parsed_arguments('{"x": 1.0}')["x"] == 1.0


def test_valid_and_broken_tool_calls() -> None:
    tools = (Tool("look"),)
    good, other, odd = ToolCall("", "look", '{"a": 1}'), ToolCall("", "jump", "{}"), ToolCall("", "look", "[1]")
    assert calls_are_valid(Message("assistant", "done"), tools) is None
    assert calls_are_valid(Message("assistant", "", (good,)), tools) is True
    for wrong in (other, odd):
        assert calls_are_valid(Message("assistant", "", (good, wrong)), tools) is False
    assert calls_are_valid(Message("assistant", "<tool_call>", (good,), broken_calls=1), tools) is False


def test_a_failed_tool_is_known_by_how_its_result_begins() -> None:
    asked = (Message("user", "go"), Message("assistant", "", (ToolCall("1", "look", "{}"),)))
    told = Message("user", "and be quick")
    assert results_failed(asked) is None
    for said in ("error: no", "\nError\nno", "<tool_use_error>no"):
        assert results_failed((*asked, Message("tool", said), told)) is True
    assert results_failed((*asked, Message("tool", "errors: 0"), told)) is False
    earlier = (*asked, Message("tool", "error"), Message("assistant", "well"))
    assert results_failed((*earlier, told)) is None
