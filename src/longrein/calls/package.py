"""Models whose family the ``renderers`` package knows: it renders, parses, and bridges recorded tokens to a next turn.

``auto`` trusts it with a model only after trying: on a set of probe conversations the family's renderer must give the
very tokens that the model's own chat template gives.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from longrein.calls.conversation import Conversation, Message, Tool, ToolCall
from longrein.calls.rendering import (
    PROBE_TOOL,
    Prompt,
    Recorded,
    SystemPlaces,
    read_json,
    tokens_of,
    unknown_renderer,
)
from longrein.calls.reply import reply_message
from longrein.calls.template import TemplateRenderer, wire_message
from longrein.errors import InvalidRequest, ModelError
from longrein.records import Cause, IntArray

# ``model_type`` of config.json → families of the package whose renderer may fit. Whether one does is tried out.
# gpt-oss is chosen by name only: its renderer opens the analysis channel in the prompt, which the template does not.
CANDIDATES = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "llama": ("llama-3",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
    "glm_moe_dsa": ("glm-5", "glm-5.1", "glm-5.3"),
    "minimax_m2": ("minimax-m2",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "deepseek_v4": ("deepseek-v4",),
    "kimi_k2": ("kimi-k2",),
    "kimi_k25": ("kimi-k2.5",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
}

# Families whose growing completion parses into a growing reply; the others' replies are sent when they are whole.
INCREMENTAL = {
    *("qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8"),
    *("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
    *("gpt-oss", "deepseek-v4"),
}

# Families that show a tool's result under the name of the function; dialects leave that name out.
NAMED_RESULTS = {"gpt-oss"}

# What the package raises on a tokenizer, or a conversation, that is not its family's.
MISFITS = (AssertionError, ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError)


class PackageRenderer:
    """A family of the package over a model's tokenizer.

    Args:
        tokenizer: a fast tokenizer of ``transformers``.
        family: name in the package's registry.
        directory: where the tokenizer came from.
        keep_thinking: bridge across user turns although the template removes earlier thinking there.
        demonstrations: turns placed after the system message of every conversation.
    """

    def __init__(
        self,
        tokenizer: Any,
        family: str,
        directory: Path,
        *,
        keep_thinking: bool = False,
        demonstrations: Sequence[Message] = (),
    ) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._demonstrations = tuple(demonstrations)
        self._library = _build(tokenizer, family, keep_thinking)
        self.stop_ids = frozenset(int(i) for i in self._library.get_stop_token_ids())
        self.incremental = family in INCREMENTAL
        self._end_of_thinking = tokenizer.convert_tokens_to_ids("</think>")
        self._shows_tools = self._differs_with_tools()
        self._places = SystemPlaces.tried(lambda messages: self.decode(self._ids(messages, (PROBE_TOOL,))))
        # Where the bridge refuses (a user turn after a tool cycle, say), the template's text may still allow more.
        self._template: TemplateRenderer | None = None
        if tokenizer.chat_template and _agrees(self._library, family, tokenizer):
            self._template = TemplateRenderer(
                tokenizer, directory, keep_thinking=keep_thinking, demonstrations=demonstrations
            )

    def render(self, conversation: Conversation) -> Prompt:
        if conversation.tools and not self._shows_tools:
            raise InvalidRequest(
                f"tools: the model's renderer ({self._family}) does not show tools to the model. Set model.renderer: "
                "template and model.tool_format: hermes to declare them in the system prompt.",
                param="tools",
            )
        conversation = self._places.present(conversation.after_system(self._demonstrations))
        return Prompt(np.asarray(self._ids(conversation.messages, conversation.tools), dtype=np.int32))

    def _ids(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        wire = [tool.as_function() for tool in tools] or None
        try:
            told = _family_wire(self._family, messages)
            ids: list[int] = self._library.render_ids(told, tools=wire, add_generation_prompt=True)
        except MISFITS as error:
            raise InvalidRequest(
                f"messages: the model's renderer ({self._family}) cannot show this conversation: {error}",
                param="messages",
            ) from None
        return ids

    def extend(self, recorded: Recorded, conversation: Conversation) -> Prompt | Cause:
        if not recorded.whole:
            return Cause.TEXT_CHANGED
        shown = self._places.present(conversation).messages
        new = shown[len(shown) - (len(conversation.messages) - len(recorded.conversation.messages)) :]
        tools = [tool.as_function() for tool in conversation.tools] or None
        previous, sampled = recorded.prompt.ids.tolist(), recorded.completion_ids.tolist()
        try:
            wire = _family_wire(self._family, new, recorded.conversation.messages)
            bridged = self._library.bridge_to_next_turn(previous, sampled, wire, tools=tools)
        except MISFITS:
            bridged = None
        if bridged is not None and bridged.token_ids[: len(previous) + len(sampled)] == previous + sampled:
            return Prompt(np.asarray(bridged.token_ids, dtype=np.int32))
        return self._extend_by_text(recorded, conversation)

    def _differs_with_tools(self) -> bool:
        messages = (Message("user", "a"),)
        try:
            return self._ids(messages, (PROBE_TOOL,)) != self._ids(messages, ())
        except InvalidRequest:
            return True

    def _extend_by_text(self, recorded: Recorded, conversation: Conversation) -> Prompt | Cause:
        if self._template is None:
            thought = any(message.reasoning for message in recorded.conversation.messages)
            return Cause.TEMPLATE_DROPPED_THINKING if thought else Cause.TEXT_CHANGED
        if recorded.prompt.mark is None:
            recorded = replace(recorded, prompt=replace(recorded.prompt, mark=self._template.mark_of(recorded)))
        return self._template.extend(recorded, conversation)

    def parse(
        self, completion_ids: list[int], prompt_ids: list[int], tools: Sequence[Tool], *, final: bool = True
    ) -> Message:
        wire = [tool.as_function() for tool in tools] or None
        parsed = self._library.parse_response(completion_ids, tools=wire, prompt_ids=prompt_ids)
        message = reply_message(parsed, completion_ids, self.decode, offered=bool(tools), final=final)
        # Some families' readers trim white space in front only once there is a call: too late for a growing reply.
        content = message.content.lstrip()
        if final:
            return replace(message, content=content)
        # A call ends open thinking, unless the end of thinking comes after it: then it was but thought.
        end = self._end_of_thinking
        thinks = parsed.reasoning_content is not None and end is not None and end not in completion_ids
        return replace(message, content=content, tool_calls=() if thinks else message.tool_calls)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if len(ids) else ""

    def encode(self, text: str, *, begin: bool) -> IntArray:
        return tokens_of(self._tokenizer, text, begin=begin)

    @property
    def vocabulary(self) -> int:
        return len(self._tokenizer)

    def describe(self) -> str:
        turns = f", {len(self._demonstrations)} demonstration turns" if self._demonstrations else ""
        agrees = "agrees with the model's chat template" if self._template else "not the model's own chat template"
        tools = "in the family's form" if self._shows_tools else "refused: the family does not show them to the model"
        return f"renderers: {self._family} ({agrees}){turns}; tools {tools}"


def known_family(tokenizer: Any, directory: Path, wanted: str) -> str | None:
    """The family to use: the named one, or for ``auto`` one that agrees with the model's template, if any does.

    Raises:
        ModelError: the named family does not exist or does not fit the tokenizer.
    """
    from renderers.base import MODEL_RENDERER_MAP

    known = sorted(set(MODEL_RENDERER_MAP.values()))
    if wanted != "auto":
        if wanted not in known:
            raise unknown_renderer(wanted, known)
        try:
            _build(tokenizer, wanted, False)
        except MISFITS as error:
            raise ModelError(
                f"model.renderer: {wanted} does not fit the tokenizer in {directory} ({error}). Use auto or template."
            ) from None
        return wanted
    model_type = str(read_json(directory / "config.json").get("model_type"))
    for family in CANDIDATES.get(model_type, ()):
        try:
            library = _build(tokenizer, family, False)
        except MISFITS:
            continue
        if tokenizer.chat_template and _agrees(library, family, tokenizer):
            return family
    return None


def _build(tokenizer: Any, family: str, keep_thinking: bool) -> Any:
    from renderers import config_from_name, create_renderer

    options: dict[str, Any] = {"thinking_retention": "all"} if keep_thinking else {}
    config = type(config_from_name(family))
    if "date_string" in config.model_fields and "strftime_now" in (tokenizer.chat_template or ""):
        # The template shows the day of rendering; here the day of opening stays, so that a midnight changes nothing.
        options["date_string"] = datetime.now().strftime("%d %b %Y")
    return create_renderer(tokenizer, config(**options))


def _agrees(library: Any, family: str, tokenizer: Any) -> bool:
    """Whether family and chat template give the same tokens for every probe."""
    for messages, tools in _probes():
        wire = [tool.as_function() for tool in tools] or None
        try:
            text = tokenizer.apply_chat_template(
                _wire(messages), tools=wire, tokenize=False, add_generation_prompt=True
            )
            expected = tokenizer.encode(text, add_special_tokens=False)
            told = _family_wire(family, messages)
            if library.render_ids(told, tools=wire, add_generation_prompt=True) != expected:
                return False
        except (jinja2.TemplateError, *MISFITS):
            return False
    return True


def _probes() -> Iterator[tuple[tuple[Message, ...], tuple[Tool, ...]]]:
    system, user = Message("system", "Be brief.\n"), Message("user", " What is 2 + 2? ")
    said = Message("assistant", "It is 4.", reasoning="Two and two.")
    call = ToolCall("call_1", PROBE_TOOL.name, json.dumps({"word": "“naïve”\n"}))
    called = Message("assistant", "", (call,), reasoning="A word.")
    told = Message("tool", "simple\n", tool_call_id="call_1")
    yield (user,), ()
    yield (system, user, said, Message("user", "And 3 + 3?")), ()
    yield (system, user), (PROBE_TOOL,)
    yield (system, user, called, told), (PROBE_TOOL,)
    yield (user, called, told, said, user), (PROBE_TOOL,)


def _family_wire(family: str, messages: Sequence[Message], before: Sequence[Message] = ()) -> list[dict[str, Any]]:
    """Messages as the family's renderer takes them; ``before`` are those they follow."""
    if family in NAMED_RESULTS:
        messages = _named_results((*before, *messages))[len(before) :]
    return _wire(messages)


def _named_results(messages: Sequence[Message]) -> list[Message]:
    """Results with the names of the functions they answer, by the call's id or else by their order."""
    named: list[Message] = []
    calls: list[ToolCall] = []
    for message in messages:
        if message.role == "assistant":
            calls = list(message.tool_calls)
        elif message.role == "tool" and calls:
            call = next((call for call in calls if call.call_id == message.tool_call_id), calls[0])
            calls.remove(call)
            message = message if message.name else replace(message, name=call.name)
        named.append(message)
    return named


def _wire(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [wire_message(message) for message in messages]
