"""Models rendered by their own chat template.

A later turn continues recorded tokens where the template's text allows: it must still begin with the text of the
recorded prompt, and show the reply so that it reads as the reply that was sampled. What follows is then all that is
tokenised.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np

from longrein.calls import hermes, tagged
from longrein.calls.conversation import Conversation, Message, Tool, ToolCall, parsed_arguments, same_message
from longrein.calls.rendering import (
    PROBE_TOOL,
    Prompt,
    Recorded,
    SystemPlaces,
    TextMark,
    read_json,
    tokens_of,
)
from longrein.calls.reply import reply_message
from longrein.errors import InvalidRequest, ModelError
from longrein.records import Cause, IntArray

LIBRARY_PARSERS = ("qwen3", "qwen3.5", "glm", "deepseek-v3")

# What a template raises on a conversation that it does not expect; the last, on arguments nested without end.
CANNOT_SHOW = (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError, RecursionError)

PROBE_CALL = ToolCall("call_1", PROBE_TOOL.name, '{"word": "river"}')


class TemplateRenderer:
    """A tokenizer with a chat template.

    Args:
        tokenizer: a fast tokenizer of ``transformers``.
        directory: where it came from, for messages and for ``generation_config.json``.
        tool_format: how tools are declared, None for the template's own way.
        keep_thinking: continue recorded thinking although the template removes it.
        demonstrations: turns placed after the system message of every conversation.
    """

    incremental = True

    def __init__(
        self,
        tokenizer: Any,
        directory: Path,
        *,
        tool_format: Literal["hermes"] | None = None,
        keep_thinking: bool = False,
        demonstrations: Sequence[Message] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                f"model.path {directory}: the tokenizer has no chat template. Add chat_template.jinja, or set "
                "model.renderer to the model's family."
            )
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._keep_thinking = keep_thinking
        self._demonstrations = tuple(demonstrations)
        self._shows_tools = self._differs_with_tools()
        self._places = SystemPlaces.tried(self._probed)
        self._end = self._end_of_turn()
        self.stop_ids = frozenset(self._configured_stops(directory) + ([] if self._end is None else [self._end]))
        self._parser = self._tool_parser()
        self._plain_reader = _library_reader(tokenizer, None)
        self._tool_reader = self._plain_reader
        if self._parser in LIBRARY_PARSERS:
            self._tool_reader = _library_reader(tokenizer, self._parser)

    # ---- conversation to tokens

    def render(self, conversation: Conversation) -> Prompt:
        text = self.text(conversation)
        comparable = self._comparable(conversation)
        marked = text if comparable is conversation else self.text(comparable)
        return Prompt(self.encode(text, begin=False), TextMark.of(marked))

    def extend(self, recorded: Recorded, conversation: Conversation) -> Prompt | Cause:
        if not recorded.whole or recorded.prompt.mark is None:
            return Cause.TEXT_CHANGED
        text = self.text(self._comparable(conversation))
        if not recorded.prompt.mark.begins(text):
            return self._why(recorded, text)
        after = self._after_reply(recorded, text[recorded.prompt.mark.length :])
        if after is None:
            return self._why(recorded, text)
        ids = np.concatenate([recorded.prompt.ids, recorded.completion_ids, self.encode(after, begin=False)])
        return Prompt(ids, TextMark.of(text))

    def mark_of(self, recorded: Recorded) -> TextMark:
        """The mark of a prompt that something else has rendered."""
        asked = replace(recorded.conversation, messages=recorded.conversation.messages[:-1])
        return TextMark.of(self.text(self._comparable(asked)))

    def text(self, conversation: Conversation, *, ask: bool = True) -> str:
        """The template's text; with ``ask``, up to where the model's next turn begins."""
        self._refuse_what_would_be_dropped(conversation)
        conversation = conversation.after_system(self._demonstrations)
        if self._tool_format == "hermes":
            conversation = hermes.present(conversation)
        conversation = self._places.present(conversation)
        return self._apply(conversation.messages, conversation.tools, ask)

    def _apply(self, messages: Sequence[Message], tools: Sequence[Tool], ask: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [wire_message(message) for message in messages],
                tools=[tool.as_function() for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=ask,
            )
        except CANNOT_SHOW as error:
            raise InvalidRequest(
                f"messages: the model's chat template cannot show this conversation: {error}", param="messages"
            ) from None
        return str(text)

    def _refuse_what_would_be_dropped(self, conversation: Conversation) -> None:
        if self._tool_format is not None or not (conversation.tools or _has_calls(conversation)):
            return
        if not self._shows_tools:
            raise InvalidRequest(
                "tools: this model's chat template does not show tools to the model. Set model.tool_format: hermes to "
                "declare them in the system prompt, or use the harness's text mode.",
                param="tools",
            )
        if self._parser is None:
            raise InvalidRequest(
                "tools: the tool calls of this model's chat template are written in a form that no known parser reads. "
                "Set model.renderer to the model's family, or model.tool_format: hermes.",
                param="tools",
            )

    def _comparable(self, conversation: Conversation) -> Conversation:
        # Where thinking is kept, the template's removing it is no change of the past.
        return conversation.without_reasoning() if self._keep_thinking else conversation

    def _after_reply(self, recorded: Recorded, text: str) -> str | None:
        """What the template says behind the recorded reply at the start of ``text``; None if it tells another reply."""
        sampled = recorded.completion_ids.tolist()
        stop = self.decode(sampled[-1:]) if sampled and sampled[-1] in self.stop_ids else ""
        said = self.decode(sampled[:-1] if stop else sampled)
        if text.startswith(said + stop):
            return text[len(said) + len(stop) :]
        end = stop or ("" if self._end is None else self.decode([self._end]))
        shown, found, after = text.partition(end) if end else ("", "", "")
        if not found or not self._reads_as(shown, recorded):
            return None
        return after if stop else found + after

    def _reads_as(self, shown: str, recorded: Recorded) -> bool:
        """Whether the template's rendition of a reply (re-serialised arguments, say) means the reply that was given."""
        read = self.parse(
            self.encode(shown, begin=False).tolist(), recorded.prompt.ids.tolist(), recorded.conversation.tools
        )
        reply = recorded.reply
        if self._keep_thinking:
            read, reply = (_only(Conversation((message,)).without_reasoning()) for message in (read, reply))
        return same_message(read, reply)

    def _why(self, recorded: Recorded, text: str) -> Cause:
        """Thinking that was shown or sampled before and is gone now, or any other change."""
        thoughts = {m.reasoning.strip() for m in recorded.conversation.messages if m.reasoning}
        dropped = any(thought and thought not in text for thought in thoughts)
        return Cause.TEMPLATE_DROPPED_THINKING if dropped else Cause.TEXT_CHANGED

    # ---- tokens to reply

    def parse(
        self, completion_ids: list[int], prompt_ids: list[int], tools: Sequence[Tool], *, final: bool = True
    ) -> Message:
        ids = completion_ids[:-1] if completion_ids and completion_ids[-1] in self.stop_ids else completion_ids
        reader = self._tool_reader if tools else self._plain_reader
        parsed = reader.parse_response(ids, prompt_ids=prompt_ids)
        if tools and self._parser is not None and self._parser in tagged.VALUES:
            parsed = tagged.typed(parsed, self._parser, tools)
        if self._parser != "hermes" or not tools:
            return reply_message(parsed, ids, self.decode, offered=bool(tools), final=final)
        content, blocks = hermes.split(parsed.content)
        calls = tuple(ToolCall("", block.name, block.arguments) for block in blocks if block.name is not None)
        malformed = [block.text for block in blocks if block.name is None] if final else []
        content = "\n".join(part for part in (content, *malformed) if part)
        reasoning = (parsed.reasoning_content or "").strip() or None
        return Message("assistant", content, calls, reasoning=reasoning, broken_calls=len(malformed))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if len(ids) else ""

    def encode(self, text: str, *, begin: bool) -> IntArray:
        return tokens_of(self._tokenizer, text, begin=begin)

    @property
    def vocabulary(self) -> int:
        return len(self._tokenizer)

    def describe(self) -> str:
        if self._tool_format is not None:
            tools = f"declared in the {self._tool_format} form"
        elif not self._shows_tools:
            tools = "refused: the template ignores them and model.tool_format is not set"
        else:
            tools = "refused: no known parser reads the template's calls" if self._parser is None else "as the template"
        turns = f", {len(self._demonstrations)} demonstration turns" if self._demonstrations else ""
        return f"the model's chat template{turns}; tools {tools}"

    # ---- what the template does, found out by trying

    def _differs_with_tools(self) -> bool:
        messages = (Message("user", "a"),)
        try:
            return self._apply(messages, (PROBE_TOOL,), True) != self._apply(messages, (), True)
        except InvalidRequest:
            return False

    def _probed(self, messages: Sequence[Message]) -> str:
        return self._apply(messages, (PROBE_TOOL,) if self._shows_tools else (), True)

    def _end_of_turn(self) -> int | None:
        """The special token that the template puts behind an assistant turn."""
        word = "naïve"
        try:
            text = self._apply((Message("user", "a"), Message("assistant", word)), (), False)
        except InvalidRequest:
            return None
        ids = self.encode(text.rpartition(word)[2], begin=False)
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        return int(ids[0]) if len(ids) and int(ids[0]) in special else None

    def _configured_stops(self, directory: Path) -> list[int]:
        configured = read_json(directory / "generation_config.json").get("eos_token_id")
        given = configured if isinstance(configured, list) else [configured]
        return [i for i in (self._tokenizer.eos_token_id, *given) if isinstance(i, int)]

    def _tool_parser(self) -> str | None:
        """The parser that reads back a call which the template (or the Hermes form) has written."""
        atomic = self._tokenizer.convert_tokens_to_ids(hermes.OPEN)
        if self._tool_format == "hermes":
            return "qwen3" if atomic not in (None, self._tokenizer.unk_token_id) else "hermes"
        if not self._shows_tools:
            return None
        try:
            asked = self._apply((Message("user", "a"),), (PROBE_TOOL,), True)
            told = (Message("user", "a"), Message("assistant", "", (PROBE_CALL,)))
            text = self._apply(told, (PROBE_TOOL,), False).removeprefix(asked)
        except InvalidRequest:
            return None
        ids = self.encode(text, begin=False).tolist()
        for name in LIBRARY_PARSERS:
            parsed = _library_reader(self._tokenizer, name).parse_response(ids)
            if [(call.name, call.arguments) for call in parsed.tool_calls] == [
                (PROBE_CALL.name, json.loads(PROBE_CALL.arguments))
            ]:
                return name
        blocks = hermes.split(text)[1]
        return "hermes" if len(blocks) == 1 and blocks[0].name == PROBE_CALL.name else None


def wire_message(message: Message) -> dict[str, Any]:
    """The dictionary that chat templates and the ``renderers`` package expect."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "type": "function",
                "id": call.call_id,
                "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        wire["name"] = message.name
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    return wire


def _has_calls(conversation: Conversation) -> bool:
    return any(message.tool_calls for message in conversation.messages)


def _only(conversation: Conversation) -> Message:
    return conversation.messages[0]


def _library_reader(tokenizer: Any, tool_parser: str | None) -> Any:
    from renderers import DefaultRendererConfig, create_renderer

    return create_renderer(tokenizer, DefaultRendererConfig(tool_parser=tool_parser, reasoning_parser="think"))
