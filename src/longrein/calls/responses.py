"""OpenAI responses.

One assistant turn is several items here: thinking, a message, calls. They are read back into the one turn they were
sampled as. Thinking is sent as plain text and once more where OpenAI would put it encrypted, which is the one field
that every client plays back untouched.
"""

import json
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longrein.calls import wishes
from longrein.calls.chat import error_body, tool_choice
from longrein.calls.conversation import Conversation, Message, Role, Tool, ToolCall, parsed_arguments
from longrein.calls.dialect import Ask, Delta, Header, Reply, Target, event
from longrein.calls.fields import as_json, count, flag, folded, listed, mapping, name_of, refused, required_text, text
from longrein.errors import CallError

ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
REFUSED = {
    "conversation": "conversations are not kept here: send the turns, or previous_response_id",
    "prompt": "prompt templates are not kept here: send their text",
}

CARRIED = "longrein.plain."
"""What our ``encrypted_content`` begins with; the text follows in base64. It is not encrypted and does not say so."""

OUR_ITEM = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{28})_\d+")
"""Ids of items that this gateway sent: they hold the id of their reply."""

TEXT = {"type": "text"}
"""The form of a reply that is asked for no other."""

# What a custom tool's function takes: one text.
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True, slots=True)
class WireTool:
    """How the harness knows a tool that the model knows by another name or in another form."""

    name: str
    namespace: str | None = None
    custom: bool = False


class ResponsesDialect:
    """``POST /v1/responses`` and ``POST /v1/responses/input_tokens``."""

    name = "responses"
    overflow_in_stream = True

    def reply_id(self) -> str:
        return f"resp_{secrets.token_hex(14)}"

    def read(self, body: Mapping[str, Any], target: Target) -> Ask:
        _refuse_other_shapes(body)
        previous = text(body, "previous_response_id") or None
        tools, wire_tools, dropped = _tools(body)
        choice, unforced = tool_choice(body)
        instructions = [given] if (given := text(body, "instructions")) else []
        form = mapping(body, "text").get("format") or TEXT
        if form != TEXT:
            instructions.append(wishes.json_schema(form, "text.format"))
            dropped += (wishes.form_note("text.format"),)
        return Ask(
            Conversation(_messages(body.get("input"), previous), () if choice == "none" else tools),
            text(body, "model") or "",
            stream=flag(body, "stream"),
            max_tokens=count(body, "max_output_tokens"),
            previous=previous,
            instructions="\n\n".join(instructions) or None,
            dropped=dropped + unforced,
            notes={"tools": wire_tools, "tool_choice": body.get("tool_choice") or "auto", "format": form},
        )

    def read_count(self, body: Mapping[str, Any], target: Target) -> Conversation:
        ask = self.read(body, target)
        if ask.previous is not None:
            raise refused("previous_response_id", ask.previous, "a count takes all turns: send them as input")
        if ask.instructions is None:
            return ask.conversation
        return replace(ask.conversation, messages=(Message("system", ask.instructions), *ask.conversation.messages))

    def count(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def reply(self, header: Header, ask: Ask, reply: Reply) -> dict[str, Any]:
        message = reply.message
        output: list[dict[str, Any]] = []
        if message.reasoning:
            output.append(_reasoning_item(_item_id("rs", header, 0), message.reasoning))
        if message.content or not message.tool_calls:
            output.append(_message_item(_item_id("msg", header, len(output)), message.content, _status(reply)))
        for call in message.tool_calls:
            output.append(_call_item(header, ask, call, len(output)))
        cut = {"reason": "max_output_tokens"} if reply.finish_reason == "length" else None
        return _response(header, ask, _status(reply), output) | {"incomplete_details": cut, "usage": _usage(reply)}

    def stream(self, header: Header, ask: Ask) -> "ResponsesStream":
        return ResponsesStream(self, header, ask)

    def error(self, error: CallError) -> tuple[int, dict[str, Any]]:
        return error.status, error_body(error)


class ResponsesStream:
    """Events of one reply. Items come one after the other, each closed before the next; text or thinking that grows
    after its item has closed goes into an item of its own, and reads as one with the first when it is played back.
    """

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, dialect: ResponsesDialect, header: Header, ask: Ask) -> None:
        self._dialect = dialect
        self._header = header
        self._ask = ask
        self._sent = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._told = ""

    def begin(self) -> bytes:
        begun = _response(self._header, self._ask, "in_progress", [])
        return b"".join(self._event(kind, response=begun) for kind in ("response.created", "response.in_progress"))

    def alive(self) -> bytes:
        return b": keep-alive\n\n"

    def delta(self, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._enter("reasoning")
            events += self._gained("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            events += self._enter("message")
            events += self._gained("response.output_text.delta", delta.content, logprobs=[])
        if delta.calls:
            events += self._closed("completed")
        for call in delta.calls:
            events += self._called(call)
        return events

    def end(self, reply: Reply) -> bytes:
        events = b""
        if not (reply.message.content or reply.message.tool_calls):
            events += self._enter("message")
        events += self._closed(_status(reply))
        name = "response.incomplete" if _status(reply) == "incomplete" else "response.completed"
        whole = self._dialect.reply(self._header, self._ask, reply) | {"output": self._output}
        return events + self._event(name, response=whole)

    def error(self, error: CallError) -> bytes:
        code = "server_error" if error.status >= 500 else error.code
        response = _response(self._header, self._ask, "failed", self._output)
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **values: Any) -> bytes:
        number, self._sent = self._sent, self._sent + 1
        return event(as_json({"type": kind, "sequence_number": number, **values}), kind)

    def _at(self, kind: str, item: Mapping[str, Any], **values: Any) -> bytes:
        return self._event(kind, item_id=item["id"], output_index=len(self._output), **values)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        events = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return events

    def _enter(self, kind: str) -> bytes:
        """The item of this kind that is open, or a new one."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        closed, place = self._closed("completed"), len(self._output)
        if kind == "reasoning":
            return closed + self._opened(_reasoning_item(_item_id("rs", self._header, place), ""))
        return closed + self._opened(_message_item(_item_id("msg", self._header, place), "", "in_progress"))

    def _opened(self, item: dict[str, Any]) -> bytes:
        self._open, self._told = item, ""
        (part,) = item["content"]
        begun = item | {"content": []} | ({"encrypted_content": None} if item["type"] == "reasoning" else {})
        return self._added(begun) + self._at("response.content_part.added", item, content_index=0, part=part)

    def _gained(self, name: str, gained: str, **values: Any) -> bytes:
        assert self._open is not None
        self._told += gained
        return self._at(name, self._open, content_index=0, delta=gained, **values)

    def _closed(self, status: str) -> bytes:
        if self._open is None:
            return b""
        if self._open["type"] == "reasoning":
            item = _reasoning_item(self._open["id"], self._told)
            events = self._at("response.reasoning_text.done", item, content_index=0, text=self._told)
        else:
            item = _message_item(self._open["id"], self._told, status)
            events = self._at("response.output_text.done", item, content_index=0, text=self._told, logprobs=[])
        self._open = None
        events += self._at("response.content_part.done", item, content_index=0, part=item["content"][0])
        return events + self._done(item)

    def _called(self, call: ToolCall) -> bytes:
        item = _call_item(self._header, self._ask, call, len(self._output))
        if item["type"] == "custom_tool_call":
            name, field = "response.custom_tool_call_input", "input"
        else:
            name, field = "response.function_call_arguments", "arguments"
        events = self._added(item | {field: "", "status": "in_progress"})
        if item[field]:
            events += self._at(f"{name}.delta", item, delta=item[field])
        events += self._at(f"{name}.done", item, name=item["name"], **{field: item[field]})
        return events + self._done(item)


def _refuse_other_shapes(body: Mapping[str, Any]) -> None:
    for field, remedy in REFUSED.items():
        if body.get(field) is not None:
            raise refused(field, body[field], remedy)
    if flag(body, "background"):
        raise refused("background", True, "replies are given at once, streamed or whole: leave it out")
    if body.get("generate") is False:
        raise refused("generate", False, "there is nothing to warm up here: ask when there is something to answer")
    top = body.get("top_logprobs")
    if top is not None and (isinstance(top, bool) or top != 0):
        raise refused("top_logprobs", top, "log-probabilities are given in chat completions only: leave it out")


# ---- tools


def _tools(body: Mapping[str, Any]) -> tuple[tuple[Tool, ...], dict[str, WireTool], tuple[str, ...]]:
    """The tools as the model is told of them, how the harness knows them, and what was left out."""
    tools: list[Tool] = []
    wire: dict[str, WireTool] = {}
    dropped: list[str] = []
    for where, given, namespace in _flattened(body):
        kind = required_text(given, "type", where)
        if kind not in ("function", "custom"):
            dropped.append(f"{where}: tools of type {kind!r} run at the provider; there is none here")
            continue
        name = required_text(given, "name", where)
        tool = _function(where, given) if kind == "function" else _custom(where, given)
        tool = replace(tool, name=_flat_name(namespace, name))
        known = WireTool(name, namespace, kind == "custom")
        if wire.setdefault(tool.name, known) != known:
            raise refused(f"{where}.name", name, f"another tool comes to the name {tool.name!r}: rename one")
        tools.append(tool)
    return tuple(tools), wire, tuple(dropped)


def _flattened(
    body: Mapping[str, Any], where: str = "", namespace: str | None = None
) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    """Every tool with its place and its namespace; what a namespace says of itself is told with its first tool."""
    about = text(body, "description", where) if namespace else None
    for i, tool in enumerate(listed(body, "tools", where)):
        place = f"{name_of(where, 'tools')}[{i}]"
        if not isinstance(tool, Mapping):
            raise refused(place, tool, "expected an object")
        if tool.get("type") == "namespace" and namespace is None:
            yield from _flattened(tool, place, required_text(tool, "name", place))
        elif about and i == 0:
            own = text(tool, "description", place)
            yield place, {**tool, "description": folded([about, own] if own else [about])}, namespace
        else:
            yield place, tool, namespace


def _flat_name(namespace: str | None, name: str) -> str:
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _function(where: str, tool: Mapping[str, Any]) -> Tool:
    parameters = None if tool.get("parameters") is None else mapping(tool, "parameters", where)
    return Tool("", text(tool, "description", where), parameters)


def _custom(where: str, tool: Mapping[str, Any]) -> Tool:
    """A tool that takes free text, as a function of one text; a grammar of that text is told in words."""
    lines = [text(tool, "description", where) or ""]
    form = mapping(tool, "format", where)
    if form.get("type") == "grammar":
        inside = f"{where}.format"
        grammar = required_text(form, "definition", inside)
        lines.append(f"The input follows this {text(form, 'syntax', inside) or ''} grammar:\n{grammar}")
    return Tool("", folded([line for line in lines if line]) or None, INPUT)


# ---- input


def _messages(given: object, previous: str | None) -> tuple[Message, ...]:
    if isinstance(given, str):
        return (Message("user", given),)
    if given is None and previous is not None:
        return ()
    if not isinstance(given, list) or not (given or previous):
        raise refused("input", given, "expected a text, or a list of at least one item")
    turns = _Turns()
    for i, item in enumerate(given):
        _read_item(turns, f"input[{i}]", item, previous)
    return tuple(turns.messages)


class _Turns:
    """Messages made of items; those of one sampled reply come to one assistant turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._place = -1
        self._reply: str | None = None

    def add(self, message: Message) -> None:
        self.messages.append(message)

    def say(self, piece: Message, item_id: str | None) -> None:
        """Add a piece of an assistant turn: to the turn it belongs to, or as the next one."""
        reply = _reply_of(item_id)
        if not self._belongs(piece, reply):
            self._place, self._reply = len(self.messages), reply
            self.messages.append(piece)
            return
        turn = self.messages[self._place]
        self._reply = self._reply or reply
        # Nothing goes between two texts of one turn: a stream had to interrupt the one that they were.
        self.messages[self._place] = Message(
            "assistant",
            turn.content + piece.content,
            (*turn.tool_calls, *piece.tool_calls),
            reasoning=(turn.reasoning or "") + (piece.reasoning or "") or None,
        )

    def _belongs(self, piece: Message, reply: str | None) -> bool:
        if self._place < 0:
            return False
        if reply is not None and self._reply is not None:
            return reply == self._reply
        turn = self.messages[self._place]
        if self._place != len(self.messages) - 1 or (turn.content and piece.content and not turn.tool_calls):
            return False
        return not piece.reasoning or not (turn.reasoning or turn.content or turn.tool_calls)


def _read_item(turns: _Turns, where: str, item: object, previous: str | None) -> None:
    if not isinstance(item, Mapping):
        raise refused(where, item, "expected an object")
    kind = text(item, "type", where) or ("message" if "role" in item else None)
    item_id = text(item, "id", where)
    if kind == "message":
        role = ROLES.get(required_text(item, "role", where))
        if role is None:
            raise refused(f"{where}.role", item["role"], f"expected one of {', '.join(ROLES)}")
        message = Message(role, _text_of(item, "content", where))
        if role == "assistant":
            turns.say(message, item_id)
        else:
            turns.add(message)
    elif kind == "reasoning":
        if thought := _thought(where, item):
            turns.say(Message("assistant", reasoning=thought), item_id)
    elif kind in CALLS:
        turns.say(Message("assistant", tool_calls=(_call(where, item, kind),)), item_id)
    elif kind in RESULTS:
        call_id = required_text(item, "call_id", where)
        turns.add(Message("tool", _text_of(item, "output", where), tool_call_id=call_id))
    elif kind == "item_reference":
        # What the previous reply said is in the conversation already.
        if previous is None or _reply_of(item_id) != previous.removeprefix("resp_"):
            raise refused(
                where, item, "only items of previous_response_id are kept: send the item itself (store: false)"
            )
    else:
        known = ", ".join(("message", "reasoning", *CALLS, *RESULTS))
        raise refused(f"{where}.type", kind, f"supported are {known}: there are no tools of the provider here")


def _reply_of(item_id: str | None) -> str | None:
    match = None if item_id is None else OUR_ITEM.fullmatch(item_id)
    return None if match is None else match[1]


def _text_of(item: Mapping[str, Any], field: str, where: str) -> str:
    """Text, or parts of text folded into one."""
    value, place = item.get(field), name_of(where, field)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise refused(place, value, "expected a text, or a list of text parts")
    return folded([_part(f"{place}[{i}]", part) for i, part in enumerate(value)])


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in PARTS:
        written = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(written, str):
            return written
    raise refused(where, part, f"only text is supported ({', '.join(PARTS)}): this model reads no images and no files")


def _thought(where: str, item: Mapping[str, Any]) -> str:
    """The text that we had carried, else what is written in the open; another provider's secret says nothing here."""
    carried = _uncarried(text(item, "encrypted_content", where) or "")
    content = _text_of(item, "content", where)
    summary = _text_of(item, "summary", where)
    return content or summary if carried is None else carried


def _call(where: str, item: Mapping[str, Any], kind: str) -> ToolCall:
    call_id = required_text(item, "call_id", where)
    name = _flat_name(text(item, "namespace", where), required_text(item, "name", where))
    if kind == "custom_tool_call":
        written = text(item, "input", where) or ""
        return ToolCall(call_id, name, json.dumps({"input": written}, ensure_ascii=False))
    return ToolCall(call_id, name, text(item, "arguments", where) or "")


# ---- output


def _item_id(kind: str, header: Header, place: int) -> str:
    return f"{kind}_{header.reply_id.removeprefix('resp_')}_{place}"


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish_reason == "length" else "completed"


def _response(header: Header, ask: Ask, status: str, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "id": header.reply_id,
        "object": "response",
        "created_at": header.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": ask.max_tokens,
        "metadata": {},
        "model": header.model,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": ask.previous,
        "temperature": None,
        "text": {"format": ask.notes.get("format", TEXT)},
        "tool_choice": ask.notes.get("tool_choice", "auto"),
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _reasoning_item(item_id: str, thought: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": thought}],
        "encrypted_content": _carried(thought),
    }


def _message_item(item_id: str, content: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}


def _call_item(header: Header, ask: Ask, call: ToolCall, place: int) -> dict[str, Any]:
    known: WireTool = ask.notes.get("tools", {}).get(call.name, WireTool(call.name))
    inside = {} if known.namespace is None else {"namespace": known.namespace}
    head = {"call_id": call.call_id, "name": known.name, **inside, "status": "completed"}
    written = _custom_input(call.arguments) if known.custom else None
    if written is not None:
        return {"id": _item_id("ctc", header, place), "type": "custom_tool_call", **head, "input": written}
    # A custom tool's call that is not one text stays as the model wrote it; the harness says what is wrong with it.
    return {"id": _item_id("fc", header, place), "type": "function_call", **head, "arguments": call.arguments}


def _custom_input(arguments: str) -> str | None:
    parsed = parsed_arguments(arguments)
    if isinstance(parsed, dict) and len(parsed) == 1 and isinstance(parsed.get("input"), str):
        return str(parsed["input"])
    return None


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _carried(thought: str) -> str:
    return CARRIED + urlsafe_b64encode(thought.encode()).decode()


def _uncarried(carried: str) -> str | None:
    """The text within, or None where it is not ours."""
    if not carried.startswith(CARRIED):
        return None
    try:
        return urlsafe_b64decode(carried.removeprefix(CARRIED)).decode()
    except ValueError:
        return None
