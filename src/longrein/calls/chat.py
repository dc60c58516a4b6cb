"""OpenAI chat completions.

What shapes the reply is honoured or refused by name; what only colours the sampling (temperature, penalties, seed, …)
is the configuration's to decide and merely stays in the recorded request.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from longrein.calls import wishes
from longrein.calls.conversation import Conversation, Message, Role, Tool, ToolCall
from longrein.calls.dialect import Ask, Delta, Header, Reply, Target, event
from longrein.calls.fields import as_json, count, flag, folded, listed, mapping, refused, required_text, text, texts
from longrein.errors import CallError

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
    overflow_in_stream = False

    def reply_id(self) -> str:
        return f"chatcmpl-{secrets.token_hex(14)}"

    def read(self, body: Mapping[str, Any], target: Target) -> Ask:
        for field, remedy in REFUSED.items():
            if body.get(field) is not None:
                raise refused(field, body[field], f"not supported; {remedy}")
        _refuse_other_shapes(body)
        choice, dropped = tool_choice(body)
        conversation = Conversation(_messages(body.get("messages")), () if choice == "none" else _tools(body))
        form = body.get("response_format")
        if form is not None and form != {"type": "text"}:
            conversation = wishes.told(conversation, wishes.json_schema(form, "response_format"))
            dropped += (wishes.form_note("response_format"),)
        limits = [limit for field in ("max_tokens", "max_completion_tokens") if (limit := count(body, field))]
        return Ask(
            conversation,
            text(body, "model") or "",
            stream=flag(body, "stream"),
            max_tokens=min(limits, default=None),
            stop=texts(body.get("stop"), "stop"),
            include_usage=flag(mapping(body, "stream_options"), "include_usage", "stream_options"),
            logprobs=flag(body, "logprobs"),
            token_ids=flag(body, "return_token_ids"),
            dropped=dropped,
        )

    def reply(self, header: Header, ask: Ask, reply: Reply) -> dict[str, Any]:
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
        return _with_ids({**head(header, "chat.completion"), "choices": [choice], "usage": usage(reply)}, ask, reply)

    def stream(self, header: Header, ask: Ask) -> "ChatStream":
        return ChatStream(header, ask)

    def error(self, error: CallError) -> tuple[int, dict[str, Any]]:
        return error.status, error_body(error)


class ChatStream:
    """Chunks of one reply."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, header: Header, ask: Ask) -> None:
        self._header = header
        self._ask = ask

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def alive(self) -> bytes:
        return b": keep-alive\n\n"

    def delta(self, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._chunk({"reasoning_content": delta.reasoning})
        if delta.content:
            events += self._chunk({"content": delta.content})
        if delta.calls:
            calls = [{"index": i, **_wire_call(call)} for i, call in enumerate(delta.calls, delta.first_call)]
            events += self._chunk({"tool_calls": calls})
        return events

    def end(self, reply: Reply) -> bytes:
        choice = {"index": 0, "delta": {}, "logprobs": _logprobs(reply), "finish_reason": reply.finish_reason}
        begun = head(self._header, "chat.completion.chunk")
        events = event(as_json(_with_ids({**begun, "choices": [choice]}, self._ask, reply)))
        if self._ask.include_usage:
            events += event(as_json({**begun, "choices": [], "usage": usage(reply)}))
        return events + event(b"[DONE]")

    def error(self, error: CallError) -> bytes:
        return event(as_json(error_body(error)))

    def _chunk(self, delta: Mapping[str, Any]) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return event(as_json({**head(self._header, "chat.completion.chunk"), "choices": [choice]}))


def error_body(error: CallError) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    kind = "invalid_request_error" if error.status in (400, 404, 405, 413, 415, 426) else error.code
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _refuse_other_shapes(body: Mapping[str, Any]) -> None:
    n = body.get("n")
    if n is not None and (isinstance(n, bool) or n != 1):
        raise refused("n", n, "one choice a call is supported: leave n out, or ask several times")
    top = body.get("top_logprobs")
    if top is not None and (isinstance(top, bool) or top != 0):
        raise refused("top_logprobs", top, "only the sampled tokens' own log-probabilities are available: leave it out")
    modalities = body.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise refused("modalities", modalities, "only ['text'] is supported")


def tool_choice(body: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """``auto``, ``none`` or what is not enforced, and in words that it is not; the same in both of OpenAI's dialects.

    Raises:
        InvalidRequest: a choice nobody has heard of.
    """
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return choice or "auto", ()
    if choice == "required" or (isinstance(choice, Mapping) and choice.get("type") in ("function", "custom")):
        return "required", (wishes.choice_note("tool_choice"),)
    raise refused("tool_choice", choice, "expected 'auto', 'none', 'required' or a function")


def _tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    return tuple(_tool(f"tools[{i}]", tool) for i, tool in enumerate(listed(body, "tools")))


def _tool(where: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise refused(where, tool, "only tools of type 'function' are supported")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise refused(f"{where}.function", function, "expected an object with a name")
    inside = f"{where}.function"
    parameters = None if function.get("parameters") is None else mapping(function, "parameters", inside)
    return Tool(required_text(function, "name", inside), text(function, "description", inside), parameters)


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
        tool_call_id=text(message, "tool_call_id", where),
        name=text(message, "name", where),
        reasoning=_reasoning(where, message) if role == "assistant" else None,
    )


def _reasoning(where: str, message: Mapping[str, Any]) -> str | None:
    return text(message, "reasoning_content", where) or text(message, "reasoning", where)


def _content(where: str, content: object) -> str:
    """Text, or blocks of text folded into one."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise refused(where, content, "expected a text, or a list of text blocks")
    return folded([_block(f"{where}[{i}]", block) for i, block in enumerate(content)])


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
    name, arguments = required_text(function, "name", f"{where}.function"), function.get("arguments", "")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise refused(f"{where}.function.arguments", arguments, "expected JSON text")
    return ToolCall(text(call, "id", where) or "", name, arguments)


def head(header: Header, kind: str) -> dict[str, Any]:
    """What every object of OpenAI's completions begins with."""
    return {"id": header.reply_id, "object": kind, "created": header.created, "model": header.model}


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(reply: Reply) -> dict[str, int]:
    """Tokens of a reply, in OpenAI's words."""
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


def _with_ids(told: dict[str, Any], ask: Ask, reply: Reply) -> dict[str, Any]:
    """With the token ids where they were asked for, placed as vLLM places them."""
    if ask.token_ids:
        told["prompt_token_ids"] = list(reply.prompt_ids or ())
        told["choices"][0]["token_ids"] = list(reply.completion_ids or ())
    return told
