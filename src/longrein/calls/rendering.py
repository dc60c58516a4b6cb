"""The seam between conversations and tokens, and the choice of what stands behind it.

A renderer turns a conversation into prompt ids, continues recorded tokens where the text allows, and reads a reply back
out of sampled tokens. The ``renderers`` package does so for the families it knows; any other model goes through its own
chat template. Whatever a harness declares reaches the model or is refused: nothing is dropped in silence.
"""

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml

from longrein.calls.conversation import Conversation, Message, Tool
from longrein.config import ModelSection
from longrein.errors import InvalidRequest, ModelError
from longrein.records import Cause, IntArray


@dataclass(frozen=True, slots=True)
class TextMark:
    """Identifies the beginning of a text without keeping it: its length in characters and its digest."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> "TextMark":
        return cls(len(text), _digest(text))

    def begins(self, text: str) -> bool:
        return len(text) >= self.length and _digest(text[: self.length]) == self.digest


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model will see.

    Attributes:
        ids: (P,) int32.
        mark: of the template's text, where a template made it.
    """

    ids: IntArray
    mark: TextMark | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A call as a later one may continue it.

    Attributes:
        conversation: what was asked, followed by the reply as it was sent.
        completion_ids: (C,) int32, as sampled.
        whole: False where the reply was cut short of what was sampled (a stop string); its tokens then say too much.
    """

    conversation: Conversation
    prompt: Prompt
    completion_ids: IntArray
    whole: bool = True

    @property
    def reply(self) -> Message:
        return self.conversation.messages[-1]


class Renderer(Protocol):
    """Conversation to tokens and back, for one model."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""
        ...

    @property
    def incremental(self) -> bool:
        """Whether the beginning of a completion parses into the beginning of its reply (else it is sent when whole)."""
        ...

    def render(self, conversation: Conversation) -> Prompt:
        """The prompt for the model's next turn, from nothing.

        Raises:
            InvalidRequest: the model's template cannot show this conversation, or would drop a part of it.
        """
        ...

    def extend(self, recorded: Recorded, conversation: Conversation) -> Prompt | Cause:
        """The prompt that begins with ``recorded``'s own tokens, or why there is none.

        ``conversation`` begins with all of ``recorded.conversation`` and has the same tools. Only the text after it is
        tokenised.

        Raises:
            InvalidRequest: as for ``render``.
        """
        ...

    def parse(
        self, completion_ids: list[int], prompt_ids: list[int], tools: Sequence[Tool], *, final: bool = True
    ) -> Message:
        """The assistant turn that was sampled. A malformed tool call stays text, as the model wrote it.

        With ``final`` False the completion is still growing: what may yet become a call is left out.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        ...

    def encode(self, text: str, *, begin: bool) -> IntArray:
        """(N,) int32, special tokens recognised; with ``begin``, what the tokenizer puts in front of a text."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        ...

    def describe(self) -> str:
        """One line for people."""
        ...


@dataclass(frozen=True, slots=True)
class SystemPlaces:
    """Where a family shows system messages, and what is done about those it would not show where they stand.

    Harnesses also send system messages in the middle of a conversation (Claude Code does). Some templates refuse them,
    some move them to the beginning, which would change the recorded past, some show them as if the user had spoken, and
    some do not ask the model to answer them. There they become user messages, ``<system>`` around their text; several
    at the beginning become one. Only what the model is shown changes: the conversation that is recorded and compared
    keeps its roles.

    Attributes:
        several: whether several at the beginning are shown one by one.
        later: whether a later one is shown where it stands, in a conversation that begins with one.
        first: the same in a conversation that begins with none.
    """

    several: bool
    later: bool
    first: bool

    @classmethod
    def tried(cls, text_of: Callable[[Sequence[Message]], str]) -> "SystemPlaces":
        """Find out by trying: ``text_of`` renders messages, or raises InvalidRequest where the template refuses."""
        system, note, user = Message("system", "opal"), Message("system", "quartz"), Message("user", "slate")
        turns = (user, Message("assistant", "basalt"), note, Message("user", "granite"))
        return cls(
            several=_in_place(text_of, (system, note, user), 1),
            later=_in_place(text_of, (system, *turns), 3),
            first=_in_place(text_of, turns, 2),
        )

    def present(self, conversation: Conversation) -> Conversation:
        """The conversation as the model is shown it. Only messages at the beginning are joined."""
        messages = conversation.messages
        leading = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
        head, rest = messages[:leading], messages[leading:]
        if leading > 1 and not self.several:
            head = (Message("system", "\n\n".join(message.content for message in head)),)
        if not (self.later if leading else self.first):
            rest = tuple(_as_user(message) if message.role == "system" else message for message in rest)
        return replace(conversation, messages=(*head, *rest))


def _in_place(text_of: Callable[[Sequence[Message]], str], messages: Sequence[Message], at: int) -> bool:
    """Whether all messages are shown once, in order, and the one ``at`` as no user's, but answered as a user's is."""
    # Some templates demand a user's message.
    to_last = messages[: at + 1] if any(message.role == "user" for message in messages[:at]) else messages
    try:
        text, last = text_of(messages), text_of(to_last)
    except InvalidRequest:
        return False
    places = [text.find(message.content) for message in messages]
    if places[0] < 0 or places != sorted(places) or any(text.count(message.content) != 1 for message in messages):
        return False
    note = messages[at]
    try:
        as_user = text_of([replace(message, role="user") if message is note else message for message in to_last])
    except InvalidRequest:
        return True
    return last != as_user and last.rpartition(note.content)[2] == as_user.rpartition(note.content)[2]


def _as_user(message: Message) -> Message:
    return Message("user", f"<system>\n{message.content}\n</system>")


def open_renderer(directory: Path, model: ModelSection) -> Renderer:
    """The renderer for the tokenizer and chat template in ``directory``.

    Raises:
        ModelError: they cannot be loaded, or a ``model.*`` key does not fit them.
    """
    from longrein.calls.package import PackageRenderer, known_family
    from longrein.calls.template import TemplateRenderer

    tokenizer = load_tokenizer(directory)
    demonstrations = load_demonstrations(model.demonstrations) if model.demonstrations else ()
    family = None if model.renderer == "template" else known_family(tokenizer, directory, model.renderer)
    if family is not None and model.tool_format is not None:
        if model.renderer != "auto":
            raise ModelError(
                f"model.tool_format: {model.tool_format} does not go with model.renderer: {model.renderer}, which "
                "shows tools in its family's own form. Remove one of the two."
            )
        family = None
    if family is None:
        return TemplateRenderer(
            tokenizer,
            directory,
            tool_format=model.tool_format,
            keep_thinking=model.keep_thinking,
            demonstrations=demonstrations,
        )
    return PackageRenderer(
        tokenizer, family, directory, keep_thinking=model.keep_thinking, demonstrations=demonstrations
    )


def load_tokenizer(directory: Path) -> Any:
    """The model's fast tokenizer, from local files only."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"model.path {directory}: no tokenizer can be loaded from it ({' '.join(str(error).split())}). It needs "
            "tokenizer.json and tokenizer_config.json."
        ) from None
    # Cleaning up spaces would change what the model wrote.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def tokens_of(tokenizer: Any, text: str, *, begin: bool) -> IntArray:
    """(N,) int32; with ``begin``, behind what the tokenizer puts in front of a text."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=begin), dtype=np.int32)


def load_demonstrations(file: Path) -> tuple[Message, ...]:
    """Few-shot turns: a YAML list of ``{role: user | assistant, content: text}`` that begins with the user and ends
    with the assistant.

    Raises:
        ModelError: names the file and the item.
    """
    where = f"model.demonstrations {file}"
    try:
        items = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{where}: cannot be read ({error.strerror}).") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ModelError(f"{where}: is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(items, list) or not items:
        raise ModelError(f"{where}: holds {type(items).__name__}, expected a list of {{role, content}} turns.")
    turns = tuple(_demonstration(where, i, item) for i, item in enumerate(items))
    if turns[0].role != "user" or turns[-1].role != "assistant":
        raise ModelError(f"{where}: must begin with a user turn and end with an assistant turn.")
    return turns


def _demonstration(where: str, index: int, item: object) -> Message:
    if not isinstance(item, dict) or set(item) != {"role", "content"}:
        keys = sorted(map(str, item)) if isinstance(item, dict) else item
        raise ModelError(f"{where}: item {index} was given {keys!r}, expected exactly the keys role and content.")
    role, content = item["role"], item["content"]
    if role not in ("user", "assistant"):
        raise ModelError(f"{where}: item {index} has role {role!r}, expected user or assistant.")
    if not isinstance(content, str) or not content:
        raise ModelError(f"{where}: item {index} has content {content!r}, expected text.")
    return Message(role, content)


def unknown_renderer(given: str, known: Sequence[str]) -> ModelError:
    """The error for a ``model.renderer`` nobody has heard of."""
    near = difflib.get_close_matches(given, known, n=3) or sorted(known)
    return ModelError(
        f"model.renderer was given {given!r}. Did you mean {' or '.join(near)}? Use auto (detected) or template (the "
        "model's own chat template) where none fits."
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object beside the model, or an empty one where there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


PROBE_TOOL = Tool("look_up", "Looks a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})


def check_renderer(renderer: Renderer) -> str:
    """Render a short conversation and read it back; the answer describes the renderer.

    Raises:
        ModelError: the tokenizer loses what it is given, or no token ends a reply.
    """
    first = Conversation((Message("system", "Answer briefly."), Message("user", "What is “naïve” in Greek?\n")))
    prompt = renderer.render(first)
    stop = min(renderer.stop_ids, default=None)
    if stop is None:
        raise ModelError("No token ends a reply: set eos_token in the model's tokenizer_config.json.")
    shown = renderer.decode(prompt.ids.tolist())
    if "naïve" not in shown:
        raise ModelError(f"The tokenizer does not give text back: a prompt with “naïve” decodes to {shown[-80:]!r}.")
    return (
        f"{renderer.describe()}; replies end with {', '.join(sorted(renderer.decode([i]) for i in renderer.stop_ids))}"
    )
