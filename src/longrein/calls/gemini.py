"""Google Gemini: ``generateContent``, ``streamGenerateContent``, ``countTokens``.

Field names are read as the API reads them, in camelCase and in snake_case, and one object stands for a list of one.

A client that streams plays back each piece it was sent: as a part, or as a content of its own. So pieces of a model's
turn are joined with nothing between them, and contents of the model that follow one another are one turn. Texts of a
user's content and of the system instruction are folded like blocks of text elsewhere.

A function's response is told to the model as its text where it has one key of ``OUTPUT_KEYS`` alone with a text, else
as compact JSON: ``{"error": …}`` stays recognisable as an error.
"""

import json
import re
import secrets
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from longrein.calls import wishes
from longrein.calls.conversation import Conversation, Message, Tool, ToolCall, parsed_arguments
from longrein.calls.dialect import Ask, Delta, Header, Reply, Stream, Target, event
from longrein.calls.fields import count, flag, folded, listed, mapping, refused, required_text, text, texts
from longrein.errors import CallError, ContextLengthExceeded, InvalidRequest

UNPARSED = "__unparsedToolInput"
"""Arguments are an object on the wire: those that are none travel as text under this key."""

OUTPUT_KEYS = ("output", "result", "return_value", "content")
"""Where clients put a function's output: Gemini CLI and pi, google-adk and google-genai, pydantic-ai, litellm."""

PARTS = ("text", "functionCall", "functionResponse", "thought", "thoughtSignature")
OTHER_PARTS = {
    "inlineData": "this model reads text",
    "fileData": "this model reads text",
    "executableCode": "code is run by functions alone: send a functionCall",
    "codeExecutionResult": "code is run by functions alone: send a functionResponse",
    "toolCall": "only functions are supported: send a functionCall",
    "toolResponse": "only functions are supported: send a functionResponse",
}
STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class GeminiDialect:
    """``POST /v1beta/models/NAME:generateContent`` and ``:streamGenerateContent``; ``:countTokens`` counts.

    A stream is made of server-sent events with ``alt=sse``, else it is one JSON array, written element by element.

    ``MALFORMED_FUNCTION_CALL`` is never a finish reason here: a call that cannot be read is text as the model wrote it,
    and clients that are told of it drop the turn and sample again.
    """

    name = "gemini"
    overflow_in_stream = False

    def reply_id(self) -> str:
        return secrets.token_urlsafe(17)

    def read(self, body: Mapping[str, Any], target: Target) -> Ask:
        with _not_too_deep():
            return self._read(_camel(body), target)

    def _read(self, body: Mapping[str, Any], target: Target) -> Ask:
        if body.get("cachedContent"):
            raise refused("cachedContent", body["cachedContent"], "not supported: send the contents themselves")
        config = _camel(mapping(body, "generationConfig"))
        _refuse_other_shapes(config)
        conversation, dropped = _conversation(body)
        if form := _form(config):
            conversation = wishes.told(conversation, form)
            dropped += (wishes.form_note("generationConfig.responseMimeType"),)
        return Ask(
            conversation,
            (target.model or text(body, "model") or "").removeprefix("models/"),
            stream=target.stream,
            max_tokens=count(config, "maxOutputTokens", "generationConfig"),
            stop=texts(config.get("stopSequences"), "generationConfig.stopSequences"),
            include_usage=True,
            logprobs=flag(config, "responseLogprobs", "generationConfig"),
            dropped=dropped,
            notes={"sse": target.query.get("alt") == "sse"},
        )

    def reply(self, header: Header, ask: Ask, reply: Reply) -> dict[str, Any]:
        message = reply.message
        parts = _parts(message.reasoning or "", message.content, message.tool_calls)
        if not message.content and not message.tool_calls:
            parts.append({"text": ""})
        if message.reasoning:
            signed = next((part for part in parts if "functionCall" in part), parts[-1])
            signed["thoughtSignature"] = _signature(header)
        return _response(header, parts, reply)

    def stream(self, header: Header, ask: Ask) -> Stream:
        return _Events(header) if ask.notes.get("sse") else _Array(header)

    def error(self, error: CallError) -> tuple[int, dict[str, Any]]:
        return error.status, _error(error)

    def read_count(self, body: Mapping[str, Any], target: Target) -> Conversation:
        with _not_too_deep():
            body = _camel(body)
            return _conversation(_camel(mapping(body, "generateContentRequest")) or body)[0]

    def count(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}

    def models(self, names: Sequence[str]) -> dict[str, Any]:
        """What ``GET /v1beta/models`` answers."""
        return {"models": [self.model(name) for name in names]}

    def model(self, name: str) -> dict[str, Any]:
        """What ``GET /v1beta/models/NAME`` answers."""
        name = name.removeprefix("models/")
        methods = ["generateContent", "countTokens"]
        return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}


class _Events:
    """A reply as server-sent events."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, header: Header) -> None:
        self._header = header
        self._unsigned = False

    def begin(self) -> bytes:
        return b""

    def alive(self) -> bytes:
        # Google's Python SDK takes a comment for JSON and fails; an empty line is skipped by all.
        return b"\n\n"

    def delta(self, delta: Delta) -> bytes:
        parts = _parts(delta.reasoning, delta.content, delta.calls)
        self._unsigned = self._unsigned or bool(delta.reasoning)
        if delta.calls and self._unsigned:
            call = next(part for part in parts if "functionCall" in part)
            call["thoughtSignature"] = _signature(self._header)
            self._unsigned = False
        return self._written(_response(self._header, parts)) if parts else b""

    def end(self, reply: Reply) -> bytes:
        # A last event without a part makes Google's Python SDK forget the whole turn.
        part = {"text": ""}
        if self._unsigned:
            part["thoughtSignature"] = _signature(self._header)
        return self._written(_response(self._header, [part], reply))

    def error(self, error: CallError) -> bytes:
        return self._written(_error(error))

    def _written(self, value: dict[str, Any]) -> bytes:
        # Plain ASCII: some clients end a line at U+2028 inside a text.
        return event(json.dumps(value).encode())


class _Array(_Events):
    """A reply as one JSON array."""

    content_type = "application/json; charset=utf-8"

    def __init__(self, header: Header) -> None:
        super().__init__(header)
        self._separator = b""

    def begin(self) -> bytes:
        return b"["

    def alive(self) -> bytes:
        return b"\n"

    def end(self, reply: Reply) -> bytes:
        return super().end(reply) + b"]\n"

    def error(self, error: CallError) -> bytes:
        return super().error(error) + b"]\n"

    def _written(self, value: dict[str, Any]) -> bytes:
        before, self._separator = self._separator, b",\r\n"
        return before + json.dumps(value).encode()


# ---- reading


@contextmanager
def _not_too_deep() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise InvalidRequest("The request is nested too deeply: make what a function takes or gives flatter.") from None


def _camel(body: Mapping[str, Any]) -> dict[str, Any]:
    """Its fields under their camelCase names; a field given in both ways is taken in this one."""
    renamed = {re.sub(r"(?<=[a-z0-9])_([a-z0-9])", lambda found: found[1].upper(), key): key for key in body}
    return {name: body[name] if name in body else body[key] for name, key in renamed.items()}


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise refused(where, value, "expected an object")
    return _camel(value)


def _several(body: Mapping[str, Any], name: str, where: str = "") -> list[Any]:
    value = body.get(name)
    return [value] if isinstance(value, Mapping) else listed(body, name, where)


def _refuse_other_shapes(config: Mapping[str, Any]) -> None:
    n = config.get("candidateCount")
    if n is not None and (isinstance(n, bool) or n != 1):
        why = "one candidate a call is supported: leave it out, or ask several times"
        raise refused("generationConfig.candidateCount", n, why)
    top = config.get("logprobs")
    if top is not None and (isinstance(top, bool) or top != 0):
        why = "only the sampled tokens' own log-probabilities are available: leave it out"
        raise refused("generationConfig.logprobs", top, why)
    for given in listed(config, "responseModalities", "generationConfig"):
        if not isinstance(given, str) or given.upper() != "TEXT":
            raise refused("generationConfig.responseModalities", given, "only TEXT is supported")


def _form(config: Mapping[str, Any]) -> str | None:
    """What the model is told of the reply's form, if it is not plain text."""
    where = "generationConfig"
    if config.get("responseFormat") is not None:
        raise refused(f"{where}.responseFormat", config["responseFormat"], "send responseMimeType and a schema")
    kind = text(config, "responseMimeType", where) or "text/plain"
    if kind not in ("text/plain", "application/json"):
        raise refused(f"{where}.responseMimeType", kind, "expected text/plain or application/json")
    schema = mapping(config, "responseJsonSchema", where)
    if not schema and (given := mapping(config, "responseSchema", where)):
        schema = _json_schema(given)
    if schema and kind != "application/json":
        raise refused(f"{where}.responseMimeType", kind, "a schema goes with application/json")
    return wishes.in_json(schema) if kind == "application/json" else None


def _conversation(body: Mapping[str, Any]) -> tuple[Conversation, tuple[str, ...]]:
    """What the model is to continue, and what was left out of it."""
    tools, dropped = _tools(_several(body, "tools"))
    tools, unforced = _chosen(tools, _camel(mapping(body, "toolConfig")))
    return Conversation((*_system(body.get("systemInstruction")), *_messages(body)), tools), dropped + unforced


def _chosen(tools: tuple[Tool, ...], config: Mapping[str, Any]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The tools to offer, and in words what is not enforced about them."""
    where = "toolConfig.functionCallingConfig"
    config = _camel(mapping(config, "functionCallingConfig", "toolConfig"))
    mode = (text(config, "mode", where) or "AUTO").upper()
    if mode == "NONE":
        return (), ()
    if mode not in ("AUTO", "VALIDATED", "MODE_UNSPECIFIED", "ANY"):
        raise refused(f"{where}.mode", mode, "expected AUTO, VALIDATED, ANY or NONE")
    if allowed := listed(config, "allowedFunctionNames", where):
        tools = tuple(tool for tool in tools if tool.name in allowed)
    return tools, (wishes.choice_note(f"{where}.mode"),) if mode == "ANY" else ()


def _tools(given: Sequence[Any]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    tools: list[Tool] = []
    dropped: list[str] = []
    for i, one in enumerate(given):
        where = f"tools[{i}]"
        kinds = _object(one, where)
        declarations = _several(kinds, "functionDeclarations", where)
        tools += [_tool(d, f"{where}.functionDeclarations[{j}]") for j, d in enumerate(declarations)]
        built_in = [name for name, value in kinds.items() if value is not None and name != "functionDeclarations"]
        dropped += [f"{where}.{name}: this tool runs at Google, the model is not told of it" for name in built_in]
    return tuple(tools), tuple(dropped)


def _tool(declaration: object, where: str) -> Tool:
    fields = _object(declaration, where)
    given = [name for name in ("parametersJsonSchema", "parameters") if fields.get(name) is not None]
    schema = mapping(fields, given[0], where) if given else None
    if schema is not None and given[0] == "parameters":
        schema = _json_schema(schema)
    return Tool(required_text(fields, "name", where), text(fields, "description", where), schema)


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Gemini's form of a schema as JSON schema: types in lower case, numbers as numbers, null as a type.

    ``propertyOrdering`` goes: it says nothing of what is valid.
    """
    said: dict[str, Any] = {}
    for name, value in _camel(schema).items():
        if name == "type" and isinstance(value, str):
            if value != "TYPE_UNSPECIFIED":
                said["type"] = value.lower()
        elif name in ("properties", "defs", "$defs") and isinstance(value, Mapping):
            said["$defs" if name == "defs" else name] = {key: _inner(inner) for key, inner in value.items()}
        elif name in ("anyOf", "prefixItems") and isinstance(value, list):
            said[name] = [_inner(inner) for inner in value]
        elif name in ("items", "additionalProperties"):
            said[name] = _inner(value)
        elif re.fullmatch("(min|max)(Items|Length|Properties)", name):
            said[name] = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value) else value
        elif name == "ref":
            said["$ref"] = value
        elif name not in ("nullable", "propertyOrdering"):
            said[name] = value
    if schema.get("nullable") is True and isinstance(said.get("type"), str):
        said["type"] = [said["type"], "null"]
    elif schema.get("nullable") is True and isinstance(said.get("anyOf"), list):
        said["anyOf"] = [*said["anyOf"], {"type": "null"}]
    return said


def _inner(schema: Any) -> Any:
    return _json_schema(schema) if isinstance(schema, Mapping) else schema


def _system(given: object) -> tuple[Message, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        return (Message("system", given),)
    where = "systemInstruction"
    parts = _parts_of(_object(given, where), where)
    for i, part in enumerate(parts):
        for name in ("functionCall", "functionResponse"):
            if part.get(name) is not None:
                raise refused(f"{where}.parts[{i}].{name}", part[name], "the system instruction is text")
    said = [part["text"] for part in parts if part.get("text") is not None]
    return (Message("system", folded(said)),) if said else ()


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    contents = _several(body, "contents")
    if not contents:
        raise refused("contents", body.get("contents"), "expected a list of at least one content")
    messages: list[Message] = []
    links = _Links()
    for i, one in enumerate(contents):
        where = f"contents[{i}]"
        content = _object(one, where)
        role = text(content, "role", where) or "user"
        parts = _parts_of(content, where)
        if role in ("user", "function", "tool"):
            messages += _user_turns(parts, where, links)
        elif role != "model":
            raise refused(f"{where}.role", role, "expected user or model; a system text goes into systemInstruction")
        elif messages and messages[-1].role == "assistant":
            messages[-1] = _joined(messages[-1], _model_turn(parts, where, links))
        else:
            links.open.clear()
            messages.append(_model_turn(parts, where, links))
    return tuple(messages)


def _parts_of(content: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    return [_part(part, f"{where}.parts[{i}]") for i, part in enumerate(_several(content, "parts", where))]


def _part(given: object, where: str) -> dict[str, Any]:
    part = _object(given, where)
    for name, why in OTHER_PARTS.items():
        if part.get(name) is not None:
            raise refused(f"{where}.{name}", part[name], why)
    text(part, "text", where)
    flag(part, "thought", where)
    if not any(part.get(name) is not None for name in PARTS):
        raise refused(where, given, "expected a part with text, functionCall or functionResponse")
    return part


@dataclass
class _Links:
    """Which call a function's response answers: the one with its id, else the first of its name, else the first."""

    ids: set[str] = field(default_factory=set)
    open: list[ToolCall] = field(default_factory=list)

    def call(self, call_id: str | None, name: str, arguments: str) -> ToolCall:
        """A call of the model's latest turn, with an id made up where it has none."""
        call = ToolCall(call_id or f"call_{len(self.ids)}", name, arguments)
        self.ids.add(call.call_id)
        self.open.append(call)
        return call

    def answered(self, call_id: str | None, name: str | None) -> str | None:
        """The id of the call that a response answers; the id it has, where none is open."""
        if call_id in self.ids:
            self.open = [call for call in self.open if call.call_id != call_id]
            return call_id
        if not self.open:
            return call_id
        first = next((i for i, call in enumerate(self.open) if call.name == name), 0)
        return self.open.pop(first).call_id


def _model_turn(parts: Sequence[Mapping[str, Any]], where: str, links: _Links) -> Message:
    thoughts, said, calls = "", "", []
    for i, part in enumerate(parts):
        at = f"{where}.parts[{i}]"
        if part.get("functionResponse") is not None:
            raise refused(f"{at}.functionResponse", part["functionResponse"], "functions answer with role user")
        if part.get("thought"):
            thoughts += part.get("text") or ""
        else:
            said += part.get("text") or ""
        if part.get("functionCall") is not None:
            at = f"{at}.functionCall"
            call = _object(part["functionCall"], at)
            arguments = _arguments(mapping(call, "args", at))
            calls.append(links.call(text(call, "id", at), required_text(call, "name", at), arguments))
    return Message("assistant", said, tuple(calls), reasoning=thoughts or None)


def _joined(one: Message, other: Message) -> Message:
    """Two pieces of one turn of the model."""
    reasoning = (one.reasoning or "") + (other.reasoning or "") or None
    calls = (*one.tool_calls, *other.tool_calls)
    return replace(one, content=one.content + other.content, tool_calls=calls, reasoning=reasoning)


def _user_turns(parts: Sequence[Mapping[str, Any]], where: str, links: _Links) -> list[Message]:
    """One message for each function's response and each run of texts, in the order given."""
    messages: list[Message] = []
    said: list[str] = []
    for i, part in enumerate(parts):
        at = f"{where}.parts[{i}]"
        if part.get("functionCall") is not None:
            raise refused(f"{at}.functionCall", part["functionCall"], "only role model calls functions")
        if part.get("text") is not None:
            said.append(part["text"])
        if part.get("functionResponse") is not None:
            if said:
                messages.append(Message("user", folded(said)))
                said = []
            messages.append(_tool_turn(part["functionResponse"], f"{at}.functionResponse", links))
    if said or not messages:
        messages.append(Message("user", folded(said)))
    return messages


def _tool_turn(given: object, where: str, links: _Links) -> Message:
    response = _object(given, where)
    if _several(response, "parts", where):
        raise refused(f"{where}.parts", response["parts"], "this model reads text: put it into response")
    name = text(response, "name", where)
    call_id = links.answered(text(response, "id", where) or None, name)
    output = mapping(response, "response", where)
    return Message("tool", _output(output), tool_call_id=call_id, name=name)


def _output(response: Mapping[str, Any]) -> str:
    if len(response) == 1:
        ((key, value),) = response.items()
        if key in OUTPUT_KEYS and isinstance(value, str):
            return value
    return json.dumps(response, ensure_ascii=False, separators=(",", ":"))


def _arguments(args: Mapping[str, Any]) -> str:
    raw = args.get(UNPARSED)
    if len(args) == 1 and isinstance(raw, str):
        return raw
    return json.dumps(args, ensure_ascii=False)


# ---- writing


def _args(arguments: str) -> dict[str, Any]:
    """Arguments as an object; those that are none, or no JSON that every client reads, as text under ``UNPARSED``."""
    parsed = parsed_arguments(arguments)
    if not isinstance(parsed, dict) or list(parsed) == [UNPARSED]:
        return {UNPARSED: arguments}
    try:
        json.dumps(parsed, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return {UNPARSED: arguments}
    return parsed


def _parts(reasoning: str, content: str, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if reasoning:
        parts.append({"text": reasoning, "thought": True})
    if content:
        parts.append({"text": content})
    for call in calls:
        parts.append({"functionCall": {"id": call.call_id, "name": call.name, "args": _args(call.arguments)}})
    return parts


def _signature(header: Header) -> str:
    """Stands where Gemini's encrypted thoughts do, for clients that expect it; it says nothing when it comes back."""
    return b64encode(blake2b(header.reply_id.encode(), digest_size=24).digest()).decode()


def _response(header: Header, parts: list[dict[str, Any]], reply: Reply | None = None) -> dict[str, Any]:
    """One ``GenerateContentResponse``; the last of a reply, if that is given."""
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    response: dict[str, Any] = {"candidates": [candidate]}
    if reply is not None:
        candidate["finishReason"] = "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"
        candidate |= _logprobs(reply)
        response["usageMetadata"] = {
            "promptTokenCount": reply.prompt_tokens,
            "candidatesTokenCount": reply.completion_tokens,
            "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
        }
    created = datetime.fromtimestamp(header.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return response | {"modelVersion": header.model, "responseId": header.reply_id, "createTime": created}


def _logprobs(reply: Reply) -> dict[str, Any]:
    if not reply.tokens:
        return {}
    total = sum(logprob for _, logprob in reply.tokens)
    chosen = [{"token": token, "logProbability": logprob} for token, logprob in reply.tokens]
    return {"avgLogprobs": total / len(chosen), "logprobsResult": {"chosenCandidates": chosen}}


def _error(error: CallError) -> dict[str, Any]:
    status = STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        message = (
            f"The input token count ({error.tokens}) exceeds the maximum number of tokens allowed ({error.limit})."
        )
    details: list[dict[str, Any]] = []
    if error.param is not None and isinstance(error, InvalidRequest):
        violation = {"field": error.param, "description": message}
        details.append({"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]})
    if error.retry_after_s is not None:
        delay = f"{error.retry_after_s:.3f}".rstrip("0").rstrip(".")
        details.append({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{delay}s"})
    return {"error": {"code": error.status, "message": message, "status": status, "details": details}}
