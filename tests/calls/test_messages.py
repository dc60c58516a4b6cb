"""Anthropic messages: read, written, streamed, and spoken to by the official client."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as WireMessage
from anthropic.types import RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from longrein.calls.conversation import Conversation, Message, ToolCall, same_message
from longrein.calls.dialect import Ask, Delta, Header, Reply, Target
from longrein.calls.messages import MessagesDialect
from longrein.errors import CallError, CapExceeded, ContextLengthExceeded, InvalidRequest, Overloaded, UnknownKey
from longrein.records import Cause
from tests.calls.properties import examples
from tests.calls.scripted_engine import told
from tests.calls.serving import House, serving

DIALECT = MessagesDialect()
HEADER = Header("msg_0", 7, "claude-any")
ASK: list[Any] = [{"role": "user", "content": "Say something."}]
SOME_ASK = Ask(Conversation((Message("user", "hi"),)), "claude-any")
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BASH: dict[str, Any] = {
    "name": "bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>'


def read(body: dict[str, Any]) -> Ask:
    return DIALECT.read(body, Target())


def turns(*messages: Any, **body: Any) -> tuple[Message, ...]:
    return read({"messages": list(messages), **body}).conversation.messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **more}


# ---- reading


def test_a_whole_request_is_understood() -> None:
    ask = read(
        {
            "model": "claude-any",
            "max_tokens": 64,
            "stream": True,
            "stop_sequences": ["END"],
            "system": "Be brief.",
            "messages": [
                {"role": "user", "content": "List files."},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "any"},
                        {"type": "redacted_thinking", "data": "sealed"},
                        text("I look."),
                        {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls é"}},
                        {"type": "tool_use", "id": "toolu_2", "name": "bash", "input": {}},
                    ],
                },
                user(
                    result("toolu_1", content="a.txt"), result("toolu_2", content=[text("b"), text("c")]), text("Go.")
                ),
            ],
            "tools": [BASH],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "temperature": 0.2,
            "top_k": 3,
            "thinking": {"type": "adaptive", "display": "omitted"},
            "metadata": {"user_id": "{}"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "cache_control": {"type": "ephemeral"},
            "rollout_id": "unknown to anybody",
        }
    )
    assert ask.conversation.messages == (
        Message("system", "Be brief."),
        Message("user", "List files."),
        Message(
            "assistant",
            "I look.",
            (ToolCall("toolu_1", "bash", '{"command": "ls é"}'), ToolCall("toolu_2", "bash", "{}")),
            reasoning="Hm.",
        ),
        Message("tool", "a.txt", tool_call_id="toolu_1"),
        Message("tool", "b\nc", tool_call_id="toolu_2"),
        Message("user", "Go."),
    )
    (tool,) = ask.conversation.tools
    assert (tool.name, tool.description, tool.parameters) == ("bash", "Runs a command.", BASH["input_schema"])
    assert (ask.model, ask.stream, ask.max_tokens, ask.stop, ask.dropped) == ("claude-any", True, 64, ("END",), ())


def test_max_tokens_may_be_left_out_and_a_choice_of_none_offers_no_tools() -> None:
    ask = read({"messages": ASK, "tools": [BASH], "tool_choice": {"type": "none"}})
    assert (ask.max_tokens, ask.conversation.tools) == (None, ())


def test_the_billing_block_of_claude_code_is_no_part_of_the_conversation() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1.332.4e6; cc_entrypoint=sdk-cli;")
    later = text("x-anthropic-billing-header: cc_version=2.1.332.77a; cc_is_subagent=true;")
    rest = [text("You are an agent.", cache_control={"type": "ephemeral"}), text("Be brief.")]
    expected = (Message("system", "You are an agent.\nBe brief."), Message("user", "Say something."))
    assert turns(*ASK, system=[billing, *rest]) == turns(*ASK, system=[later, *rest]) == expected
    assert turns(*ASK, system=[billing]) == turns(*ASK, system=[]) == turns(*ASK, system="") == expected[1:]
    for elsewhere in ([*rest, billing], billing["text"]):
        assert turns(*ASK, system=elsewhere)[0].content.endswith("cc_entrypoint=sdk-cli;")


def test_system_messages_stand_where_they_were_put() -> None:
    messages = turns(*ASK, {"role": "system", "content": [text("Today is Monday.")]}, system="Be brief.")
    assert [message.role for message in messages] == ["system", "user", "system"]


def test_text_is_the_same_as_one_block_or_as_a_text() -> None:
    """Claude Code sends blocks with cache marks first, and the text alone from the next turn on."""
    block = text("Say something.", cache_control={"type": "ephemeral"})
    assert turns(user(block)) == turns(user(text(""), block)) == turns(*ASK)


def test_results_and_text_keep_their_order() -> None:
    messages = turns(user(text("a"), result("1"), text("b"), text("c"), result("2", content="")))
    assert [(message.role, message.content) for message in messages] == [
        ("user", "a"),
        ("tool", ""),
        ("user", "b\nc"),
        ("tool", ""),
    ]
    assert turns({"role": "user", "content": []}) == turns({"role": "user"}) == (Message("user", ""),)


@pytest.mark.parametrize(
    ("given", "told_as"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": "out"}, "out"),
        ({"content": [text("a"), text(""), text("b")], "is_error": False}, "a\nb"),
        ({"content": "Exit code 1", "is_error": True}, "Error: Exit code 1"),
        ({"content": "Error: no such file", "is_error": True}, "Error: no such file"),
        ({"content": "<tool_use_error>No.</tool_use_error>", "is_error": True}, "<tool_use_error>No.</tool_use_error>"),
        ({"content": [{"type": "tool_reference", "tool_name": "Fetch"}]}, "The tool Fetch can be called now."),
    ],
)
def test_results_of_every_shape(given: dict[str, Any], told_as: str) -> None:
    assert turns(user(result("toolu_1", **given))) == (Message("tool", told_as, tool_call_id="toolu_1"),)


def test_malformed_arguments_come_back_as_the_model_wrote_them() -> None:
    raw = '{"command": "ls'
    block = {"type": "tool_use", "id": "a", "name": "bash", "input": {"__unparsedToolInput": {"raw": raw, "len": 15}}}
    (message, _) = turns({"role": "assistant", "content": [block]}, user(result("a", content="No.")))
    assert message.tool_calls[0].arguments == raw


def test_deferred_tools_are_offered_once_a_result_refers_to_them() -> None:
    tools = [BASH, {"name": "Fetch", "input_schema": {"type": "object"}, "defer_loading": True}]
    reference = user(result("a", content=[{"type": "tool_reference", "tool_name": "Fetch"}]))
    before, after = read({"messages": ASK, "tools": tools}), read({"messages": [*ASK, reference], "tools": tools})
    assert [tool.name for tool in before.conversation.tools] == ["bash"]
    assert [tool.name for tool in after.conversation.tools] == ["bash", "Fetch"]
    searched = read({"messages": ASK, "tools": [*tools, {"type": "tool_search_tool_bm25_20251119", "name": "s"}]})
    assert [tool.name for tool in searched.conversation.tools] == ["bash", "Fetch"]


def test_tools_of_anthropics_own_are_dropped_with_a_note() -> None:
    own = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    body = {"messages": ASK, "tools": [*own, {**BASH, "type": "custom"}], "mcp_servers": [{"url": "http://x"}]}
    ask = read(body)
    assert [tool.name for tool in ask.conversation.tools] == ["bash"]
    assert [note.partition(":")[0] for note in ask.dropped] == ["tools[0]", "tools[1]", "mcp_servers"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [user("a")]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user(IMAGE)]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "document"})]}, "messages[0].content[0].type"),
        ({"messages": [user(result("a", content=[text("b"), IMAGE]))]}, "messages[0].content[0].content[1].type"),
        ({"messages": [user(result("a", content=[{"type": "tool_reference"}]))]}, "messages[0].content[0].content[0]"),
        ({"messages": [user(result("a", is_error="no"))]}, "messages[0].content[0].is_error"),
        ({"messages": [user({"type": "tool_use", "name": "a"})]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "system", "content": [result("a")]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *ASK]}, "messages[0].content[0].name"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [*ASK, {"role": "assistant", "content": "The answer is ("}]}, "messages[1].role"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"system": 3}, "system"),
        ({"model": 3}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].type"),
        ({"tools": [{"name": "a", "input_schema": "{}"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "defer_loading": 1}]}, "tools[0].defer_loading"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format"),
        ({"output_format": "json"}, "output_format"),
        ({"mcp_servers": 3}, "mcp_servers"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(body: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({"messages": ASK, **body})
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert caught.value.message.startswith(param)


RICH: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "stream": True,
    "stop_sequences": ["a"],
    "system": [text("x-anthropic-billing-header: a"), text("b", cache_control={"type": "ephemeral"})],
    "messages": [
        user(text("a")),
        {"role": "system", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "c", "signature": "d"},
                {"type": "redacted_thinking", "data": "e"},
                text("f"),
                {"type": "tool_use", "id": "g", "name": "bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "h", "name": "t", "input": {"__unparsedToolInput": {"raw": "{", "len": 1}}},
            ],
        },
        user(result("g", content=[text("i"), {"type": "tool_reference", "tool_name": "t"}], is_error=True), text("j")),
    ],
    "tools": [BASH, {"name": "t", "defer_loading": True}, {"type": "web_search_20250305", "name": "w"}],
    "tool_choice": {"type": "auto"},
    "output_config": {"effort": "high"},
    "mcp_servers": [],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=4) | st.sampled_from(["text", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "name", "input", "role"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, the value itself aside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in ((*at, key), *places(item, (*at, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    body = deepcopy(RICH)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(body)))
        inside: Any = body
        for key in path:
            inside = inside[key]
        if isinstance(inside, dict) and draw(st.booleans()):
            del inside[last]
        else:
            inside[last] = draw(JSON)
        if not places(body):
            break
    return body


def test_the_body_to_mutate_is_understood() -> None:
    assert len(read(RICH).conversation.messages) == 6


@given(mutated())
@examples(400)
def test_any_body_is_understood_or_refused(body: dict[str, Any]) -> None:
    for understand in (DIALECT.read, DIALECT.read_count):
        try:
            assert isinstance(understand(body, Target()), Ask | Conversation)
        except InvalidRequest as error:
            assert error.param
            assert error.message.startswith(error.param)


def with_input(given_input: Any) -> tuple[Message, ...]:
    call = {"type": "tool_use", "id": "a", "name": "t", "input": given_input}
    return turns({"role": "assistant", "content": [call]}, *ASK)


def test_numbers_out_of_range_are_no_failure() -> None:
    (message, _) = with_input({"x": json.loads("1e999")})
    assert message.tool_calls[0].arguments == '{"x": Infinity}'


def test_nesting_is_read_or_refused_however_deep() -> None:
    deep: Any = {}
    outcomes = set()
    for depth in range(1000):
        deep = {"a": deep}
        if depth % 20 == 0:
            try:
                with_input(deep)
                outcomes.add("read")
            except InvalidRequest as error:
                assert error.param == "messages[0].content[0].input"
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


# ---- writing


ARGUMENTS = st.one_of(
    st.dictionaries(st.text(max_size=5), JSON, max_size=3).map(json.dumps),
    st.text(max_size=12),
    st.sampled_from(["", " ", "[1]", "null", '"a"', '{"a": NaN}', '{"a": 1e999}', '{"command": "ls']),
    st.sampled_from(['{"__unparsedToolInput": {"raw": "x", "len": 1}}', '{"a": "\\ud83d"}', '{"a": 1, "a": 2}']),
)
CALLS = st.builds(ToolCall, st.uuids().map(lambda i: f"call_{i.hex}"), st.sampled_from(["bash", "é_t"]), ARGUMENTS)
REPLIES = st.builds(
    Message,
    st.just("assistant"),
    st.text(max_size=20),
    st.lists(CALLS, max_size=3).map(tuple),
    reasoning=st.none() | st.text(max_size=20),
)


def reply_of(message: Message, finish_reason: str = "stop", **more: Any) -> Reply:
    return Reply(message, finish_reason, 11, 5, **more)


def played_back(content: Any) -> Message:
    return turns({"role": "assistant", "content": content}, *ASK)[0]


def wire(message: Message) -> dict[str, Any]:
    """A reply as its client reads it, the SDK's own check passed."""
    body: dict[str, Any] = json.loads(json.dumps(DIALECT.reply(HEADER, SOME_ASK, reply_of(message)), allow_nan=False))
    WireMessage.model_validate(body, strict=True)
    return body


@given(REPLIES)
@examples(300)
def test_a_reply_played_back_is_the_same_message(message: Message) -> None:
    body = wire(message)
    assert same_message(played_back(body["content"]), message)
    # As the SDK's users append it.
    assert same_message(played_back(WireMessage.model_validate(body).model_dump(exclude_none=True)["content"]), message)


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Server-sent events, each named as its data says and of a type that the SDK knows."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, payload = block.split("\n", 1)
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def accumulated(data: bytes) -> dict[str, Any]:
    """The message that the SDK makes of a stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events_of(data):
        if event["type"] != "ping":
            typed = EVENT.validate_python(event, strict=True)
            snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=buffers)
    dumped: dict[str, Any] = snapshot.model_dump(exclude_none=True)
    return dumped


def pieces(draw: st.DrawFn, words: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(words)), max_size=3)))
    return [words[a:b] for a, b in zip([0, *cuts], [*cuts, len(words)], strict=True)]


@st.composite
def growing(draw: st.DrawFn) -> tuple[Message, list[Delta]]:
    """A reply and one way that it may have grown."""
    message = draw(REPLIES)
    deltas = [Delta(reasoning=piece) for piece in pieces(draw, message.reasoning or "")]
    deltas += [Delta(content=piece) for piece in pieces(draw, message.content)]
    at = draw(st.integers(0, len(message.tool_calls)))
    deltas += [Delta(calls=message.tool_calls[:at]), Delta(calls=message.tool_calls[at:], first_call=at)]
    if draw(st.booleans()):
        deltas = [Delta(message.content, message.reasoning or "", message.tool_calls)]
    return message, deltas


def streamed(deltas: Sequence[Delta], reply: Reply) -> bytes:
    stream = DIALECT.stream(HEADER, SOME_ASK)
    told_so_far = stream.begin() + b"".join(stream.alive() + stream.delta(delta) for delta in deltas)
    return told_so_far + stream.end(reply)


@given(growing())
@examples(300)
def test_a_stream_adds_up_to_the_reply(grown: tuple[Message, list[Delta]]) -> None:
    message, deltas = grown
    data = streamed(deltas, reply_of(message))
    assert data == streamed(deltas, reply_of(message))
    whole = WireMessage.model_validate(wire(message)).model_dump(exclude_none=True)
    assert accumulated(data) == whole


@given(growing(), st.randoms(use_true_random=False))
@examples(200)
def test_whatever_comes_late_reads_as_one(grown: tuple[Message, list[Delta]], random: Any) -> None:
    """Text that only turned out to be text at the end comes after calls; thinking held back comes after text."""
    message, deltas = grown
    thoughts = [delta for delta in deltas if delta.reasoning]
    words = [delta for delta in deltas if delta.content and not delta.reasoning]
    calls = [delta for delta in deltas if not delta.content and not delta.reasoning]
    mixed = []
    while thoughts or words or calls:
        mixed.append(random.choice([queue for queue in (thoughts, words, calls) if queue]).pop(0))
    content = accumulated(streamed(mixed, reply_of(message)))["content"]
    assert same_message(played_back(content), message)


def test_events_come_in_order_and_each_call_as_it_closes() -> None:
    call = ToolCall("call_1", "bash", '{"command": "ls"}')
    stream = DIALECT.stream(HEADER, SOME_ASK)
    assert [event["type"] for event in events_of(stream.begin())] == ["message_start"]
    assert events_of(stream.alive()) == [{"type": "ping"}]
    assert [event["type"] for event in events_of(stream.delta(Delta("I look.", "Hm.")))] == [
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
    ]
    told_call = events_of(stream.delta(Delta(calls=(call,))))
    assert told_call[0] == {"type": "content_block_stop", "index": 1}
    assert told_call[1]["content_block"] == {"type": "tool_use", "id": "call_1", "name": "bash", "input": {}}
    assert told_call[2]["delta"] == {"type": "input_json_delta", "partial_json": '{"command": "ls"}'}
    assert told_call[3] == {"type": "content_block_stop", "index": 2}
    message = Message("assistant", "I look.", (call,), reasoning="Hm.")
    delta, stop = events_of(stream.end(reply_of(message, "tool_calls")))
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert stop == {"type": "message_stop"}


def test_usage_is_always_there_and_true_at_the_end() -> None:
    """pi fails on a stream without; compaction is driven by it."""
    start, *_, delta, _ = events_of(streamed([Delta("a")], reply_of(Message("assistant", "a"))))
    assert start["message"]["usage"].keys() == delta["usage"].keys() >= {"input_tokens", "output_tokens"}
    assert (delta["usage"]["input_tokens"], delta["usage"]["output_tokens"]) == (11, 5)
    assert wire(Message("assistant", "a"))["usage"] == delta["usage"]


def test_thinking_is_signed_alike_each_time() -> None:
    block = wire(Message("assistant", "a", reasoning="Hm."))["content"][0]
    assert block["signature"]
    assert block == wire(Message("assistant", "b", reasoning="Hm."))["content"][0]
    assert block["signature"] != wire(Message("assistant", "a", reasoning="Oh."))["content"][0]["signature"]


def test_an_empty_reply_has_no_blocks() -> None:
    assert wire(Message("assistant", ""))["content"] == []
    assert played_back([]) == played_back("") == played_back(None) == Message("assistant", "")


def test_arguments_that_are_no_object_travel_inside_one() -> None:
    (block,) = wire(Message("assistant", "", (ToolCall("c", "bash", '{"command": "ls'),)))["content"]
    assert block["input"] == {"__unparsedToolInput": {"raw": '{"command": "ls', "len": 15}}


def test_ids_differ() -> None:
    """Claude Code takes replies of one id for one turn, and loops."""
    ids = {DIALECT.reply_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(i.startswith("msg_") for i in ids)


@pytest.mark.parametrize(
    ("finish_reason", "stop", "stop_reason"),
    [
        ("stop", None, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("tool_calls", None, "tool_use"),
    ],
)
def test_why_a_reply_ended(finish_reason: str, stop: str | None, stop_reason: str) -> None:
    reply = reply_of(Message("assistant", "a"), finish_reason, stop=stop)
    whole = DIALECT.reply(HEADER, SOME_ASK, reply)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, stop)
    assert accumulated(streamed([Delta("a")], reply))["stop_reason"] == stop_reason


def with_status(status: int) -> CallError:
    error = CallError("It failed.")
    error.status = status
    return error


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("No."), 400, "invalid_request_error"),
        (UnknownKey("No."), 401, "authentication_error"),
        (CapExceeded("No."), 403, "permission_error"),
        (with_status(404), 404, "not_found_error"),
        (with_status(405), 405, "invalid_request_error"),
        (with_status(413), 413, "request_too_large"),
        (Overloaded("Later."), 429, "rate_limit_error"),
        (with_status(500), 500, "api_error"),
        (with_status(503), 503, "overloaded_error"),
    ],
)
def test_errors_are_of_anthropics_kinds(error: CallError, status: int, kind: str) -> None:
    given_status, body = DIALECT.error(error)
    assert (given_status, body["error"]["type"], body["error"]["message"]) == (status, kind, error.message)
    if status not in (405, 413):
        ErrorResponse.model_validate(body, strict=True)
    assert events_of(DIALECT.stream(HEADER, SOME_ASK).error(error)) == [body]


def test_a_prompt_that_is_too_long_is_told_in_anthropics_words() -> None:
    _, body = DIALECT.error(ContextLengthExceeded(5000, 4096))
    assert body["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 5000 tokens > 4096 maximum",
    }


def test_a_count_reads_what_a_call_reads() -> None:
    conversation = DIALECT.read_count({"system": "s", "messages": ASK, "tools": [BASH]}, Target())
    assert conversation == read({"system": "s", "messages": ASK, "tools": [BASH]}).conversation
    assert DIALECT.count(12) == {"input_tokens": 12}


# ---- through the gateway


@asynccontextmanager
async def talking(
    directory: Path, *replies: str, tools: bool = True, **options: Any
) -> AsyncIterator[tuple[House, anthropic.AsyncAnthropic]]:
    model = {"tool_format": "hermes"} if tools else {}
    async with (
        serving(directory, *replies, model=model, **options) as house,
        anthropic.AsyncAnthropic(base_url=house.gateway.url, api_key=house.open(), max_retries=0) as client,
    ):
        yield house, client


async def said(client: anthropic.AsyncAnthropic, messages: list[Any], stream: bool, **more: Any) -> WireMessage:
    wish: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": messages, "tools": [BASH], **more}
    if not stream:
        reply: WireMessage = await client.messages.create(**wish)
        return reply
    async with client.messages.stream(**wish) as events:
        final: WireMessage = await events.get_final_message()
        return final


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_stays_one_branch(stream: bool, tiny_directory: Path) -> None:
    async with talking(tiny_directory, f"I look.\n{CALL}\n{CALL}", CALL, "Done.") as (house, client):
        first = await said(client, ASK, stream)
        assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
        assert (first.stop_reason, first.model) == ("tool_use", "m")
        calls = [block for block in first.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"command": "ls é"}] * 2
        results = [result(call.id, content=[text("a.txt\n")]) for call in calls]
        history = [
            user(text("Say something.", cache_control={"type": "ephemeral"})),
            {"role": "assistant", "content": first.content},
            user(*results, text("<system-reminder>Go on.</system-reminder>")),
        ]
        second = await said(client, history, stream, system=[text("x-anthropic-billing-header: cc_version=1;")])
        (call,) = second.content
        assert call.type == "tool_use"
        history += [{"role": "assistant", "content": second.content}, user(result(call.id))]
        third = await said(client, history, stream, system=[text("x-anthropic-billing-header: cc_version=2;")])
        assert [block.to_dict() for block in third.content] == [text("Done.")]
        assert third.stop_reason == "end_turn"
        assert len({first.id, second.id, third.id}) == 3
        one, two, three = house.notebook.calls
        assert (one.cause, two.cause, three.cause) == (Cause.NEW_SESSION, Cause.EXTENDED, Cause.EXTENDED)
        assert two.prompt_ids[: len(told(one))].tolist() == told(one)
        assert three.prompt_ids[: len(told(two))].tolist() == told(two)
        assert one.dialect == "messages"
        assert (third.usage.input_tokens, third.usage.output_tokens) == (
            len(three.prompt_ids),
            len(three.completion_ids),
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_is_played_back_exactly(stream: bool, qwen3_directory: Path) -> None:
    thought = f"<think>\nHm, 1 < 2.\n</think>\n\nI look.\n{CALL}"
    async with talking(qwen3_directory, thought, "<think>\nDone?\n</think>\n\nDone.", tools=False) as (house, client):
        first = await said(client, ASK, stream)
        assert first.content[0].type == "thinking"
        call = next(block for block in first.content if block.type == "tool_use")
        second = await said(
            client, [*ASK, {"role": "assistant", "content": first.content}, user(result(call.id))], stream
        )
        assert [block.type for block in second.content] == ["thinking", "text"]
        one, two = house.notebook.calls
        assert two.cause is Cause.EXTENDED
        assert two.prompt_ids[: len(told(one))].tolist() == told(one)


async def test_a_turn_whose_text_came_after_a_call_is_known_again(tiny_directory: Path) -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"comm'
    async with talking(tiny_directory, f"I look.\n{CALL}\n{broken}", "ok") as (house, client):
        house.engine.lines[0].delay_s = 0.03
        first = await said(client, ASK, True)
        call = next(block for block in first.content if block.type == "tool_use")
        await said(client, [*ASK, {"role": "assistant", "content": first.content}, user(result(call.id))], True)
        # Known again, though the template shows the text before the call.
        assert house.notebook.calls[1].cause is Cause.TEXT_CHANGED


async def test_the_sync_client_streams_and_stops(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "Héllo 🙂 you END of it") as house:
        house.engine.lines[0].delay_s = 0.03
        key = house.open()

        def talk() -> tuple[str, WireMessage, WireMessage]:
            wish: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": ASK, "stop_sequences": ["END"]}
            with anthropic.Anthropic(base_url=house.gateway.url, auth_token=key, max_retries=0) as client:
                with client.messages.stream(**wish) as events:
                    words = "".join(events.text_stream)
                    final = events.get_final_message()
                return words, final, client.messages.create(**wish)

        words, final, whole = await asyncio.to_thread(talk)
        assert words == "Héllo 🙂 you "
        for message in (final, whole):
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
            assert [block.to_dict() for block in message.content] == [text("Héllo 🙂 you ")]


async def test_a_length_is_told(tiny_directory: Path) -> None:
    async with talking(tiny_directory, "one two three four five six") as (_, client):
        message = await said(client, ASK, False, max_tokens=2)
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


async def test_tokens_are_counted_as_they_will_be(tiny_directory: Path) -> None:
    async with talking(tiny_directory, "hi") as (_, client):
        counted = await client.messages.count_tokens(model="m", messages=ASK, tools=[BASH])
        assert counted.input_tokens == (await said(client, ASK, False)).usage.input_tokens


async def test_errors_are_the_sdks_own(tiny_directory: Path) -> None:
    async with talking(tiny_directory, "hi", context_length=200) as (house, client):
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 200 maximum"):
            await said(client, [{"role": "user", "content": "word " * 400}], True)
        with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.type: 'some' was given"):
            await said(client, ASK, False, tool_choice={"type": "some"})
        with pytest.raises(anthropic.AuthenticationError):
            await said(client.with_options(api_key="lr-wrong"), ASK, False)
        async with httpx.AsyncClient() as http:
            reply = await http.post(f"{house.gateway.url}/v1/messages?beta=true", content=b"{")
        assert reply.json()["type"] == "error"


async def test_a_failure_while_streaming_is_an_error_event(tiny_directory: Path) -> None:
    async with talking(tiny_directory, "one two three four") as (house, client):
        house.engine.lines[0].delay_s = 0.03
        house.engine.lines[0].fail_after = 3
        with pytest.raises(anthropic.APIStatusError, match="could not answer"):
            await said(client, ASK, True)


async def test_every_path_that_clients_make(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi") as house:
        key = house.open()
        paths = ("/v1/messages?beta=true", "/v1/v1/messages", "/messages", f"/k/{key}/v1/messages")
        async with httpx.AsyncClient(base_url=house.gateway.url, headers={"x-api-key": key}) as http:
            for i, path in enumerate(paths):
                reply = await http.post(path, json={"max_tokens": 9, "messages": [user(text(f"{i}"))]})
                assert reply.json()["content"] == [text("hi")], path


async def test_pings_while_nothing_can_be_told(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two", gateway={"keepalive_s": 0.1}) as house:
        gate = house.engine.lines[0].hold()
        body = {"max_tokens": 9, "messages": ASK, "stream": True}
        url = f"{house.gateway.url}/v1/messages"
        async with (
            httpx.AsyncClient(headers={"x-api-key": house.open()}, timeout=20) as http,
            http.stream("POST", url, json=body) as reply,
        ):
            seen = b""
            async for part in reply.aiter_bytes():
                seen += part
                if seen.count(b"event: ping") == 2:
                    gate.set()
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert accumulated(seen)["content"] == [text("one two")]
