"""Tools for models whose chat template ignores them: declared in the system prompt, called in the Hermes form.

The declaration is one JSON object a line between ``<tools>`` and ``</tools>``; a call is
``<tool_call>{"name": ..., "arguments": ...}</tool_call>``; a result comes back as ``<tool_response>`` in a user turn.
The ``renderers`` package parses this form only where ``<tool_call>`` is one token; here it is plain text.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longrein.calls.conversation import Conversation, Message, Tool, ToolCall, parsed_arguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"

DECLARATION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

HALF = re.compile("[\ud800-\udfff]")

BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One attempted call: ``text`` with its tags; ``name`` is None where it is no well-formed call."""

    text: str
    name: str | None = None
    arguments: str = "{}"


def present(conversation: Conversation) -> Conversation:
    """The same conversation in plain turns, tools declared in the system message."""
    messages = tuple(_plain_turns(conversation.messages))
    if conversation.tools:
        messages = _declared(messages, conversation.tools)
    return Conversation(messages)


def split(text: str) -> tuple[str, list[Block]]:
    """Text before the first call, and every attempted call. A block that never closes is an attempt too."""
    start = text.find(OPEN)
    if start < 0:
        return text, []
    blocks = []
    end = start
    for match in BLOCK.finditer(text, start):
        blocks.append(_block(match.group(0), match.group(1)))
        end = match.end()
    unclosed = text.find(OPEN, end)
    if unclosed >= 0:
        blocks.append(Block(text[unclosed:]))
    return text[:start].rstrip("\n"), blocks


def _block(text: str, body: str) -> Block:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return Block(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return Block(text)
    return Block(text, call["name"], arguments_text(call.get("arguments", {})))


def arguments_text(arguments: object) -> str:
    """Arguments as the wire carries them: JSON text; a string the model wrote stays that string."""
    if isinstance(arguments, str):
        return arguments
    text = json.dumps(arguments, ensure_ascii=False)
    # Half a character stays escaped, or no client could send it back.
    return json.dumps(arguments) if HALF.search(text) else text


def _declared(messages: tuple[Message, ...], tools: Sequence[Tool]) -> tuple[Message, ...]:
    lines = "\n".join(json.dumps(tool.as_function(), ensure_ascii=False) for tool in tools)
    text = DECLARATION.format(tools=lines)
    if messages and messages[0].role == "system":
        return (Message("system", f"{messages[0].content}\n\n{text}"), *messages[1:])
    return (Message("system", text), *messages)


def _plain_turns(messages: Sequence[Message]) -> Iterator[Message]:
    responses: list[str] = []
    for message in messages:
        if message.role == "tool":
            responses.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if responses:
            yield Message("user", "\n".join(responses))
            responses = []
        yield _with_written_calls(message) if message.tool_calls else message
    if responses:
        yield Message("user", "\n".join(responses))


def _with_written_calls(message: Message) -> Message:
    written = [message.content] if message.content else []
    written += [f"{OPEN}\n{_written(call)}\n{CLOSE}" for call in message.tool_calls]
    return Message("assistant", "\n".join(written), reasoning=message.reasoning)


def _written(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": parsed_arguments(call.arguments)}, ensure_ascii=False)
