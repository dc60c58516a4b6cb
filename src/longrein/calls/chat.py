"""OpenAI chat completions.

What shapes the reply is honoured or refused by name; what only colours the sampling (temperature, penalties, seed, …)
is the configuration's to decide and merely stays in the recorded request.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from longrein.calls.conversation import Conversation, Message, Role, Tool, ToolCall
from longrein.calls.dialect import Ask, Delta, Header, Reply
from longrein.errors import CallError, InvalidRequest

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
REFUSED = {
    "functions": "use tools instead",
    "function_call": "use tools and tool_choice instead",
    "audio": "this model writes text",
    "prediction": "leave it out",
    "web_search_options": "leave it out",
}


class ChatDialect:
    """``POST /v1/chat/completions``."""

    name = "chat"
    keepalive = b": keep-alive\n\n"

    def reply_id(self) -> str:
        return f"chatcmpl-{secrets.token_hex(14)}"

    def read(self, body: Mapping[str, Any]) -> Ask:
        for field, remedy in REFUSED.items():
            if body.get(field) is not None:
                raise refused(field, body[field], f"not supported; {remedy}")
        _refuse_other_shapes(body)
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            raise refused("model", model, "expected a name")
        tools = _tools(body.get("tools"))
        if _tool_choice(body.get("tool_choice")) == "none":
            tools = ()
        conversation = Conversation(_messages(body.get("messages")), tools)
        options = body.get("stream_options")
        if options is not None and not isinstance(options, Mapping):
            raise refused("stream_options", options, "expected an object")
        return Ask(
            conversation,
            model or "",
            stream=_flag(body, "stream"),
            max_tokens=_max_tokens(body),
            stop=_stop(body.get("stop")),
            include_usage=_flag(options or {}, "include_usage"),
            logprobs=_flag(body, "logprobs"),
        )

    def reply(self, header: Header, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.message.content or None, "refusal": None}
        if not reply.message.tool_calls:
            message["content"] = reply.message.content
        else:
            message["tool_calls"] = [_wire_call(call) for call in reply.message.tool_calls]
        if reply.message.reasoning is not None:
            message["reasoning_content"] = reply.message.reasoning
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _logprobs(reply),
            "finish_reason": reply.finish_reason,
        }
        return {**_head(header, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def begin(self, header: Header) -> bytes:
        return _chunk(header, {"role": "assistant", "content": ""})

    def delta(self, header: Header, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += _chunk(header, {"reasoning_content": delta.reasoning})
        if delta.content:
            events += _chunk(header, {"content": delta.content})
        if delta.calls:
            calls = [{"index": i, **_wire_call(call)} for i, call in enumerate(delta.calls, delta.first_call)]
            events += _chunk(header, {"tool_calls": calls})
        return events

    def end(self, header: Header, reply: Reply, *, usage: bool) -> bytes:
        events = _chunk(header, {}, reply.finish_reason, _logprobs(reply))
        if usage:
            events += _event({**_head(header, "chat.completion.chunk"), "choices": [], "usage": _usage(reply)})
        return events + b"data: [DONE]\n\n"

    def error(self, error: CallError) -> dict[str, Any]:
        kind = "invalid_request_error" if error.status in (400, 404, 405, 413, 415) else error.code
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}

    def error_event(self, error: CallError) -> bytes:
        return _event(self.error(error))


def refused(field: str, given: object, why: str) -> InvalidRequest:
    """The error for one field: what was given, and what is expected or supported."""
    text = repr(given)
    return InvalidRequest(f"{field}: {text if len(text) <= 80 else text[:77] + '...'} was given; {why}.", param=field)


def _refuse_other_shapes(body: Mapping[str, Any]) -> None:
    n = body.get("n")
    if n is not None and (isinstance(n, bool) or n != 1):
        raise refused("n", n, "one choice a call is supported: leave n out, or ask several times")
    top = body.get("top_logprobs")
    if top is not None and (isinstance(top, bool) or top != 0):
        raise refused("top_logprobs", top, "only the sampled tokens' own log-probabilities are available: leave it out")
    shape = body.get("response_format")
    if shape is not None and not (isinstance(shape, Mapping) and shape.get("type") == "text"):
        raise refused("response_format", shape, "only {'type': 'text'} is supported: ask for JSON in the prompt")
    modalities = body.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise refused("modalities", modalities, "only ['text'] is supported")


def _tool_choice(choice: object) -> str:
    if choice is None or choice == "auto":
        return "auto"
    if choice == "none":
        return "none"
    raise refused("tool_choice", choice, "the model chooses freely: only 'auto' and 'none' are supported")


def _flag(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise refused(field, value, "expected true or false")
    return bool(value)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    wishes = []
    for field in ("max_tokens", "max_completion_tokens"):
        value = body.get(field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise refused(field, value, "expected a whole number of at least 1")
        wishes.append(value)
    return min(wishes, default=None)


def _stop(stop: object) -> tuple[str, ...]:
    given = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(given, list) or len(given) > 16 or not all(isinstance(text, str) and text for text in given):
        raise refused("stop", stop, "expected a text, or a list of up to 16 texts, none of them empty")
    return tuple(given)


def _tools(tools: object) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise refused("tools", tools, "expected a list")
    return tuple(_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools))


def _tool(where: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise refused(where, tool, "only tools of type 'function' are supported")
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise refused(f"{where}.function", function, "expected an object with a name")
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        raise refused(f"{where}.function.description", description, "expected a text")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise refused(f"{where}.function.parameters", parameters, "expected a JSON schema")
    return Tool(function["name"], description, parameters)


def _messages(messages: object) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise refused("messages", messages, "expected a list of at least one message")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def _message(where: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise refused(where, message, "expected an object")
    given = message.get("role")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise refused(f"{where}.role", given, f"expected one of {', '.join(ROLES)}")
    content = _content(f"{where}.content", message.get("content"))
    calls = _calls(f"{where}.tool_calls", message.get("tool_calls"))
    if calls and role != "assistant":
        raise refused(f"{where}.tool_calls", message["tool_calls"], "only the assistant calls tools")
    return Message(
        role,
        content,
        calls,
        tool_call_id=_text(message, "tool_call_id", where),
        name=_text(message, "name", where),
        reasoning=_reasoning(where, message) if role == "assistant" else None,
    )


def _reasoning(where: str, message: Mapping[str, Any]) -> str | None:
    return _text(message, "reasoning_content", where) or _text(message, "reasoning", where)


def _text(message: Mapping[str, Any], field: str, where: str) -> str | None:
    value = message.get(field)
    if value is not None and not isinstance(value, str):
        raise refused(f"{where}.{field}", value, "expected a text")
    return value


def _content(where: str, content: object) -> str:
    """Text, or blocks of text folded into one."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise refused(where, content, "expected a text, or a list of text blocks")
    return "\n".join(_block(f"{where}[{i}]", block) for i, block in enumerate(content))


def _block(where: str, block: object) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if isinstance(block, Mapping) and kind in ("text", "refusal") and isinstance(block.get(kind), str):
        return cast(str, block[kind])
    raise refused(where, block, "only text blocks are supported: this model reads text")


def _calls(where: str, calls: object) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise refused(where, calls, "expected a list")
    return tuple(_call(f"{where}[{i}]", call) for i, call in enumerate(calls))


def _call(where: str, call: object) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise refused(where, call, "expected an object with a function")
    name, arguments = function.get("name"), function.get("arguments", "")
    if not isinstance(name, str) or not name:
        raise refused(f"{where}.function.name", name, "expected a name")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise refused(f"{where}.function.arguments", arguments, "expected JSON text")
    return ToolCall(_text(call, "id", where) or "", name, arguments)


def _head(header: Header, kind: str) -> dict[str, Any]:
    return {"id": header.reply_id, "object": kind, "created": header.created, "model": header.model}


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    if reply.tokens is None:
        return None
    content = [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in reply.tokens
    ]
    return {"content": content, "refusal": None}


def _chunk(
    header: Header, delta: Mapping[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return _event({**_head(header, "chat.completion.chunk"), "choices": [choice]})


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
