"""OpenAI responses, as its official client and the harnesses that speak it see them."""

import asyncio
import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter

from longrein.calls.conversation import Conversation, Message, ToolCall, same_message
from longrein.calls.dialect import Ask, CountingDialect, Delta, Header, Reply, Target
from longrein.calls.responses import ResponsesDialect
from longrein.errors import CallError, ContextLengthExceeded, InvalidRequest, Overloaded
from longrein.records import Call, Cause
from tests.calls.properties import examples
from tests.calls.scripted_engine import told
from tests.calls.serving import House, serving

DIALECT: CountingDialect = ResponsesDialect()
HEADER = Header("resp_" + "0a" * 14, 1_700_000_000, "policy-model")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH: dict[str, Any] = {
    "type": "function",
    "name": "bash",
    "description": "Runs a command.",
    "parameters": SCHEMA,
    "strict": False,
}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "strict": False, "parameters": SCHEMA}],
}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
TASK: dict[str, Any] = {"role": "user", "content": "Create the file."}
CODEX: dict[str, Any] = {
    "model": "policy-model",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_a1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Rules."}],
            "internal_chat_message_metadata_passthrough": {"create_time": 1.5},
        },
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "More rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Create the file."}]},
    ],
    "tools": [BASH, AGENTS, PATCH, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread",
    "client_metadata": {"x": "y"},
    "text": {"verbosity": "low"},
    "truncation": "auto",
}


def read(body: Mapping[str, Any]) -> Ask:
    return DIALECT.read(body, Target())


def read_items(*items: Any, **fields: Any) -> tuple[Message, ...]:
    return read({"input": list(items), **fields}).conversation.messages


def said(message: Message, finish_reason: str = "stop") -> Reply:
    return Reply(message, finish_reason, 7, 3)


def replied(message: Message, ask: Ask | None = None, header: Header = HEADER) -> dict[str, Any]:
    wire = DIALECT.reply(header, ask or read(CODEX), said(message))
    assert json.loads(json.dumps(wire)) == wire
    return wire


def events_of(sent: bytes) -> list[dict[str, Any]]:
    """The events of a stream; comments are skipped, as clients do."""
    events = []
    for block in sent.decode().split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def streamed(deltas: Sequence[Delta], reply: Reply, ask: Ask | None = None) -> bytes:
    stream = DIALECT.stream(HEADER, ask or read(CODEX))
    sent = stream.begin() + stream.alive()
    for delta in deltas:
        sent += stream.delta(delta) + stream.alive()
    return sent + stream.end(reply)


def accumulated(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client puts it together that trusts deltas only, checked against what is said to be done."""
    items: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if "output_index" in event:
            # One item after the other: some clients know only one that grows.
            assert event["output_index"] == len(done)
        if kind == "output_item.added":
            items.append(copy.deepcopy(event["item"]))
        elif kind == "output_item.done":
            grown = items[-1]
            assert grown["id"] == event["item"]["id"]
            changing = ("status", "encrypted_content")
            assert {k: v for k, v in grown.items() if k not in changing} == {
                k: v for k, v in event["item"].items() if k not in changing
            }
            done.append(event["item"])
        elif "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
            if kind == "content_part.added":
                items[-1]["content"].append(copy.deepcopy(event["part"]))
            elif kind == "content_part.done":
                assert items[-1]["content"][event["content_index"]] == event["part"]
            elif kind in ("output_text.delta", "reasoning_text.delta"):
                items[-1]["content"][event["content_index"]]["text"] += event["delta"]
            elif kind in ("output_text.done", "reasoning_text.done"):
                assert items[-1]["content"][event["content_index"]]["text"] == event["text"]
            else:
                field = "input" if kind.startswith("custom") else "arguments"
                if kind.endswith("delta"):
                    items[-1][field] += event["delta"]
                else:
                    assert kind.endswith("done")
                    assert items[-1][field] == event[field]
    return done


# ---- replies and streams


texts = st.text(max_size=8) | st.text(st.sampled_from(" \n\té🙂<a"), max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
arguments = st.one_of(
    st.dictionaries(st.sampled_from(["input", "command", "é"]), values, max_size=2).map(json.dumps),
    st.fixed_dictionaries({"input": texts}).map(json.dumps),
    st.sampled_from(["", "{", '{"command": "ls', "3", '"x"', "[1]", "null", '{"input": "a", "input": "b"}']),
)
names = st.sampled_from(["bash", "multi_agent_v1__spawn", "apply_patch", "unheard_of"])
turns = st.builds(
    lambda content, calls, reasoning: Message(
        "assistant",
        content,
        tuple(ToolCall(f"call_{i}", name, written) for i, (name, written) in enumerate(calls)),
        reasoning=reasoning,
    ),
    texts,
    st.lists(st.tuples(names, arguments), max_size=3),
    st.none() | texts,
)


@given(turn=turns, finish_reason=st.sampled_from(["stop", "length", "tool_calls"]))
@examples(200)
def test_replies_are_what_the_official_types_say(turn: Message, finish_reason: str) -> None:
    ask = read(CODEX | {"max_output_tokens": 9})
    wire = DIALECT.reply(HEADER, ask, said(turn, finish_reason))
    response = Response.model_validate(wire)
    cut = finish_reason == "length"
    assert response.status == ("incomplete" if cut else "completed")
    assert (response.incomplete_details is not None) is cut
    assert (response.id, response.max_output_tokens, response.output_text) == (HEADER.reply_id, 9, turn.content)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 3, 10)
    ids = [item.id for item in response.output]
    assert len(set(ids)) == len(ids)


@given(turn=turns, data=st.data(), finish_reason=st.sampled_from(["stop", "length", "tool_calls"]))
@examples(200)
def test_streams_say_what_the_reply_says(turn: Message, data: st.DataObject, finish_reason: str) -> None:
    def cut(text: str) -> list[str]:
        at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
        return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True) if a < b]

    thoughts = [Delta(reasoning=part) for part in cut(turn.reasoning or "")]
    deltas = [*thoughts, *(Delta(content=part) for part in cut(turn.content))]
    place = data.draw(st.integers(0, len(turn.tool_calls)))
    # Text can still grow behind a call that has closed.
    deltas.insert(data.draw(st.integers(len(thoughts), len(deltas))), Delta(calls=turn.tool_calls[:place]))
    deltas.append(Delta(calls=turn.tool_calls[place:], first_call=place))
    reply = said(turn, finish_reason)
    sent = streamed(deltas, reply)
    events = events_of(sent)
    for event in events:
        assert EVENT.validate_python(event).type == event["type"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == ("response.incomplete" if finish_reason == "length" else "response.completed")
    items = accumulated(events)
    assert events[-1]["response"] == DIALECT.reply(HEADER, read(CODEX), reply) | {"output": items}
    for client in (list, without_ids):
        messages = read_items(TASK, *client(items), {"role": "user", "content": "More."})
        assert len(messages) == 3
        assert same_message(messages[1], turn)
    assert streamed(deltas, reply) == sent


def test_text_is_streamed_as_it_comes_and_calls_as_they_close() -> None:
    stream = DIALECT.stream(HEADER, read(CODEX))
    stream.begin()
    assert [e["type"] for e in events_of(stream.delta(Delta(content="I lo")))] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
    ]
    call = ToolCall("call_1", "bash", "{}")
    assert [e["type"].partition(".")[2] for e in events_of(stream.delta(Delta(calls=(call,))))] == [
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
    ]
    # A second attempt at a call was malformed, so it is text after all.
    late = events_of(stream.delta(Delta(content="\n<tool_call>{")))
    assert late[-1]["delta"] == "\n<tool_call>{"
    events = events_of(stream.end(said(Message("assistant", "I lo\n<tool_call>{", (call,)), "tool_calls")))
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "function_call", "message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextLengthExceeded(9, 8), "context_length_exceeded"),
        (Overloaded("Too many."), "rate_limit_exceeded"),
        (CallError("Gone."), "server_error"),
    ],
)
def test_failures_within_a_stream_say_their_code(error: CallError, code: str) -> None:
    stream = DIALECT.stream(HEADER, read(CODEX))
    begun = stream.begin() + stream.delta(Delta(reasoning="so")) + stream.delta(Delta(content="half"))
    events = events_of(begun + stream.error(error))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": code, "message": error.message})
    # Codex keeps the items that were done and asks again.
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_errors_have_the_shape_of_openai() -> None:
    status, body = DIALECT.error(InvalidRequest("input: no.", param="input"))
    assert status == 400
    assert body["error"] == {
        "message": "input: no.",
        "type": "invalid_request_error",
        "param": "input",
        "code": "invalid_request",
    }
    assert DIALECT.error(Overloaded("Later."))[0] == 429


# ---- history


def without_ids(items: list[Any]) -> list[Any]:
    return [{k: v for k, v in item.items() if k not in ("id", "status")} for item in items]


def only_encrypted(items: list[Any]) -> list[Any]:
    return [{k: v for k, v in item.items() if item["type"] != "reasoning" or k != "content"} for item in items]


def in_the_open(items: list[Any]) -> list[Any]:
    return [{k: v for k, v in item.items() if k != "encrypted_content"} for item in items]


def as_a_summary(items: list[Any]) -> list[Any]:
    return [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": item["content"][0]["text"]}]}
        if item["type"] == "reasoning"
        else item
        for item in items
    ]


def reserialised(items: list[Any]) -> list[Any]:
    def compact(written: str) -> str:
        try:
            return json.dumps(json.loads(written), separators=(",", ":"))
        except ValueError:
            return written

    return [item | {"arguments": compact(item["arguments"])} if "arguments" in item else item for item in items]


def interleaved(items: list[Any]) -> list[Any]:
    """Every call followed by its result."""
    return [
        part
        for item in items
        for part in (
            [item, {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}]
            if "call_id" in item
            else [item]
        )
    ]


@pytest.mark.parametrize(
    "client", [list, without_ids, only_encrypted, in_the_open, as_a_summary, reserialised, interleaved]
)
@given(turn=turns)
@examples(60)
def test_a_reply_played_back_is_the_turn_that_was_sampled(client: Any, turn: Message) -> None:
    items = client(replied(turn)["output"])
    messages = read_items(TASK, *items, {"role": "user", "content": "More."})
    assert messages[0] == Message("user", "Create the file.")
    assert same_message(messages[1], turn)
    assert (messages[1].reasoning or "") == (turn.reasoning or "")
    if client is not interleaved:
        assert len(messages) == 3
    assert [call.call_id for call in messages[1].tool_calls] == [call.call_id for call in turn.tool_calls]


@given(first=turns, second=turns)
@examples(100)
def test_two_replies_in_a_row_stay_two_turns(first: Message, second: Message) -> None:
    other = Header("resp_" + "1b" * 14, 0, "m")
    messages = read_items(TASK, *replied(first)["output"], *replied(second, header=other)["output"])
    assert [same_message(a, b) for a, b in zip(messages[1:], (first, second), strict=True)] == [True, True]


def test_without_ids_new_thinking_or_new_text_begins_a_turn() -> None:
    one = replied(Message("assistant", "One.", reasoning="first"))["output"]
    two = replied(Message("assistant", "Two.", reasoning="second"))["output"]
    dropped = without_ids([one[0]])
    assert read_items(*dropped, *without_ids(two)) == (
        Message("assistant", reasoning="first"),
        Message("assistant", "Two.", reasoning="second"),
    )
    assert [m.content for m in read_items(*without_ids([one[1], two[1]]))] == ["One.", "Two."]


def test_the_shapes_of_input() -> None:
    assert read({"input": "Hi."}).conversation == Conversation((Message("user", "Hi."),))
    assert read_items(
        {"role": "system", "content": "S"},
        {"role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "multi_agent_v1", "arguments": "{"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": 'a\n"b"'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "three"},
    ) == (
        Message("system", "S"),
        Message("system", "D"),
        Message("user", "a\nb"),
        Message(
            "assistant",
            "No.",
            (
                ToolCall("c1", "bash", "{}"),
                ToolCall("c2", "multi_agent_v1__spawn", "{"),
                ToolCall("c3", "apply_patch", json.dumps({"input": 'a\n"b"'})),
            ),
        ),
        Message("tool", "one", tool_call_id="c1"),
        Message("tool", "two", tool_call_id="c2"),
        Message("tool", "three", tool_call_id="c3"),
    )


def test_thinking_that_another_provider_encrypted_is_ignored() -> None:
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABk"}
    assert read_items(TASK, foreign, TASK) == (Message("user", "Create the file."),) * 2
    forged = foreign | {"encrypted_content": "longrein.plain.é", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert read_items(forged)[0].reasoning == "Hm."


def test_previous_and_instructions_are_left_to_the_rollout() -> None:
    ask = read({"previous_response_id": HEADER.reply_id, "instructions": "Be brief.", "input": [TASK]})
    assert (ask.previous, ask.instructions) == (HEADER.reply_id, "Be brief.")
    assert ask.conversation.messages == (Message("user", "Create the file."),)
    assert replied(Message("assistant", "ok"), ask)["previous_response_id"] == HEADER.reply_id
    assert read({"input": "Hi.", "instructions": ""}).instructions is None


def test_references_name_items_of_the_previous_reply() -> None:
    items = replied(Message("assistant", "ok", (ToolCall("c", "bash", "{}"),), reasoning="so"))["output"]
    references = [{"type": "item_reference", "id": item["id"]} for item in items]
    result = {"type": "function_call_output", "call_id": "c", "output": "done"}
    assert read_items(*references, result, previous_response_id=HEADER.reply_id) == (
        Message("tool", "done", tool_call_id="c"),
    )
    for fields in ({}, {"previous_response_id": "resp_other"}):
        with pytest.raises(InvalidRequest, match=r"input\[0\].*store: false"):
            read_items(*references, result, **fields)


# ---- tools


def test_codex_asks_for_namespaces_and_tools_of_the_provider() -> None:
    ask = read(CODEX)
    assert [message.role for message in ask.conversation.messages] == ["system", "system", "user", "user"]
    bash, spawn, patch = ask.conversation.tools
    assert (bash.name, bash.description, bash.parameters) == ("bash", "Runs a command.", SCHEMA)
    assert (spawn.name, spawn.description) == ("multi_agent_v1__spawn", "Other agents.")
    assert patch.name == "apply_patch"
    assert patch.description == "Edits files.\nThe input follows this lark grammar:\nstart: /.+/"
    assert patch.parameters is not None
    assert patch.parameters["required"] == ["input"]
    assert len(ask.dropped) == 1
    assert "tools[3]" in ask.dropped[0]
    assert "web_search" in ask.dropped[0]
    assert (ask.stream, ask.model, ask.max_tokens, ask.previous, ask.instructions) == (
        True,
        "policy-model",
        None,
        None,
        None,
    )


def test_calls_carry_the_names_and_forms_that_the_harness_knows() -> None:
    calls = (
        ToolCall("c1", "multi_agent_v1__spawn", '{"command": "x"}'),
        ToolCall("c2", "apply_patch", '{"input": "*** Begin\\n"}'),
        ToolCall("c3", "apply_patch", '{"patch": 1}'),
        ToolCall("c4", "bash", "not json"),
        ToolCall("c5", "apply_patch", '{"input": ""}'),
        ToolCall("c6", "apply_patch", '{"input": "x", "command": "y"}'),
    )
    spawn, patch, wrong, bash, empty, more = replied(Message("assistant", "", calls))["output"]
    assert (spawn["type"], spawn["namespace"], spawn["name"]) == ("function_call", "multi_agent_v1", "spawn")
    assert spawn["id"].startswith("fc_")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n")
    assert (wrong["type"], wrong["arguments"]) == ("function_call", '{"patch": 1}')
    assert (bash["call_id"], bash["arguments"]) == ("c4", "not json")
    assert "namespace" not in bash
    assert (empty["type"], empty["input"]) == ("custom_tool_call", "")
    assert (more["type"], more["arguments"]) == ("function_call", '{"input": "x", "command": "y"}')


def test_two_tools_that_come_to_one_name_are_refused() -> None:
    clash = {"type": "function", "name": "multi_agent_v1__spawn"}
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.tools\[0\]\.name"):
        read(CODEX | {"tools": [clash, AGENTS]})


def test_a_choice_of_none_offers_no_tools() -> None:
    assert read(CODEX | {"tool_choice": "none"}).conversation.tools == ()


# ---- what is refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("background", "yes"),
        ("conversation", {"id": "conv_1"}),
        ("prompt", {"id": "pmpt_1"}),
        ("generate", False),
        ("tool_choice", "must"),
        ("tool_choice", {"type": "allowed_tools", "tools": []}),
        ("text", "plain"),
        ("text.format", {"format": {"type": "json_schema", "name": "x", "schema": 3}}),
        ("text.format", {"format": "json"}),
        ("top_logprobs", 3),
        ("max_output_tokens", 0),
        ("max_output_tokens", "9"),
        ("stream", 1),
        ("model", 3),
        ("instructions", ["Be brief."]),
        ("previous_response_id", 3),
        ("input", None),
        ("input", []),
        ("input", {"role": "user"}),
        ("tools", {}),
        ("tools[0]", ["bash"]),
        ("tools[0].type", [{"name": "bash"}]),
        ("tools[0].name", [{"type": "function", "function": {"name": "bash"}}]),
        ("tools[0].parameters", [BASH | {"parameters": "none"}]),
        ("tools[0].tools[0]", [AGENTS | {"tools": [3]}]),
        ("tools[0].format.definition", [PATCH | {"format": {"type": "grammar"}}]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    top = field.split(".")[0].split("[")[0]
    with pytest.raises(InvalidRequest) as caught:
        read(CODEX | {top: value})
    assert caught.value.param == field
    assert caught.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("place", "item"),
    [
        ("input[0]", "Hi."),
        ("input[0].role", {"role": "tool", "content": "x"}),
        ("input[0].role", {"type": "message", "content": "x"}),
        ("input[0].content", {"role": "user", "content": {"text": "x"}}),
        ("input[0].content[1]", {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_image"}]}),
        ("input[0].content[0]", {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}),
        ("input[0].content[0]", {"role": "user", "content": [{"type": ["text"], "text": "a"}]}),
        (
            "input[0].output[0]",
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "data:"}]},
        ),
        ("input[0].output", {"type": "function_call_output", "call_id": "c", "output": 3}),
        ("input[0].call_id", {"type": "function_call_output", "output": "x"}),
        ("input[0].call_id", {"type": "function_call", "name": "bash", "arguments": "{}"}),
        ("input[0].name", {"type": "function_call", "call_id": "c", "arguments": "{}"}),
        ("input[0].arguments", {"type": "function_call", "call_id": "c", "name": "bash", "arguments": 3}),
        ("input[0].type", {"type": "local_shell_call", "call_id": "c", "action": {}}),
        ("input[0].type", {"type": "web_search_call", "id": "ws_1"}),
        ("input[0].type", {"type": "compaction", "encrypted_content": "x"}),
        ("input[0].type", {"id": "msg_1"}),
        ("input[0].id", {"role": "user", "content": "x", "id": 3}),
        ("input[0].encrypted_content", {"type": "reasoning", "encrypted_content": {}}),
        ("input[0].summary[0]", {"type": "reasoning", "summary": [{"type": "image"}]}),
    ],
)
def test_items_that_cannot_be_read_are_refused_by_place(place: str, item: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_items(item)
    assert caught.value.param == place


def test_what_only_colours_the_reply_is_ignored() -> None:
    colours = {
        "temperature": 0.2,
        "top_p": 0.5,
        "service_tier": "flex",
        "safety_identifier": "x",
        "metadata": {"a": "b"},
        "max_tool_calls": 3,
        "user": "u",
        "x_unknown": {"deep": [1]},
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}, "verbosity": "high"},
        "top_logprobs": 0,
        "background": False,
        "generate": True,
    }
    assert read(CODEX | colours) == read(CODEX)


def replaced(value: Any, path: Sequence[int], by: Any) -> Any:
    """``value`` with the node at ``path`` (taken modulo what is there) replaced, or removed."""
    if not path or not isinstance(value, dict | list) or not value:
        return by
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copied = value.copy()
    if by is ... and len(path) == 1:
        del copied[key]
    else:
        copied[key] = replaced(value[key], path[1:], by)
    return copied


HISTORY = [
    *CODEX["input"],
    *replied(
        Message(
            "assistant",
            "I look.",
            (ToolCall("c1", "multi_agent_v1__spawn", "{}"), ToolCall("c2", "apply_patch", '{"input": "x"}')),
            reasoning="so",
        )
    )["output"],
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
    {"type": "item_reference", "id": "rs_" + "0a" * 14 + "_0"},
]
WHOLE = CODEX | {"input": HISTORY, "previous_response_id": HEADER.reply_id, "max_output_tokens": 5}
odd = st.one_of(
    st.just(...),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    st.sampled_from([[], {}, [[]], [{}], {"type": "message"}, {"type": ["x"]}, "function_call", "reasoning", "custom"]),
    st.lists(st.none() | st.text(max_size=3), max_size=2),
    st.dictionaries(st.sampled_from(["type", "role", "text", "name"]), st.none() | st.text(max_size=3), max_size=2),
)


@given(changes=st.lists(st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=6), odd), min_size=1, max_size=3))
@examples(1500)
def test_every_object_is_understood_or_refused(changes: list[tuple[list[int], Any]]) -> None:
    body: Any = WHOLE
    for path, by in changes:
        body = replaced(body, path, by)
    try:
        ask = read(body)
    except InvalidRequest as error:
        assert error.message
        return
    assert isinstance(ask, Ask)
    assert all(isinstance(message.content, str) for message in ask.conversation.messages)
    Response.model_validate(DIALECT.reply(HEADER, ask, said(Message("assistant", "ok"))))


def test_the_whole_body_that_is_mutated_is_understood() -> None:
    assert len(read(WHOLE).conversation.messages) == 7


# ---- counting


def test_counting_reads_what_a_call_would_send() -> None:
    body = {"instructions": "Be brief.", "input": [TASK], "tools": [BASH]}
    conversation = DIALECT.read_count(body, Target())
    assert conversation.messages == (Message("system", "Be brief."), Message("user", "Create the file."))
    assert [tool.name for tool in conversation.tools] == ["bash"]
    assert InputTokenCountResponse.model_validate(DIALECT.count(5)).input_tokens == 5
    with pytest.raises(InvalidRequest, match="previous_response_id"):
        DIALECT.read_count(body | {"previous_response_id": "resp_1"}, Target())


# ---- through the gateway


CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>'
SPAWN = '<tool_call>\n{"name": "multi_agent_v1__spawn", "arguments": {"command": "go"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "bash", "arguments": {'


def client(house: House, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=house.url, api_key=key, max_retries=0)


async def asked(model: openai.AsyncOpenAI, stream: bool, **body: Any) -> Response:
    """A response, put together by the official client."""
    if not stream:
        reply: Response = await model.responses.create(model="m", **body)
        return reply
    async with model.responses.stream(model="m", **body) as events:
        async for _ in events:
            pass
        wire = (await events.get_final_response()).model_dump(exclude_unset=True)
    for item in wire["output"]:
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return Response.model_validate(wire)


def played_back(response: Response) -> list[Any]:
    """What openai-agents does with a reply's items."""
    return [item.model_dump(exclude_unset=True) for item in response.output]


def results(response: Response) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "a.txt\n"}
        for item in response.output
        if item.type == "function_call"
    ]


def is_one_branch(calls: Sequence[Call]) -> bool:
    pairs = itertools.pairwise(calls)
    return all(
        b.cause is Cause.EXTENDED and b.parent_id == a.call_id and b.prompt_ids[: len(told(a))].tolist() == told(a)
        for a, b in pairs
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_tools_stays_one_branch(stream: bool, qwen3_directory: Path) -> None:
    lines = (f"<think>\nI see.\n</think>\n\nI look.\n{CALL}\n{SPAWN}", f"<think>\nHm.\n</think>\n\n{CALL}", "Done.")
    model_keys = {"keep_thinking": True}
    async with (
        serving(qwen3_directory, *lines, model=model_keys) as house,
        client(house, house.open()) as model,
    ):
        history: list[Any] = [{"role": "developer", "content": "Rules."}, TASK]
        tools = [BASH, AGENTS]
        first = await asked(model, stream, input=history, tools=tools, include=["reasoning.encrypted_content"])
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert (first.output_text, first.status) == ("I look.", "completed")
        spawn: Any = first.output[-1]
        assert (spawn.namespace, spawn.name) == ("multi_agent_v1", "spawn")
        history += [*played_back(first), *results(first)]
        second = await asked(model, stream, input=history, tools=tools)
        assert [item.type for item in second.output] == ["reasoning", "function_call"]
        history += [*played_back(second), *results(second)]
        third = await asked(model, stream, input=history, tools=tools)
        assert third.output_text == "Done."
        calls = house.notebook.calls
        assert [call.dialect for call in calls] == ["responses"] * 3
        assert is_one_branch(calls)
        assert Response.model_validate(calls[0].reply).model_dump() == first.model_dump()


@pytest.mark.parametrize("stream", [False, True])
async def test_previous_replies_are_gone_on_from(stream: bool, tiny_directory: Path) -> None:
    async with (
        serving(tiny_directory, CALL, "Done.", "Bye.", model={"tool_format": "hermes"}) as house,
        client(house, house.open()) as model,
    ):
        rules = {"instructions": "Rules.", "tools": [BASH]}
        first = await asked(model, stream, input="List files.", **rules)
        second = await asked(model, stream, input=results(first), previous_response_id=first.id, **rules)
        assert (second.output_text, second.previous_response_id) == ("Done.", first.id)
        third = await asked(model, stream, input="Thanks.", previous_response_id=second.id, **rules)
        assert third.output_text == "Bye."
        assert is_one_branch(house.notebook.calls)
        assert house.shown(2).count("Rules.") == 1
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await asked(model, False, input="Hi.", previous_response_id="resp_unknown")


async def test_the_sync_client_streams_and_plays_back(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "Héllo 🙂 you <b>", "Bye.") as house:
        house.engine.lines[0].delay_s = 0.03
        key = house.open()

        def talk() -> list[Any]:
            with openai.OpenAI(base_url=house.url, api_key=key, max_retries=0) as model:
                events = list(model.responses.create(model="m", input="Hi.", stream=True))
                whole = events[-1]
                assert whole.type == "response.completed"
                history: list[Any] = [{"role": "user", "content": "Hi."}, *played_back(whole.response), TASK]
                assert model.responses.create(model="m", input=history).output_text == "Bye."
                return events

        events = await asyncio.to_thread(talk)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "Héllo 🙂 you <b>"
        assert len(deltas) > 2
        assert is_one_branch(house.notebook.calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_call_behind_a_good_one_is_text_of_the_same_turn(stream: bool, tiny_directory: Path) -> None:
    async with (
        serving(tiny_directory, f"{CALL}\n{BROKEN}", "Done.", model={"tool_format": "hermes"}) as house,
        client(house, house.open()) as model,
    ):
        house.engine.lines[0].delay_s = 0.01
        first = await asked(model, stream, input=[TASK], tools=[BASH])
        kinds = ["message", "function_call"]
        assert [item.type for item in first.output] == (kinds[::-1] if stream else kinds)
        assert first.output_text == BROKEN
        history: list[Any] = [TASK, *played_back(first), *results(first)]
        assert (await asked(model, stream, input=history, tools=[BASH])).output_text == "Done."
        # It is the turn that was sampled; only the template shows such a turn otherwise.
        assert house.notebook.calls[1].cause is Cause.TEXT_CHANGED


async def test_a_reply_cut_by_its_length_is_incomplete(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two three four five six") as house, client(house, house.open()) as model:
        whole = await model.responses.create(model="m", input="Count.", max_output_tokens=3)
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage is not None
        assert whole.usage.output_tokens == 3
        stream = await model.responses.create(model="m", input="Count!", max_output_tokens=3, stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.incomplete"
        assert last.response.output_text == whole.output_text


async def test_signs_of_life_are_skipped(tiny_directory: Path) -> None:
    async with (
        serving(tiny_directory, "late", gateway={"keepalive_s": 0.05}) as house,
        client(house, house.open()) as model,
    ):
        gate = house.engine.lines[0].hold()
        asyncio.get_running_loop().call_later(0.4, gate.set)
        assert (await asked(model, True, input="Hi.")).output_text == "late"


async def test_a_failing_engine_is_told_within_the_stream(tiny_directory: Path) -> None:
    async with serving(tiny_directory) as house, client(house, house.open()) as model:
        house.engine.say("one two three four", delay_s=0.03, fail_after=3)
        stream = await model.responses.create(model="m", input="Hi.", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"


async def test_refusals_reach_the_client_as_its_own_errors(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi", context_length=64) as house, client(house, house.open()) as model:
        with pytest.raises(openai.BadRequestError) as caught:
            await model.responses.create(model="m", input="Hi.", background=True)
        assert caught.value.param == "background"
        with pytest.raises(openai.BadRequestError) as caught:
            await model.responses.create(model="m", input="word " * 200)
        assert caught.value.code == "context_length_exceeded"
        stream = await model.responses.create(model="m", input="word " * 200, stream=True)
        *begun, last = [event async for event in stream]
        assert [event.type for event in begun] == ["response.created", "response.in_progress"]
        assert last.type == "response.failed" and last.response.error is not None
        assert last.response.error.code == "context_length_exceeded"
        assert not house.engine.requests


async def test_tokens_are_counted_as_a_call_would_have_them(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi") as house, client(house, house.open()) as model:
        body: Any = {"input": [TASK], "instructions": "Rules."}
        counted = await model.responses.input_tokens.count(model="m", **body)
        reply = await model.responses.create(model="m", **body)
        assert reply.usage is not None
        assert counted.input_tokens == reply.usage.input_tokens


async def test_a_websocket_is_turned_away_at_once(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi") as house, httpx.AsyncClient() as http:
        headers = {"authorization": f"Bearer {house.open()}", "openai-beta": "responses_websockets=2026-02-06"}
        assert (await http.get(f"{house.url}/responses", headers=headers)).status_code == 426
