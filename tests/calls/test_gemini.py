"""Google Gemini's wire format: as its own types read it, as its clients play it back, as its SDK talks to a gateway."""

import asyncio
import copy
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types
from hypothesis import given
from hypothesis import strategies as st

from longrein.calls.conversation import Message, ToolCall, chain, digest_tools, same_message
from longrein.calls.dialect import Ask, Delta, Header, Reply, Stream, Target
from longrein.calls.gemini import UNPARSED, GeminiDialect
from longrein.errors import CallError, CapExceeded, ContextLengthExceeded, InvalidRequest, Overloaded, UnknownKey
from longrein.records import Cause
from tests.calls.properties import examples
from tests.calls.scripted_engine import told
from tests.calls.serving import House, serving

GEMINI = GeminiDialect()
HEADER = Header("reply-1", 1_700_000_000, "policy-model")
SSE = Target("policy-model", stream=True, query={"alt": "sse"})
WHOLE = Target("policy-model")
ASK: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "Say something."}]}]}


def read(body: Any, target: Target = WHOLE) -> Ask:
    # As it comes off the wire, where no object is shared.
    return GEMINI.read(json.loads(json.dumps(body)), target)


def messages(*contents: Any, **fields: Any) -> tuple[Message, ...]:
    return read({"contents": list(contents), **fields}).conversation.messages


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": part} if isinstance(part, str) else part for part in parts]}


def model(*parts: Any) -> dict[str, Any]:
    return {**user(*parts), "role": "model"}


def call(name: str, args: Any, call_id: str | None = None) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args, **({"id": call_id} if call_id else {})}}


def answer(name: str, response: Any, call_id: str | None = None) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **({"id": call_id} if call_id else {})}}


def finished(message: Message, finish_reason: str = "stop", **fields: Any) -> Reply:
    return Reply(message, finish_reason, 11, 7, **fields)


# ---- requests


def test_a_conversation_is_read() -> None:
    ask = read(
        {
            "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}, {"text": "Be kind."}]},
            "contents": [
                {"parts": [{"text": "Hello."}]},
                model({"text": "I think.", "thought": True}, "Let me see.", call("bash", {"command": "ls"}, "c1")),
                {"role": "function", "parts": [answer("bash", {"output": "a.txt"}, "c1")]},
                model("Done."),
                user("And", "now?"),
            ],
            "tools": [{"functionDeclarations": [{"name": "bash", "description": "Runs.", "parameters": None}]}],
            "generationConfig": {
                "maxOutputTokens": 9,
                "stopSequences": ["END"],
                "temperature": 0.1,
                "candidateCount": 1,
            },
            "safetySettings": [{"category": "X"}],
            "labels": {"a": "b"},
        },
        SSE,
    )
    assert ask.conversation.messages == (
        Message("system", "Be brief.\nBe kind."),
        Message("user", "Hello."),
        Message("assistant", "Let me see.", (ToolCall("c1", "bash", '{"command": "ls"}'),), reasoning="I think."),
        Message("tool", "a.txt", tool_call_id="c1", name="bash"),
        Message("assistant", "Done."),
        Message("user", "And\nnow?"),
    )
    assert [(tool.name, tool.description, tool.parameters) for tool in ask.conversation.tools] == [
        ("bash", "Runs.", None)
    ]
    assert (ask.model, ask.stream, ask.max_tokens, ask.stop) == ("policy-model", True, 9, ("END",))
    assert (ask.include_usage, ask.logprobs, ask.dropped) == (True, False, ())


def test_snake_case_says_the_same_as_camel_case() -> None:
    camel = {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            user("x"),
            model({"text": "hm", "thought": True, "thoughtSignature": "aGk="}, call("f", {"some_key": 1})),
            user(answer("f", {"some_key": {"other_key": 1}})),
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"properties": {"some_key": {}}}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED", "allowedFunctionNames": ["f"]}},
        "generationConfig": {"maxOutputTokens": 5, "stopSequences": ["x"], "responseLogprobs": True},
    }
    snake = {
        "system_instruction": camel["systemInstruction"],
        "contents": [
            user("x"),
            model(
                {"text": "hm", "thought": True, "thought_signature": "aGk="},
                {"function_call": {"name": "f", "args": {"some_key": 1}}},
            ),
            user({"function_response": {"name": "f", "response": {"some_key": {"other_key": 1}}}}),
        ],
        "tools": [
            {"function_declarations": [{"name": "f", "parameters_json_schema": {"properties": {"some_key": {}}}}]}
        ],
        "tool_config": {"function_calling_config": {"mode": "VALIDATED", "allowed_function_names": ["f"]}},
        "generation_config": {"max_output_tokens": 5, "stop_sequences": ["x"], "response_logprobs": True},
    }
    ask = read(snake)
    assert ask == read(camel)
    assert (ask.max_tokens, ask.stop, ask.logprobs) == (5, ("x",), True)
    assert ask.conversation.messages[2].tool_calls[0].arguments == '{"some_key": 1}'
    assert ask.conversation.messages[3].content == '{"some_key":{"other_key":1}}'


@pytest.mark.parametrize("given", ["Be brief.", {"parts": {"text": "Be brief."}}, {"parts": [{"text": "Be brief."}]}])
def test_a_system_instruction_is_a_text_or_a_content(given: Any) -> None:
    assert messages(user("x"), systemInstruction=given)[0] == Message("system", "Be brief.")


def test_one_object_stands_for_a_list_of_one() -> None:
    body = {
        "contents": {"role": "user", "parts": {"text": "x"}},
        "tools": {"functionDeclarations": {"name": "f"}},
    }
    assert (
        read(body).conversation
        == read({"contents": [user("x")], "tools": [{"functionDeclarations": [{"name": "f"}]}]}).conversation
    )


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ({"output": "a\nb"}, "a\nb"),
        ({"result": "a"}, "a"),
        ({"return_value": "a"}, "a"),
        ({"content": "a"}, "a"),
        ({"output": {"lines": ["é"]}}, '{"output":{"lines":["é"]}}'),
        ({"output": "a", "exit": 1}, '{"output":"a","exit":1}'),
        ({"error": "no such file"}, '{"error":"no such file"}'),
        ({}, "{}"),
    ],
)
def test_a_function_response_becomes_text(response: Any, shown: str) -> None:
    assert messages(user("x"), model(call("f", {})), user(answer("f", response)))[-1].content == shown


def test_responses_without_ids_answer_by_name_then_by_order() -> None:
    calls = model(call("f", {"a": 1}), call("g", {}), call("f", {"a": 2}))
    history = messages(user("x"), calls, user(answer("f", {}), answer("f", {}), answer("g", {}), "Go on."))
    made = [made.call_id for made in history[1].tool_calls]
    assert len(set(made)) == 3
    assert [message.tool_call_id for message in history[2:]] == [made[0], made[2], made[1], None]
    assert history[-1] == Message("user", "Go on.")


def test_ids_that_only_the_response_has_are_matched_to_calls() -> None:
    """Gemini CLI makes ids up for calls that had none, and plays the calls back as they were."""
    history = messages(user("x"), model(call("f", {}), call("g", {})), user(answer("g", {}, "g-17"), answer("f", {})))
    made = {made.name: made.call_id for made in history[1].tool_calls}
    assert [message.tool_call_id for message in history[2:]] == [made["g"], made["f"]]


def test_a_later_turn_answers_its_own_calls() -> None:
    history = messages(
        user("x"), model(call("f", {})), user("Never mind."), model(call("f", {})), user(answer("f", {}))
    )
    assert history[-1].tool_call_id == history[3].tool_calls[0].call_id != history[1].tool_calls[0].call_id


def test_texts_and_responses_keep_their_order() -> None:
    history = messages(
        user("x"), model(call("f", {}), call("f", {})), user("a", "b", answer("f", {}), "c", answer("f", {}))
    )
    assert [(m.role, m.content) for m in history[2:]] == [
        ("user", "a\nb"),
        ("tool", "{}"),
        ("user", "c"),
        ("tool", "{}"),
    ]


def test_gemini_schemas_become_json_schemas() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True, "enum": ["STRING"]},
            "any_of": {"anyOf": [{"type": "INTEGER"}, {"$ref": "#/$defs/x"}], "nullable": True},
            "list": {"type": "ARRAY", "items": {"type": "NUMBER", "minimum": 0}, "maxItems": "3"},
        },
        "required": ["type"],
        "propertyOrdering": ["type", "any_of", "list"],
        "defs": {"x": {"type": "BOOLEAN"}},
    }
    tools = [{"functionDeclarations": [{"name": "f", "parameters": schema}]}]
    assert read({**ASK, "tools": tools}).conversation.tools[0].parameters == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["STRING"]},
            "any_of": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/x"}, {"type": "null"}]},
            "list": {"type": "array", "items": {"type": "number", "minimum": 0}, "maxItems": 3},
        },
        "required": ["type"],
        "$defs": {"x": {"type": "boolean"}},
    }


def test_the_schema_of_googles_own_type_becomes_its_own_json_schema() -> None:
    schema = types.Schema(
        type=types.Type.OBJECT,
        properties={"n": types.Schema(type=types.Type.INTEGER), "s": types.Schema(type=types.Type.STRING)},
        required=["n"],
    )
    given = schema.model_dump(mode="json", by_alias=True, exclude_none=True)
    tools = [{"functionDeclarations": [{"name": "f", "parameters": given}]}]
    expected = schema.json_schema.model_dump(mode="json", exclude_none=True)
    assert read({**ASK, "tools": tools}).conversation.tools[0].parameters == expected


def test_tools_that_run_at_google_are_dropped_with_a_note() -> None:
    ask = read({**ASK, "tools": [{"googleSearch": {}}, {"url_context": {}, "functionDeclarations": [{"name": "f"}]}]})
    assert [tool.name for tool in ask.conversation.tools] == ["f"]
    assert [note.partition(":")[0] for note in ask.dropped] == ["tools[0].googleSearch", "tools[1].urlContext"]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, "fg"),
        ({"mode": "AUTO"}, "fg"),
        ({"mode": "VALIDATED"}, "fg"),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["g"]}, "g"),
        ({"mode": "NONE"}, ""),
    ],
)
def test_the_calling_mode_is_followed(config: Any, names: str) -> None:
    tools = [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]
    ask = read({**ASK, "tools": tools, "toolConfig": {"functionCallingConfig": config}})
    assert "".join(tool.name for tool in ask.conversation.tools) == names


CONFIG = "generationConfig"


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"contents": []}, "contents"),
        ({"contents": None}, "contents"),
        ({"contents": "x"}, "contents"),
        ({"contents": ["x"]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
        (
            {"contents": [user({"inlineData": {"mimeType": "image/png", "data": "AA=="}})]},
            "contents[0].parts[0].inlineData",
        ),
        ({"contents": [user("x", {"file_data": {"fileUri": "u"}})]}, "contents[0].parts[1].fileData"),
        ({"contents": [model({"executableCode": {"code": "1"}})]}, "contents[0].parts[0].executableCode"),
        ({"contents": [model({"codeExecutionResult": {}})]}, "contents[0].parts[0].codeExecutionResult"),
        ({"contents": [user({"somethingNew": "x"})]}, "contents[0].parts[0]"),
        ({"contents": [user({})]}, "contents[0].parts[0]"),
        ({"contents": [user({"text": 3})]}, "contents[0].parts[0].text"),
        ({"contents": [user(call("f", {}))]}, "contents[0].parts[0].functionCall"),
        ({"contents": [model(answer("f", {}))]}, "contents[0].parts[0].functionResponse"),
        ({"contents": [model(call("f", "{}"))]}, "contents[0].parts[0].functionCall.args"),
        ({"contents": [model(call("", {}))]}, "contents[0].parts[0].functionCall.name"),
        ({"contents": [user(answer("f", "done"))]}, "contents[0].parts[0].functionResponse.response"),
        (
            {"contents": [user({"functionResponse": {"name": "f", "parts": [{"inlineData": {}}]}})]},
            "contents[0].parts[0].functionResponse.parts",
        ),
        ({"systemInstruction": 3}, "systemInstruction"),
        ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction.parts[0].inlineData"),
        ({"systemInstruction": {"parts": [call("f", {})]}}, "systemInstruction.parts[0].functionCall"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": 3}]}]},
            "tools[0].functionDeclarations[0].parametersJsonSchema",
        ),
        ({"toolConfig": {"functionCallingConfig": {"mode": "MUST"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({CONFIG: []}, CONFIG),
        ({CONFIG: {"candidateCount": 2}}, f"{CONFIG}.candidateCount"),
        ({CONFIG: {"maxOutputTokens": 0}}, f"{CONFIG}.maxOutputTokens"),
        ({CONFIG: {"stopSequences": [""]}}, f"{CONFIG}.stopSequences"),
        ({CONFIG: {"responseMimeType": "text/x.enum"}}, f"{CONFIG}.responseMimeType"),
        ({CONFIG: {"responseSchema": {"type": "OBJECT"}}}, f"{CONFIG}.responseMimeType"),
        ({CONFIG: {"responseJsonSchema": 3}}, f"{CONFIG}.responseJsonSchema"),
        ({CONFIG: {"responseFormat": {}}}, f"{CONFIG}.responseFormat"),
        ({CONFIG: {"responseModalities": ["TEXT", "IMAGE"]}}, f"{CONFIG}.responseModalities"),
        ({CONFIG: {"logprobs": 3, "responseLogprobs": True}}, f"{CONFIG}.logprobs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(extra: Any, named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(ASK | extra)
    assert refused.value.param == named
    assert named in refused.value.message


def test_what_colours_sampling_is_ignored() -> None:
    config = {
        "temperature": 1,
        "topP": 0.95,
        "topK": 64,
        "seed": 3,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8192},
        "responseMimeType": "text/plain",
        "responseModalities": ["TEXT"],
        "presencePenalty": 1,
        "mediaResolution": "MEDIA_RESOLUTION_LOW",
    }
    assert read({**ASK, CONFIG: config}) == read(ASK)


def test_deep_nesting_is_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for body in (
        {**ASK, "tools": [{"functionDeclarations": [{"name": "f", "parameters": deep}]}]},
        {"contents": [model(call("f", deep))]},
        {**ASK, "cachedContent": deep},
    ):
        with pytest.raises(InvalidRequest):
            GEMINI.read(body, WHOLE)


# ---- counting


def test_a_count_is_asked_for_in_both_ways() -> None:
    request = {"model": "models/m", "systemInstruction": "Be brief.", **ASK, CONFIG: {"candidateCount": 7}}
    counted = GEMINI.read_count({"generateContentRequest": request}, WHOLE)
    assert counted.messages == (Message("system", "Be brief."), Message("user", "Say something."))
    assert GEMINI.read_count(ASK, WHOLE) == read(ASK).conversation
    with pytest.raises(InvalidRequest):
        GEMINI.read_count({}, WHOLE)
    assert types.CountTokensResponse.model_validate(GEMINI.count(12)).total_tokens == 12


# ---- replies

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
raw_arguments = st.sampled_from(
    [
        "",
        " ",
        "{",
        '{"a": ',
        "[1, 2]",
        '"x"',
        "null",
        "é { 🙂",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"a": 1, "a": 2}',
        '{"b": 1.0, "a": 1}',
        json.dumps({UNPARSED: "x"}),
        json.dumps({UNPARSED: {"raw": "x"}, "a": 1}),
        "[" * 5000,
    ]
)
arguments = raw_arguments | st.dictionaries(st.text(max_size=5), json_values, max_size=3).map(json.dumps)


@st.composite
def replies(draw: st.DrawFn) -> Message:
    calls = draw(st.lists(st.tuples(st.sampled_from(["bash", "read_file", "ü"]), arguments), max_size=3))
    return Message(
        "assistant",
        draw(st.text(max_size=30)),
        tuple(ToolCall(f"call_{i}", name, text) for i, (name, text) in enumerate(calls)),
        reasoning=draw(st.none() | st.text(max_size=30)),
    )


def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[a:b] for a, b in pairwise([0, *places, len(text)]) if a < b]


@st.composite
def deltas(draw: st.DrawFn, message: Message) -> list[Delta]:
    """A message as it may grow."""
    pieces = [Delta(reasoning=piece) for piece in cut(draw, message.reasoning or "")]
    pieces += [Delta(content=piece) for piece in cut(draw, message.content)]
    pieces += [Delta(calls=(call,), first_call=i) for i, call in enumerate(message.tool_calls)]
    return pieces


def streamed(grown: Sequence[Delta], reply: Reply, target: Target = SSE) -> tuple[Stream, bytes]:
    stream = GEMINI.stream(HEADER, read(ASK, target))
    sent = stream.begin() + stream.alive()
    for delta in grown:
        sent += stream.delta(delta) + stream.alive()
    return stream, sent + stream.end(reply)


def events(sent: bytes) -> list[dict[str, Any]]:
    lines = [line for line in sent.decode().split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def as_typed(wire: dict[str, Any]) -> types.GenerateContentResponse:
    """As Google's types read it; they refuse fields they do not know."""
    return types.GenerateContentResponse.model_validate_json(json.dumps(wire))


def content_of(wire: dict[str, Any]) -> dict[str, Any]:
    """The reply's content as Google's types play it back."""
    candidates = as_typed(wire).candidates
    assert candidates is not None and candidates[0].content is not None
    played: dict[str, Any] = candidates[0].content.model_dump(mode="json", by_alias=True, exclude_none=True)
    return played


@examples(200)
@given(replies())
def test_a_reply_played_back_is_the_same_message(message: Message) -> None:
    wire = GEMINI.reply(HEADER, read(ASK), finished(message))
    (_, played) = messages(user("x"), content_of(wire))
    assert same_message(message, played)


@examples(200)
@given(st.data())
def test_a_stream_played_back_is_the_same_message(data: st.DataObject) -> None:
    message = data.draw(replies())
    grown = data.draw(deltas(message))
    _, sent = streamed(grown, finished(message))
    chunks = [content_of(event) for event in events(sent)]
    (_, one_by_one) = messages(user("x"), *chunks)
    (_, in_one) = messages(user("x"), {"role": "model", "parts": [part for chunk in chunks for part in chunk["parts"]]})
    assert same_message(message, one_by_one) and one_by_one == in_one
    whole = GEMINI.reply(HEADER, read(ASK), finished(message))
    (_, played) = messages(user("x"), content_of(whole))
    assert played == one_by_one
    assert signatures(whole["candidates"][0]["content"]) == signatures(*chunks)


def signatures(*contents: dict[str, Any]) -> list[bytes]:
    parts = [types.Part.model_validate_json(json.dumps(part)) for content in contents for part in content["parts"]]
    return [part.thought_signature for part in parts if part.thought_signature is not None]


@examples(50)
@given(st.data())
def test_a_stream_without_alt_is_one_json_array_of_the_same_chunks(data: st.DataObject) -> None:
    message = data.draw(replies())
    grown = data.draw(deltas(message))
    stream, sent = streamed(grown, finished(message), Target("m", stream=True))
    assert stream.content_type.startswith("application/json")
    assert json.loads(sent) == events(streamed(grown, finished(message))[1])


def test_a_whole_reply() -> None:
    message = Message("assistant", "I look.", (ToolCall("c1", "bash", '{"b": 1, "a": 2}'),), reasoning="Hm.")
    wire = GEMINI.reply(HEADER, read(ASK), finished(message, "tool_calls"))
    signature = wire["candidates"][0]["content"]["parts"][2].pop("thoughtSignature")
    assert len(signature) == 32
    assert wire == {
        "candidates": [
            {
                "content": {
                    "parts": [
                        {"text": "Hm.", "thought": True},
                        {"text": "I look."},
                        {"functionCall": {"id": "c1", "name": "bash", "args": {"b": 1, "a": 2}}},
                    ],
                    "role": "model",
                },
                "index": 0,
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {"promptTokenCount": 11, "candidatesTokenCount": 7, "totalTokenCount": 18},
        "modelVersion": "policy-model",
        "responseId": "reply-1",
        "createTime": "2023-11-14T22:13:20Z",
    }
    typed = as_typed(wire)
    assert typed.text == "I look."
    assert typed.function_calls is not None and typed.function_calls[0].args == {"b": 1, "a": 2}


def test_two_followers_are_sent_the_same() -> None:
    message = Message("assistant", "Hi.", (ToolCall("c", "f", "{}"),), reasoning="Hm.")
    grown = [Delta(reasoning="Hm."), Delta("Hi."), Delta(calls=message.tool_calls)]
    assert streamed(grown, finished(message))[1] == streamed(grown, finished(message))[1]
    other = GEMINI.stream(Header("reply-2", HEADER.created, HEADER.model), read(ASK, SSE))
    assert signatures(*(content_of(e) for e in events(other.delta(Delta("", "a", message.tool_calls))))) != signatures(
        *(content_of(e) for e in events(streamed(grown, finished(message))[1]))
    )


def test_no_reasoning_no_signature() -> None:
    wire = GEMINI.reply(HEADER, read(ASK), finished(Message("assistant", "Hi.", (ToolCall("c", "f", "{}"),))))
    assert "thoughtSignature" not in json.dumps(wire)
    assert "thought" not in json.dumps(wire)


@pytest.mark.parametrize(("reason", "shown"), [("stop", "STOP"), ("tool_calls", "STOP"), ("length", "MAX_TOKENS")])
def test_why_a_reply_ended(reason: str, shown: str) -> None:
    reply = finished(Message("assistant", "Hi."), reason)
    whole = as_typed(GEMINI.reply(HEADER, read(ASK), reply))
    *before, last = [as_typed(event) for event in events(streamed([Delta("Hi.")], reply)[1])]
    for typed in (whole, last):
        assert typed.candidates is not None and typed.candidates[0].finish_reason == types.FinishReason(shown)
        assert typed.usage_metadata is not None and typed.usage_metadata.total_token_count == 18
    assert all(event.candidates and event.candidates[0].finish_reason is None for event in before)


def test_log_probabilities() -> None:
    ask = read({**ASK, CONFIG: {"responseLogprobs": True}})
    assert ask.logprobs
    reply = finished(Message("assistant", "Hi."), tokens=(("Hi", -0.5), (".", -1.5)))
    for wire in (GEMINI.reply(HEADER, ask, reply), events(streamed([Delta("Hi.")], reply)[1])[-1]):
        (candidate,) = as_typed(wire).candidates or ()
        assert candidate.avg_logprobs == -1.0
        assert candidate.logprobs_result is not None
        chosen = candidate.logprobs_result.chosen_candidates or []
        assert [(one.token, one.log_probability) for one in chosen] == [("Hi", -0.5), (".", -1.5)]
    assert "logprobsResult" not in GEMINI.reply(HEADER, ask, finished(Message("assistant", "x")))["candidates"][0]


def test_models_are_listed_in_googles_shape() -> None:
    listed = GEMINI.models(["a", "models/b"])
    assert [one["name"] for one in listed["models"]] == ["models/a", "models/b"]
    assert GEMINI.model("a") == listed["models"][0]


# ---- errors


def with_status(status: int) -> CallError:
    error = CallError("no")
    error.status = status
    return error


@pytest.mark.parametrize(
    ("error", "status", "word"),
    [
        (InvalidRequest("no"), 400, "INVALID_ARGUMENT"),
        (UnknownKey("no"), 401, "UNAUTHENTICATED"),
        (CapExceeded("no"), 403, "PERMISSION_DENIED"),
        (Overloaded("no"), 429, "RESOURCE_EXHAUSTED"),
        (CallError("no"), 500, "INTERNAL"),
        (with_status(404), 404, "NOT_FOUND"),
        (with_status(413), 413, "INVALID_ARGUMENT"),
        (with_status(503), 503, "UNAVAILABLE"),
        (with_status(504), 504, "DEADLINE_EXCEEDED"),
        (with_status(502), 502, "INTERNAL"),
    ],
)
def test_errors_have_googles_shape(error: CallError, status: int, word: str) -> None:
    shown = {"error": {"code": status, "message": "no", "status": word, "details": []}}
    assert GEMINI.error(error) == (status, shown)


def test_an_error_names_the_field() -> None:
    _, body = GEMINI.error(InvalidRequest("tools: no", param="tools"))
    (detail,) = body["error"]["details"]
    assert detail["fieldViolations"] == [{"field": "tools", "description": "tools: no"}]


@pytest.mark.parametrize(("seconds", "shown"), [(3, "3s"), (0.25, "0.25s"), (100, "100s"), (1e-9, "0s")])
def test_an_error_says_when_to_come_back(seconds: float, shown: str) -> None:
    _, body = GEMINI.error(Overloaded("busy", retry_after_s=seconds))
    assert body["error"]["details"] == [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": shown}]


def test_an_overflow_is_worded_as_google_does() -> None:
    status, body = GEMINI.error(ContextLengthExceeded(5000, 4096))
    assert (status, body["error"]["status"], body["error"]["details"]) == (400, "INVALID_ARGUMENT", [])
    assert body["error"]["message"] == (
        "The input token count (5000) exceeds the maximum number of tokens allowed (4096)."
    )


@pytest.mark.parametrize("query", [{"alt": "sse"}, {}])
def test_an_error_may_come_in_the_middle_of_a_stream(query: dict[str, str]) -> None:
    stream = GEMINI.stream(HEADER, read(ASK, Target("m", stream=True, query=query)))
    sent = stream.begin() + stream.delta(Delta("Hi")) + stream.error(CallError("the engine died"))
    first, last = events(sent) if query else json.loads(sent)
    assert first["candidates"][0]["content"]["parts"] == [{"text": "Hi"}]
    assert last["error"]["status"] == "INTERNAL"


# ---- what clients do (facts/harness-clients.md)


def test_gemini_cli_drops_thought_text_and_keeps_signatures() -> None:
    message = Message("assistant", "I look.", (ToolCall("c1", "bash", "{}"),), reasoning="Hm.")
    content = content_of(GEMINI.reply(HEADER, read(ASK), finished(message)))
    content["parts"] = [part for part in content["parts"] if not part.get("thought")]
    assert signatures(content)
    (_, played) = messages(user("x"), content)
    assert played.reasoning is None
    assert played.content == "I look." and len(played.tool_calls) == 1


def test_gemini_clis_router_call_is_told_its_schema() -> None:
    """With no model named it first asks for JSON of one schema."""
    config = {"responseMimeType": "application/json", "responseJsonSchema": {"type": "object"}, "temperature": 0}
    told = read({**ASK, CONFIG: config}).conversation.messages[0]
    assert (told.role, told.content.endswith('{"type": "object"}')) == ("system", True)
    plain = {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT", "nullable": True}}
    assert '"object"' in read({**ASK, CONFIG: plain}).conversation.messages[0].content


def test_pydantic_ai_sends_validated_mode_with_every_name() -> None:
    tools = [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}]
    mode = {"functionCallingConfig": {"mode": "VALIDATED", "allowedFunctionNames": ["f"]}}
    assert read({**ASK, "tools": tools, "toolConfig": mode}).conversation == read({**ASK, "tools": tools}).conversation


def test_a_call_that_is_no_object_comes_back_as_the_model_wrote_it() -> None:
    message = Message("assistant", "", (ToolCall("c", "f", '{"command": "ls'),))
    wire = GEMINI.reply(HEADER, read(ASK), finished(message))
    assert wire["candidates"][0]["content"]["parts"][0]["functionCall"]["args"] == {UNPARSED: '{"command": "ls'}
    (_, played) = messages(user("x"), content_of(wire))
    assert played.tool_calls[0].arguments == '{"command": "ls'


def test_an_answer_that_says_nothing_still_has_a_part() -> None:
    """Google's Python SDK forgets a turn whose content has no parts."""
    wire = GEMINI.reply(HEADER, read(ASK), finished(Message("assistant", "", reasoning="Hm.")))
    assert [part["text"] for part in wire["candidates"][0]["content"]["parts"]] == ["Hm.", ""]
    for event in events(streamed([], finished(Message("assistant", "")))[1]):
        assert event["candidates"][0]["content"]["parts"] == [{"text": ""}]


def test_line_separators_inside_texts_end_no_line() -> None:
    _, sent = streamed([Delta("a\u2028b\u0085c\x1cd")], finished(Message("assistant", "a\u2028b\u0085c\x1cd")))
    lines = [line for line in sent.decode().splitlines() if line]
    assert [json.loads(line.removeprefix("data: ")) for line in lines] == events(sent)


# ---- whatever JSON comes

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "parts", "role", "name", "id", "x_y"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FULL: dict[str, Any] = {
    "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
    "contents": [
        user("x", "y"),
        model({"text": "Hm.", "thought": True, "thoughtSignature": "aGk="}, "z", call("f", {"a": [1]}, "c1")),
        user(answer("f", {"output": "o"}, "c1"), "more"),
        model("a"),
        {"parts": [{"text": "b"}]},
    ],
    "tools": [
        {
            "functionDeclarations": [
                {
                    "name": "f",
                    "description": "d",
                    "parameters": {
                        "type": "OBJECT",
                        "properties": {"a": {"type": "ARRAY", "items": {"type": "STRING"}, "minItems": "1"}},
                        "anyOf": [{"nullable": True, "type": "NULL"}],
                    },
                },
                {"name": "g", "parametersJsonSchema": {"type": "object"}},
            ]
        },
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["f"]}},
    CONFIG: {
        "maxOutputTokens": 5,
        "stopSequences": ["x"],
        "candidateCount": 1,
        "responseMimeType": "text/plain",
        "responseModalities": ["TEXT"],
        "responseLogprobs": False,
    },
    "cachedContent": "",
}


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in places(one, (*at, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A valid body with a few places overwritten, removed, renamed or repeated."""
    body = copy.deepcopy(FULL)
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from([place for place in places(body) if place]))
        holder: Any = body
        for key in path:
            holder = holder[key]
        how = draw(st.sampled_from(["put", "put", "drop", "add"]))
        if how == "put":
            holder[last] = draw(anything)
        elif how == "drop":
            del holder[last]
        elif isinstance(holder, list):
            holder.insert(last, draw(anything))
        else:
            holder[draw(st.sampled_from(["inline_data", "text", "functionCall", "parts", "nullable"]))] = draw(anything)
    return body


@examples(400)
@given(mutated(), st.sampled_from([SSE, WHOLE, Target()]))
def test_any_body_is_an_ask_or_refused(body: dict[str, Any], target: Target) -> None:
    for reading in (GEMINI.read, GEMINI.read_count):
        try:
            read = reading(body, target)
        except InvalidRequest as error:
            assert error.message
            continue
        conversation = read.conversation if isinstance(read, Ask) else read
        assert chain(conversation.messages) and digest_tools(conversation.tools)


@examples(100)
@given(st.dictionaries(st.sampled_from(list(FULL)), anything, max_size=4))
def test_any_object_is_an_ask_or_refused(body: dict[str, Any]) -> None:
    try:
        assert GEMINI.read(body, WHOLE).conversation.messages
    except InvalidRequest as error:
        assert error.message


def test_the_unchanged_body_is_understood() -> None:
    assert len(read(FULL).conversation.messages) == 7


# ---- through a gateway, with Google's SDK

BASH = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="bash",
            description="Runs a command.",
            parameters=types.Schema(
                type=types.Type.OBJECT, properties={"command": types.Schema(type=types.Type.STRING)}
            ),
        )
    ]
)
TOOLS = types.GenerateContentConfig(tools=[BASH], temperature=0.3)
HERMES = {"tool_format": "hermes"}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>'


def client(house: House, key: str, **options: Any) -> genai.Client:
    return genai.Client(api_key=key, http_options=types.HttpOptions(**({"base_url": house.gateway.url} | options)))


def results(calls: Sequence[types.FunctionCall]) -> list[types.Part]:
    responses = [
        types.FunctionResponse(id=call.id, name=call.name, response={"output": f"{i}.txt\n"})
        for i, call in enumerate(calls)
    ]
    return [types.Part(function_response=response) for response in responses]


def stays_one_branch(house: House) -> bool:
    calls = house.notebook.calls
    return calls[0].cause is Cause.NEW_SESSION and all(
        after.cause is Cause.EXTENDED
        and after.parent_id == before.call_id
        and after.prompt_ids[: len(told(before))].tolist() == told(before)
        for before, after in pairwise(calls)
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_the_async_chat_runs_a_tool_loop_on_one_branch(stream: bool, tiny_directory: Path) -> None:
    """The SDK's chat plays a streamed turn back as one content for each event."""
    async with (
        serving(tiny_directory, f"I look.\n{CALL}\n{CALL}", f"Héllo 🙂\n{CALL}", "Done.", model=HERMES) as house,
        client(house, house.open()).aio as models,
    ):
        for line in house.engine.lines:
            line.delay_s = 0.005
        chat = models.chats.create(model="policy-model", config=TOOLS)

        async def said(message: Any) -> tuple[str, list[types.FunctionCall]]:
            chunks = (
                [chunk async for chunk in await chat.send_message_stream(message)]
                if stream
                else [await chat.send_message(message)]
            )
            assert len(chunks) > 2 or not stream
            assert {chunk.model_version for chunk in chunks} == {"policy-model"}
            assert len({chunk.response_id for chunk in chunks}) == 1
            (finish,) = {c.candidates[0].finish_reason for c in chunks if c.candidates} - {None}
            assert finish is types.FinishReason.STOP
            return "".join(c.text or "" for c in chunks), [call for c in chunks for call in c.function_calls or []]

        text, calls = await said("Say something.")
        assert (text, [call.args for call in calls]) == ("I look.", [{"command": "ls é"}] * 2)
        text, calls = await said(results(calls))
        assert (text, len(calls)) == ("Héllo 🙂", 1)
        assert await said([*results(calls), types.Part(text="Go on.")]) == ("Done.", [])
        assert stays_one_branch(house)
        assert [call.dialect for call in house.notebook.calls] == ["gemini"] * 3
        assert "0.txt" in house.shown(1) and "1.txt" in house.shown(1)
        assert house.notebook.calls[0].request["generationConfig"]["temperature"] == 0.3


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sync_client_runs_a_tool_loop_on_one_branch(stream: bool, tiny_directory: Path) -> None:
    async with serving(tiny_directory, f"I look.\n{CALL}", "Done.", model=HERMES) as house:
        key = house.open()

        def talk() -> list[types.GenerateContentResponse]:
            last = []
            with client(house, key) as models:
                contents = [types.Content(role="user", parts=[types.Part(text="Say something.")])]
                for _ in range(2):
                    ask = {"model": "policy-model", "contents": list(contents), "config": TOOLS}
                    last = (
                        list(models.models.generate_content_stream(**ask))
                        if stream
                        else [models.models.generate_content(**ask)]
                    )
                    contents += [c.candidates[0].content for c in last if c.candidates and c.candidates[0].content]
                    calls = [call for chunk in last for call in chunk.function_calls or []]
                    contents.append(types.Content(role="user", parts=results(calls) or [types.Part(text="x")]))
            return last

        last = await asyncio.to_thread(talk)
        assert "".join(chunk.text or "" for chunk in last) == "Done."
        assert last[-1].usage_metadata is not None
        second = house.notebook.calls[1]
        assert last[-1].usage_metadata.prompt_token_count == len(second.prompt_ids)
        assert last[-1].usage_metadata.candidates_token_count == len(second.completion_ids)
        assert stays_one_branch(house)


@pytest.mark.parametrize("kept", [True, False])
async def test_thoughts_are_played_back_or_not_and_the_branch_holds(kept: bool, qwen3_directory: Path) -> None:
    async with (
        serving(qwen3_directory, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}", "Done.") as house,
        client(house, house.open()).aio as models,
    ):
        ask = types.Content(role="user", parts=[types.Part(text="Say something.")])
        first = await models.models.generate_content(model="m", contents=[ask], config=TOOLS)
        assert first.candidates and first.candidates[0].content and first.candidates[0].content.parts
        turn = first.candidates[0].content
        assert [part.text for part in turn.parts or [] if part.thought] == ["Hm."]
        assert [part.thought_signature is not None for part in turn.parts or []] == [False, False, True]
        turn = types.Content(role="model", parts=[part for part in turn.parts or [] if kept or not part.thought])
        answered = types.Content(role="user", parts=results(first.function_calls or []))
        second = await models.models.generate_content(model="m", contents=[ask, turn, answered], config=TOOLS)
        assert second.text == "Done."
        assert stays_one_branch(house)


async def test_googles_sdk_sits_an_update_out(tiny_directory: Path) -> None:
    """It takes a comment between events for JSON and fails; signs of life are empty lines."""
    async with (
        serving(tiny_directory, "hi", gateway={"keepalive_s": 0.02}) as house,
        client(house, house.open()).aio as models,
    ):
        await house.gateway.pause(1)

        async def talk() -> str:
            stream = await models.models.generate_content_stream(model="m", contents="Say something.")
            return "".join([chunk.text or "" async for chunk in stream])

        async def ask() -> str | None:
            return (await models.models.generate_content(model="m", contents="Say something else.")).text

        talking, asking = asyncio.create_task(talk()), asyncio.create_task(ask())
        await asyncio.sleep(0.3)
        assert not talking.done() and not asking.done()
        house.gateway.resume()
        assert (await talking, await asking) == ("hi", "hi")


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
async def test_a_stream_without_alt_comes_as_an_array(version: str, tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi", gateway={"keepalive_s": 0.02}) as house:
        house.engine.lines[0].delay_s = 0.1
        url = f"{house.gateway.url}/{version}/models/policy-model:streamGenerateContent"
        async with httpx.AsyncClient(headers={"x-goog-api-key": house.open()}, timeout=20) as http:
            reply = await http.post(url, json=ASK)
        assert reply.headers["content-type"].startswith("application/json")
        assert reply.text.startswith("[\n")
        chunks = [as_typed(chunk) for chunk in reply.json()]
        assert "".join(chunk.text or "" for chunk in chunks) == "hi"


async def test_gemini_cli_asks_with_the_key_in_the_path(tiny_directory: Path) -> None:
    """As GOOGLE_GEMINI_BASE_URL with a path: nothing else carries the rollout, and its own key means nothing here."""
    async with serving(tiny_directory, "hi", model=HERMES) as house:
        body = {
            "contents": [user("<session_context>", "Create hello.txt.")],
            "systemInstruction": {"role": "user", "parts": [{"text": "You are Gemini CLI."}]},
            "tools": [{"functionDeclarations": [{"name": "ls", "parametersJsonSchema": {"type": "object"}}]}],
            "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
            CONFIG: {"temperature": 1, "topP": 0.95, "topK": 64, "thinkingConfig": {"includeThoughts": True}},
        }
        url = f"{house.gateway.url}/k/{house.open()}/v1beta/models/policy-model:streamGenerateContent?alt=sse"
        async with httpx.AsyncClient(headers={"x-goog-api-key": "dummy"}, timeout=20) as http:
            reply = await http.post(url, json=body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        last = events(reply.text.encode())[-1]
        assert last["candidates"][0]["finishReason"] == "STOP"
        assert last["usageMetadata"]["promptTokenCount"] == len(house.notebook.calls[0].prompt_ids)


async def test_limits_stops_and_log_probabilities_are_followed(tiny_directory: Path) -> None:
    async with (
        serving(tiny_directory, "one two three", "one STOP two") as house,
        client(house, house.open()).aio as models,
    ):
        config = types.GenerateContentConfig(max_output_tokens=1, response_logprobs=True)
        short = await models.models.generate_content(model="m", contents="a", config=config)
        assert short.candidates and short.candidates[0].finish_reason is types.FinishReason.MAX_TOKENS
        assert short.candidates[0].logprobs_result and short.candidates[0].logprobs_result.chosen_candidates
        assert [one.log_probability for one in short.candidates[0].logprobs_result.chosen_candidates] == [-0.25]
        config = types.GenerateContentConfig(stop_sequences=["STOP"])
        cut = await models.models.generate_content(model="m", contents="b", config=config)
        assert cut.text == "one "
        assert cut.candidates and cut.candidates[0].finish_reason is types.FinishReason.STOP


async def test_the_sdk_counts_and_lists(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi") as house, client(house, house.open(), api_version="v1beta").aio as models:
        counted = await models.models.count_tokens(model="m", contents="Say something.")
        await models.models.generate_content(model="m", contents="Say something.")
        assert counted.total_tokens == len(house.notebook.calls[0].prompt_ids)
        (listed,) = [one async for one in await models.models.list()]
        assert listed.name is not None and listed.supported_actions == ["generateContent", "countTokens"]
        assert (await models.models.get(model="m")).name == "models/m"


async def test_the_sdk_understands_errors(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "a reply", context_length=40) as house:
        async with client(house, "wrong").aio as models:
            with pytest.raises(errors.ClientError) as unknown:
                await models.models.generate_content(model="m", contents="x")
        assert (unknown.value.code, unknown.value.status) == (401, "UNAUTHENTICATED")
        async with client(house, house.open()).aio as models:
            with pytest.raises(errors.ClientError, match="candidateCount"):
                config = types.GenerateContentConfig(candidate_count=2)
                await models.models.generate_content(model="m", contents="x", config=config)
            with pytest.raises(errors.ClientError, match=r"The input token count \(\d+\) exceeds .* allowed \(40\)"):
                await anext(await models.models.generate_content_stream(model="m", contents="x " * 100))
            house.engine.lines[0].fail_after = 2
            house.engine.lines[0].delay_s = 0.03
            with pytest.raises(errors.ServerError, match="the script says so"):
                await models.models.generate_content(model="m", contents="x")
            with pytest.raises(errors.ServerError, match="the script says so") as failed:
                async for _ in await models.models.generate_content_stream(model="m", contents="y"):
                    pass
            assert failed.value.status == "INTERNAL"
