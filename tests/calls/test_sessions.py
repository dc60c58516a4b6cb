"""The next prompt begins with the recorded tokens wherever the text allows, and says why where it does not."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.calls.conversation import Conversation, Message, Tool, ToolCall
from longrein.calls.package import PackageRenderer
from longrein.calls.rendering import Renderer, load_tokenizer
from longrein.calls.sessions import Opening, Sessions
from longrein.calls.template import TemplateRenderer
from longrein.records import Cause
from tests.calls.loaded import tokenizer_of
from tests.calls.properties import examples

END = "<|im_end|>"
BASH = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
SYSTEM = Message("system", "You work in a shell.\n")
TASK = Message("user", "  Créate\tthe file 🙂.\r\n\n")


class CountingTokenizer:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._tokenizer(text, **options)

    def encode(self, text: str, *rest: Any, **options: Any) -> list[int]:
        self.characters += len(text)
        ids: list[int] = self._tokenizer.encode(text, *rest, **options)
        return ids


@dataclass
class Talk:
    """A harness and a model, turn by turn."""

    renderer: Renderer
    tokenizer: CountingTokenizer
    tools: tuple[Tool, ...] = ()
    sessions: Sessions = field(init=False)
    told: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.renderer)

    def turn(
        self, messages: Sequence[Message], says: str, *, tools: tuple[Tool, ...] | None = None, whole: bool = True
    ) -> tuple[Opening, Message]:
        """Ask, and record what the model says."""
        opening = self.ask(messages, tools=tools)
        ids = self.tokenizer.encode(says, add_special_tokens=False)
        reply = self.renderer.parse(ids, opening.prompt.ids.tolist(), opening.conversation.tools)
        call_id = f"call-{len(self.told)}"
        self.told[call_id] = [*opening.prompt.ids.tolist(), *ids]
        self.sessions.add(call_id, opening, reply, np.asarray(ids, np.int32), whole=whole)
        return opening, reply

    def ask(self, messages: Sequence[Message], *, tools: tuple[Tool, ...] | None = None) -> Opening:
        opening = self.sessions.open(Conversation(tuple(messages), self.tools if tools is None else tools))
        if opening.parent_id is not None:
            told = self.told[opening.parent_id]
            assert opening.inherited == len(told) and opening.prompt.ids[: len(told)].tolist() == told
        return opening

    def text(self, opening: Opening) -> str:
        return self.renderer.decode(opening.prompt.ids.tolist())


def talk(directory: Path, kind: str, *, tools: tuple[Tool, ...] = (), **keys: Any) -> Talk:
    tokenizer = CountingTokenizer(tokenizer_of(directory))
    renderer: Renderer
    if kind == "package":
        renderer = PackageRenderer(tokenizer, "qwen3", directory, **keys)
    else:
        renderer = TemplateRenderer(tokenizer, directory, tool_format="hermes" if kind == "hermes" else None, **keys)
    return Talk(renderer, tokenizer, tools)


def reserialised(message: Message, turn: int) -> Message:
    """As harnesses play tool calls back: compact, or with keys turned round; reasoning dropped, trimmed or kept."""
    calls = tuple(
        ToolCall(f"x{turn}", c.name, json.dumps(dict(reversed(json.loads(c.arguments).items())), separators=(",", ":")))
        for c in message.tool_calls
    )
    thought = [message.reasoning, None, f" {message.reasoning}\n" if message.reasoning else None][turn % 3]
    return replace(message, tool_calls=calls, reasoning=thought)


ODD = [
    "a  b",
    " lead",
    "trail \n",
    "日本語",
    "🙂é\u200b",
    "\ttab\n\n\n",
    "x" * 50,
    "<b>",
    '"quoted" \\n',
    "naïve\u0301",
]


def tool_turn(i: int) -> str:
    arguments = json.dumps({"command": f"echo '{ODD[i % 10]}'", "why": {"n": i, "deep": [1, None]}}, ensure_ascii=False)
    thinking = f"<think>\nStep {i}: {ODD[(i + 3) % 10].strip()}.\n</think>\n\n" if i % 2 else ""
    said = f"Now {i}." if i % 3 else ""
    return f'{thinking}{said}\n\n<tool_call>\n{{"arguments": {arguments},  "name":"bash"}}\n</tool_call>{END}'


@pytest.mark.parametrize("kind", ["package", "hermes"])
def test_twenty_turns_of_tools_are_one_branch(kind: str, qwen3_directory: Path, tiny_directory: Path) -> None:
    conversed = talk(tiny_directory if kind == "hermes" else qwen3_directory, kind, tools=(BASH,))
    history: list[Message] = [SYSTEM, TASK]
    for i in range(20):
        # Plain text where the model has no thinking: its template would keep it as text anyway.
        says = tool_turn(i) if kind == "package" else tool_turn(i).rpartition("</think>\n\n")[2]
        before = conversed.tokenizer.characters
        opening, reply = conversed.turn(history, says)
        tokenised = conversed.tokenizer.characters - before - len(says)
        assert opening.cause is (Cause.NEW_SESSION if i == 0 else Cause.EXTENDED)
        assert len(reply.tool_calls) == 1
        if i > 0:
            new = sum(len(message.content) for message in history[-1:])
            assert tokenised <= new + len(tool_turn(i - 1)) + 300
        history += [reserialised(reply, i), Message("tool", f"{ODD[i % 10]}{i}\n" * 3, tool_call_id=f"x{i}")]


@pytest.mark.parametrize("kind", ["package", "template", "tiny"])
def test_twenty_turns_of_text_are_one_branch_and_say_what_the_template_says(
    kind: str, qwen3_directory: Path, tiny_directory: Path
) -> None:
    directory = tiny_directory if kind == "tiny" else qwen3_directory
    conversed = talk(directory, kind)
    template = TemplateRenderer(tokenizer_of(directory), directory)
    history: list[Message] = [SYSTEM, TASK]
    counts = []
    for i in range(20):
        # The package's reader trims outer white space of a reply, so only inner white space is odd there.
        says = f"I say {ODD[i % 10]}{i}." if kind == "package" else f"{ODD[i % 10]}{i}{ODD[(i + 1) % 10]}"
        before = conversed.tokenizer.characters
        opening, reply = conversed.turn(history, says + END)
        counts.append(conversed.tokenizer.characters - before)
        assert opening.cause is (Cause.NEW_SESSION if i == 0 else Cause.EXTENDED)
        # Qwen3's tokenizer composes characters.
        shown, expected = conversed.text(opening), template.text(Conversation(tuple(history)))
        assert normalize("NFC", shown) == normalize("NFC", expected)
        history += [reply, Message("user", ODD[(i + 5) % 10] + f" and {i}")]
    assert max(counts[10:]) <= max(counts[1:10]) + 60


@pytest.mark.parametrize("kind", ["package", "template"])
def test_removed_thinking_starts_a_branch_at_the_user_turn_only(kind: str, qwen3_directory: Path) -> None:
    conversed = talk(qwen3_directory, kind, tools=(BASH,))
    history = [SYSTEM, TASK]
    causes = []
    for i in range(9):
        thinking = f"<think>\nThought {i}.\n</think>\n\n"
        call = f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "ls {i}"}}}}\n</tool_call>'
        last = i % 3 == 2
        opening, reply = conversed.turn(history, f"{thinking}Done {i}.{END}" if last else f"{thinking}{call}{END}")
        assert reply.reasoning == f"Thought {i}."
        causes.append(opening.cause)
        if i in (3, 6):
            assert opening.parent_id is None
            assert "Thought 2" not in conversed.text(opening)
        answer = Message("user", f"And now {i}?") if last else Message("tool", f"file{i}\n", tool_call_id="1")
        history += [reply, answer]
    dropped, extended = Cause.TEMPLATE_DROPPED_THINKING, Cause.EXTENDED
    assert causes == [Cause.NEW_SESSION, extended, extended, dropped, extended, extended, dropped, extended, extended]


@pytest.mark.parametrize("kind", ["package", "template"])
def test_kept_thinking_stays_in_the_branch(kind: str, qwen3_directory: Path) -> None:
    conversed = talk(qwen3_directory, kind, keep_thinking=True)
    history = [SYSTEM, TASK]
    for i in range(4):
        opening, reply = conversed.turn(history, f"<think>\nThought {i}.\n</think>\n\nDone {i}.{END}")
        assert opening.cause is (Cause.NEW_SESSION if i == 0 else Cause.EXTENDED)
        # A harness that does not play thinking back keeps it all the same: the tokens are recorded.
        history += [replace(reply, reasoning=None), Message("user", f"And {i}?")]
    assert all(f"Thought {i}." in conversed.text(opening) for i in range(3))


@pytest.mark.parametrize("kind", ["package", "template", "tiny", "hermes"])
def test_a_reply_cut_by_length_is_closed_by_the_template(
    kind: str, qwen3_directory: Path, tiny_directory: Path
) -> None:
    conversed = talk(tiny_directory if kind in ("tiny", "hermes") else qwen3_directory, kind)
    _, reply = conversed.turn([SYSTEM, TASK], "I was about to")
    opening = conversed.ask([SYSTEM, TASK, reply, Message("user", "Go on.")])
    assert opening.cause is Cause.EXTENDED
    assert f"assistant\nI was about to{END}\n<|im_start|>user\nGo on." in conversed.text(opening)


@pytest.mark.parametrize("end", ["", END])
@pytest.mark.parametrize("kind", ["hermes", "package", "template"])
def test_a_call_in_the_models_own_spacing_is_continued(
    kind: str, end: str, qwen3_directory: Path, tiny_directory: Path
) -> None:
    conversed = talk(tiny_directory if kind == "hermes" else qwen3_directory, kind, tools=(BASH,))
    thought = "" if kind == "hermes" else "<think>Hm.</think>"
    says = f'{thought}\n\n<tool_call>{{ "arguments":{{"command":"ls"}},"name":"bash" }}</tool_call>{end}'
    _, reply = conversed.turn([SYSTEM, TASK], says)
    assert len(reply.tool_calls) == 1
    opening = conversed.ask([SYSTEM, TASK, replace(reply, reasoning=None), Message("tool", "a.txt")])
    assert opening.cause is Cause.EXTENDED
    assert f"</tool_call>{END}\n<|im_start|>user\n<tool_response>\na.txt" in conversed.text(opening)


def test_edited_thinking_is_another_history(qwen3_directory: Path) -> None:
    conversed = talk(qwen3_directory, "package", tools=(BASH,))
    _, reply = conversed.turn([SYSTEM, TASK], f"<think>\nHm.\n</think>\n\n{tool_turn(0)}")
    history = [SYSTEM, TASK, replace(reply, reasoning="Ha."), Message("tool", "a.txt")]
    opening = conversed.ask(history)
    assert (opening.cause, opening.parent_id) == (Cause.HISTORY_REWRITTEN, None)


def test_a_template_that_rewrites_its_beginning_is_said_to_change_the_text(tiny_directory: Path) -> None:
    tokenizer = load_tokenizer(tiny_directory)
    tokenizer.chat_template = "Turns: {{ messages | length }}\n" + tokenizer.chat_template
    conversed = Talk(TemplateRenderer(tokenizer, tiny_directory), CountingTokenizer(tokenizer))
    _, reply = conversed.turn([SYSTEM, TASK], f"one{END}")
    opening = conversed.ask([SYSTEM, TASK, reply, Message("user", "a")])
    assert (opening.cause, opening.parent_id) == (Cause.TEXT_CHANGED, None)
    assert conversed.text(opening).startswith("Turns: 4\n")


def test_malformed_calls_are_continued_as_they_were_written(tiny_directory: Path) -> None:
    conversed = talk(tiny_directory, "hermes", tools=(BASH,))
    broken = 'Well.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>'
    _, reply = conversed.turn([SYSTEM, TASK], broken + END)
    opening = conversed.ask([SYSTEM, TASK, reply, Message("user", "No such call.")])
    assert opening.cause is Cause.EXTENDED


def test_deleted_turns_go_on_from_the_turn_before(tiny_directory: Path) -> None:
    conversed = talk(tiny_directory, "tiny")
    history = [SYSTEM, TASK]
    first, good = conversed.turn(history, f"good{END}")
    history += [good, Message("user", "next")]
    _, _ = conversed.turn(history, f"bad{END}")
    # mini-swe-agent's way: the failed turn vanishes, an error takes its place.
    opening, _ = conversed.turn([*history, Message("user", "format error")], f"better{END}")
    assert (opening.cause, opening.parent_id) == (Cause.HISTORY_REWRITTEN, "call-0")
    deleted_first = conversed.ask([SYSTEM, TASK, Message("user", "format error")])
    assert (deleted_first.cause, deleted_first.parent_id) == (Cause.HISTORY_REWRITTEN, None)
    again = conversed.ask([SYSTEM, TASK])
    assert (again.cause, again.parent_id) == (Cause.HISTORY_REWRITTEN, None)
    assert again.prompt.ids.tolist() == first.prompt.ids.tolist()
    assert conversed.ask([SYSTEM, Message("user", "another task")]).cause is Cause.NEW_SESSION


def test_changed_tools_start_a_branch(tiny_directory: Path) -> None:
    conversed = talk(tiny_directory, "hermes", tools=(BASH,))
    _, reply = conversed.turn([SYSTEM, TASK], f"ok{END}")
    more = (BASH, Tool("look", "Looks."))
    history = [SYSTEM, TASK, reply, Message("user", "next")]
    opening, _ = conversed.turn(history, f"fine{END}", tools=more)
    assert (opening.cause, opening.parent_id) == (Cause.TOOLS_CHANGED, None)
    back = conversed.ask(history)
    assert (back.cause, back.parent_id) == (Cause.EXTENDED, "call-0")


def test_a_template_that_trims_is_said_to_change_the_text(tiny_directory: Path) -> None:
    tokenizer = load_tokenizer(tiny_directory)
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content'] }}", "m['content'] | trim }}")
    conversed = Talk(TemplateRenderer(tokenizer, tiny_directory), CountingTokenizer(tokenizer))
    _, reply = conversed.turn([SYSTEM, TASK], f"kept{END}")
    history = [SYSTEM, TASK, reply, Message("user", "a")]
    opening, reply = conversed.turn(history, f"  trimmed {END}")
    assert opening.cause is Cause.EXTENDED
    assert reply.content == "  trimmed "
    changed = conversed.ask([*history, reply, Message("user", "b")])
    assert (changed.cause, changed.parent_id) == (Cause.TEXT_CHANGED, None)


def test_a_reply_cut_at_a_stop_text_is_not_continued(tiny_directory: Path) -> None:
    conversed = talk(tiny_directory, "tiny")
    _, reply = conversed.turn([SYSTEM, TASK], "Answer: 4 STOP", whole=False)
    opening = conversed.ask([SYSTEM, TASK, reply, Message("user", "b")])
    assert (opening.cause, opening.parent_id) == (Cause.TEXT_CHANGED, None)


def test_undelivered_replies_are_not_continued(tiny_directory: Path) -> None:
    conversed = talk(tiny_directory, "tiny")
    _, reply = conversed.turn([SYSTEM, TASK], f"lost{END}")
    conversed.sessions.forget("call-0")
    opening = conversed.ask([SYSTEM, TASK, reply, Message("user", "b")])
    assert opening.parent_id is None


def test_demonstrations_stay_in_front_of_every_turn(tiny_directory: Path) -> None:
    shown = (Message("user", "Say A"), Message("assistant", "A"))
    conversed = talk(tiny_directory, "tiny", demonstrations=shown)
    _, reply = conversed.turn([SYSTEM, TASK], f"B{END}")
    opening = conversed.ask([SYSTEM, TASK, reply, Message("user", "C")])
    assert opening.cause is Cause.EXTENDED
    assert conversed.text(opening).count("Say A") == 1


@examples(60)
@given(data=st.data())
def test_any_text_continues_and_shows_what_the_template_shows(tiny_directory: Path, data: st.DataObject) -> None:
    texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30).filter(
        lambda text: "<" not in text and "\ufffd" not in text
    )
    conversed = talk(tiny_directory, "tiny")
    assert isinstance(conversed.renderer, TemplateRenderer)
    history = [SYSTEM, Message("user", data.draw(texts))]
    for i in range(data.draw(st.integers(1, 4))):
        opening, reply = conversed.turn(history, data.draw(texts) + data.draw(st.sampled_from(["", END])))
        assert opening.cause is (Cause.NEW_SESSION if i == 0 else Cause.EXTENDED)
        assert conversed.text(opening) == conversed.renderer.text(Conversation(tuple(history)))
        history += [reply, Message("user", data.draw(texts))]
