"""Anthropic messages.

A user turn may hold tool results beside text; each result becomes a turn of its own, in order. Thinking carries a
signature that clients play back and nobody checks. What shapes the reply is honoured or refused by name; sampling
wishes, thinking budgets, effort and cache marks merely stay in the recorded request.
"""

import base64
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from longrein.calls import dialect, fields, wishes
from longrein.calls.conversation import Conversation, Message, Tool, ToolCall
from longrein.calls.dialect import Ask, Delta, Header, Reply, Target
from longrein.calls.fields import refused
from longrein.errors import CallError, ContextLengthExceeded, InvalidRequest

Block = tuple[str, Mapping[str, Any]]
"""A content block, after its place in the body."""

BILLING = "x-anthropic-billing-header"
"""Begins a system block of Claude Code that differs from prompt to prompt and tells a model nothing."""

OWN_TOOL = re.compile(r"[a-z0-9_]+_\d{8}|tool_search_tool_[a-z0-9_]+|mcp_toolset")
"""Types of tools that Anthropic defines: its own servers run them, or its own models know them without a schema."""

UNPARSED = "__unparsedToolInput"
"""Key under which Claude Code plays back tool arguments that were no JSON object."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessagesDialect:
    """``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

    name = "messages"
    overflow_in_stream = False

    def reply_id(self) -> str:
        return f"msg_{secrets.token_hex(12)}"

    def read(self, body: Mapping[str, Any], target: Target) -> Ask:
        conversation, dropped = _conversation(body)
        if conversation.messages[-1].role == "assistant":
            last = f"messages[{len(body['messages']) - 1}].role"
            raise refused(last, "assistant", "a reply cannot be begun for the model: end with a user message")
        return Ask(
            conversation,
            fields.text(body, "model") or target.model,
            stream=fields.flag(body, "stream") or target.stream,
            max_tokens=fields.count(body, "max_tokens"),
            stop=fields.texts(body.get("stop_sequences"), "stop_sequences"),
            dropped=dropped,
        )

    def reply(self, header: Header, ask: Ask, reply: Reply) -> dict[str, Any]:
        message = reply.message
        content: list[dict[str, Any]] = []
        if message.reasoning:
            content.append(_thinking(message.reasoning))
        if message.content:
            content.append({"type": "text", "text": message.content})
        content += [_tool_use(call, _input(call.arguments)) for call in message.tool_calls]
        return {
            **_head(header),
            "content": content,
            **_stop(reply),
            "usage": _usage(reply.prompt_tokens, reply.completion_tokens),
        }

    def stream(self, header: Header, ask: Ask) -> "MessagesStream":
        return MessagesStream(header)

    def error(self, error: CallError) -> tuple[int, dict[str, Any]]:
        kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return error.status, {"type": "error", "error": {"type": kind, "message": _wording(error)}}

    def read_count(self, body: Mapping[str, Any], target: Target) -> Conversation:
        return _conversation(body)[0]

    def count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}


class MessagesStream:
    """One reply as typed events. Blocks follow one another; text or thinking that grows after its block has closed
    goes into a block of its own, and reads as one with the first when it is played back.
    """

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, header: Header) -> None:
        self._header = header
        self._index = 0
        self._open: str | None = None
        self._thought = ""

    def begin(self) -> bytes:
        message = {**_head(self._header), "content": [], **_stop(None), "usage": _usage(0, 0)}
        return _event("message_start", message=message)

    def alive(self) -> bytes:
        return _event("ping")

    def delta(self, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._enter("thinking", _thinking(""))
            self._thought += delta.reasoning
            events += self._grow("thinking_delta", thinking=delta.reasoning)
        if delta.content:
            events += self._enter("text", {"type": "text", "text": ""})
            events += self._grow("text_delta", text=delta.content)
        for call in delta.calls:
            events += self._enter("tool_use", _tool_use(call, {}))
            events += self._grow("input_json_delta", partial_json=_dumped(_input(call.arguments))) + self._leave()
        return events

    def end(self, reply: Reply) -> bytes:
        usage = _usage(reply.prompt_tokens, reply.completion_tokens)
        return self._leave() + _event("message_delta", delta=_stop(reply), usage=usage) + _event("message_stop")

    def error(self, error: CallError) -> bytes:
        _, body = MessagesDialect().error(error)
        return _event("error", error=body["error"])

    def _enter(self, kind: str, block: Mapping[str, Any]) -> bytes:
        """The block of this kind that is open, or a new one."""
        if self._open == kind:
            return b""
        events = self._leave()
        self._open = kind
        return events + _event("content_block_start", index=self._index, content_block=block)

    def _grow(self, kind: str, **gained: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **gained})

    def _leave(self) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open == "thinking":
            events += self._grow("signature_delta", signature=_signature(self._thought))
            self._thought = ""
        events += _event("content_block_stop", index=self._index)
        self._index, self._open = self._index + 1, None
        return events


# ---- reading


def _conversation(body: Mapping[str, Any]) -> tuple[Conversation, tuple[str, ...]]:
    """The conversation, and in words what was left out of it."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise refused("messages", given, "expected a list of at least one message")
    loaded: set[str] = set()
    messages = [turn for i, message in enumerate(given) for turn in _turns(f"messages[{i}]", message, loaded)]
    if system := _system(body.get("system")):
        messages.insert(0, Message("system", system))
    tools, dropped = _tools(fields.listed(body, "tools"), loaded)
    if fields.listed(body, "mcp_servers"):
        dropped.append("mcp_servers: only Anthropic's own service connects to them")
    choice = fields.mapping(body, "tool_choice").get("type", "auto")
    if choice in ("any", "tool"):
        dropped.append(wishes.choice_note("tool_choice"))
    elif choice not in ("auto", "none"):
        raise refused("tool_choice.type", choice, "expected auto, any, tool or none")
    conversation = Conversation(tuple(messages), () if choice == "none" else tools)
    forms = {"output_config.format": fields.mapping(body, "output_config").get("format")}
    forms["output_format"] = body.get("output_format")
    for where, form in forms.items():
        if form is not None:
            conversation = wishes.told(conversation, wishes.json_schema(form, where))
            dropped.append(wishes.form_note(where))
    return conversation, tuple(dropped)


def _tools(given: Sequence[Any], loaded: set[str]) -> tuple[tuple[Tool, ...], list[str]]:
    """The tools to offer, and in words those that were dropped.

    A deferred tool is offered once a tool result refers to it, or at once where only Anthropic's own service could
    search for it.
    """
    found: list[tuple[Tool, bool]] = []
    dropped: list[str] = []
    searchable = True
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping):
            raise refused(where, tool, "expected an object")
        kind = fields.text(tool, "type", where) or "custom"
        if kind == "custom":
            offered = _tool(where, tool)
            found.append((offered, fields.flag(tool, "defer_loading", where) and offered.name not in loaded))
        elif OWN_TOOL.fullmatch(kind):
            dropped.append(f"{where}: only Anthropic's own models know the tool {kind}")
            searchable = searchable and not kind.startswith("tool_search_tool")
        else:
            raise refused(f"{where}.type", kind, "only tools with an input_schema are supported: leave the type out")
    return tuple(offered for offered, deferred in found if not (deferred and searchable)), dropped


def _tool(where: str, tool: Mapping[str, Any]) -> Tool:
    name = fields.required_text(tool, "name", where)
    schema = None if tool.get("input_schema") is None else fields.mapping(tool, "input_schema", where)
    return Tool(name, fields.text(tool, "description", where), schema)


def _system(given: object) -> str:
    blocks = list(_blocks("system", given))
    if isinstance(given, list) and blocks and str(blocks[0][1].get("text")).startswith(BILLING):
        del blocks[0]
    return _words(blocks)


def _turns(where: str, message: object, loaded: set[str]) -> Iterator[Message]:
    """The turns that one message holds; names of tools that its results refer to are added to ``loaded``."""
    if not isinstance(message, Mapping):
        raise refused(where, message, "expected an object")
    role = message.get("role")
    blocks = list(_blocks(f"{where}.content", message.get("content")))
    if role == "user":
        yield from _user(blocks, loaded)
    elif role == "assistant":
        yield _assistant(blocks)
    elif role == "system":
        yield Message("system", _words(blocks))
    else:
        raise refused(f"{where}.role", role, "expected one of user, assistant, system")


def _user(blocks: Sequence[Block], loaded: set[str]) -> Iterator[Message]:
    words: list[Block] = []
    answered = False
    for where, block in blocks:
        if block["type"] != "tool_result":
            words.append((where, block))
            continue
        if words:
            yield Message("user", _words(words))
        words, answered = [], True
        yield _tool_result(where, block, loaded)
    if words or not answered:
        yield Message("user", _words(words))


def _tool_result(where: str, block: Mapping[str, Any], loaded: set[str]) -> Message:
    parts = []
    for place, part in _blocks(f"{where}.content", block.get("content")):
        if part["type"] == "tool_reference":
            name = fields.required_text(part, "tool_name", place)
            loaded.add(name)
            parts.append(f"The tool {name} can be called now.")
        else:
            parts.append(_word(place, part))
    content = fields.folded([part for part in parts if part])
    if fields.flag(block, "is_error", where) and not content.lower().startswith(("error", "<tool_use_error>")):
        content = f"Error: {content}"
    return Message("tool", content, tool_call_id=fields.text(block, "tool_use_id", where) or "")


def _assistant(blocks: Sequence[Block]) -> Message:
    """Text on both sides of anything else is one text that a stream had to interrupt: nothing goes between."""
    runs: list[list[Block]] = [[]]
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for where, block in blocks:
        if block["type"] == "tool_use":
            calls.append(_call(where, block))
        elif block["type"] == "thinking":
            thoughts.append(fields.text(block, "thinking", where) or "")
        elif block["type"] != "redacted_thinking":
            runs[-1].append((where, block))
            continue
        runs.append([])
    return Message("assistant", "".join(map(_words, runs)), tuple(calls), reasoning="".join(thoughts) or None)


def _call(where: str, block: Mapping[str, Any]) -> ToolCall:
    name = fields.required_text(block, "name", where)
    given = fields.mapping(block, "input", where)
    unparsed = given.get(UNPARSED)
    raw = unparsed.get("raw") if isinstance(unparsed, Mapping) else None
    try:
        arguments = raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{where}.input: it is nested too deeply.", param=f"{where}.input") from None
    return ToolCall(fields.text(block, "id", where) or "", name, arguments)


def _blocks(where: str, content: object) -> Iterator[Block]:
    """Content as blocks, each with its place; a text is one block."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if content is not None and not isinstance(content, list):
        raise refused(where, content, "expected a text, or a list of content blocks")
    for i, block in enumerate(content or ()):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise refused(f"{where}[{i}]", block, "expected a content block with a type")
        yield f"{where}[{i}]", block


def _words(blocks: Sequence[Block]) -> str:
    return fields.folded([word for where, block in blocks if (word := _word(where, block))])


def _word(where: str, block: Mapping[str, Any]) -> str:
    if block["type"] != "text":
        raise refused(f"{where}.type", block["type"], "not supported here: this model reads text, so send text blocks")
    text = fields.text(block, "text", where)
    if text is None:
        raise refused(f"{where}.text", None, "expected a text")
    return text


# ---- writing


def _head(header: Header) -> dict[str, Any]:
    return {"id": header.reply_id, "type": "message", "role": "assistant", "model": header.model}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": _signature(text) if text else ""}


def _signature(text: str) -> str:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=48).digest()
    return base64.b64encode(digest).decode()


def _tool_use(call: ToolCall, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": given}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as the object that the wire wants; text that is none travels inside one, and is read back from it."""
    try:
        given = json.loads(arguments) if arguments.strip() else {}
        _dumped(given).encode()
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, dict) and UNPARSED not in given:
        return given
    return {UNPARSED: {"raw": arguments, "len": len(arguments)}}


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _stop(reply: Reply | None) -> dict[str, Any]:
    if reply is None:
        return {"stop_reason": None, "stop_sequence": None}
    if reply.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": STOP_REASONS[reply.finish_reason], "stop_sequence": None}


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion,
    }


def _wording(error: CallError) -> str:
    """What went wrong; clients know a prompt that is too long by Anthropic's words."""
    if isinstance(error, ContextLengthExceeded):
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return error.message


def _event(name: str, **data: object) -> bytes:
    return dialect.event(fields.as_json({"type": name, **data}), name)
