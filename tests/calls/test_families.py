# ruff: noqa: RUF001 (DeepSeek writes its tokens with a full-width bar)
"""Each family of models in its own form: calls and thinking are read, turns go on, system messages are shown."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.calls.conversation import Conversation, Message, Tool, ToolCall, same_message
from longrein.calls.package import PackageRenderer
from longrein.calls.rendering import Prompt, Recorded, Renderer, SystemPlaces, check_renderer, open_renderer
from longrein.calls.reply import GrowingReply
from longrein.calls.sessions import Opening, Sessions
from longrein.calls.template import TemplateRenderer
from longrein.config import ModelSection
from longrein.errors import InvalidRequest, ModelError
from longrein.records import Cause
from tests.calls import families
from tests.calls.loaded import tokenizer_of
from tests.calls.properties import examples
from tests.calls.spoken import (
    BASH,
    EACH,
    EXTENDED,
    FAMILIES,
    NEW,
    NOTE,
    TOKENIZERS,
    Opened,
    encoded,
    harmony_call,
    harmony_turn,
    hermes_call,
)

SYSTEM = Message("system", "You work in a shell.")
TASK = Message("user", "Créate\tthe  file 🙂.\r\n\nNow")

# Odd in Unicode and white space; none begins or ends with white space, which templates trim.
ARGUMENTS: list[dict[str, Any]] = [
    {"command": "echo '日本語  🙂\t“é”' > a.txt", "seconds": 5},
    {"command": "cat <<'E'\n  two\n\n\tlines \nE"},
    {"command": "printf '%s\\n' \"a\\\\b\""},
]
RESULTS = ["naïve\u0301 🙂\n\n\tend", 'a  b\r\n{"name": 1}']


def shown(renderer: Renderer, *messages: Message) -> str:
    return renderer.decode(renderer.render(Conversation(messages, (BASH,))).ids.tolist())


def read(renderer: Renderer, says: str, tools: tuple[Tool, ...] = (BASH,)) -> Message:
    prompt = renderer.render(Conversation((SYSTEM, TASK), tools)).ids.tolist()
    return renderer.parse(encoded(renderer, says), prompt, tools)


class Talk:
    """A harness and a model, turn by turn."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.sessions = Sessions(renderer)
        self.told: dict[str, list[int]] = {}

    def ask(self, history: list[Message]) -> Opening:
        """An opening whose prompt begins with the tokens it says it goes on from."""
        opening = self.sessions.open(Conversation(tuple(history), (BASH,)))
        assert (opening.parent_id is None) == (opening.cause not in (EXTENDED, Cause.HISTORY_REWRITTEN))
        if opening.parent_id is not None:
            told = self.told[opening.parent_id]
            assert opening.inherited == len(told) and opening.prompt.ids[: len(told)].tolist() == told
            added = self.renderer.decode(opening.prompt.ids[len(told) :].tolist())
            afresh = self.renderer.decode(self.renderer.render(Conversation(tuple(history), (BASH,))).ids.tolist())
            assert added.strip() and afresh.endswith(added.lstrip("\n"))
        return opening

    def turn(self, history: list[Message], says: str) -> tuple[Opening, Message]:
        opening = self.ask(history)
        ids = encoded(self.renderer, says)
        reply = self.renderer.parse(ids, opening.prompt.ids.tolist(), (BASH,))
        reply = replace(
            reply, tool_calls=tuple(replace(call, call_id=f"c{i}") for i, call in enumerate(reply.tool_calls))
        )
        call_id = f"call-{len(self.told)}"
        self.told[call_id] = [*opening.prompt.ids.tolist(), *ids]
        self.sessions.add(call_id, opening, reply, np.asarray(ids, np.int32), whole=True)
        return opening, reply


def played_back(reply: Message) -> Message:
    """As harnesses do: arguments spelt anew with their keys turned round, ids their own."""
    calls = tuple(
        ToolCall("mine", c.name, json.dumps(dict(reversed(json.loads(c.arguments).items())), separators=(",", ":")))
        for c in reply.tool_calls
    )
    return replace(reply, tool_calls=calls)


@EACH
def test_the_family_is_opened_with_its_stop_tokens(name: str, opened: Opened) -> None:
    renderer = opened(name)
    by_template = "tool_format" in FAMILIES[name].keys
    assert isinstance(renderer, TemplateRenderer if by_template else PackageRenderer)
    assert {renderer.decode([i]) for i in renderer.stop_ids} == FAMILIES[name].stops
    assert by_template or f"renderers: {name} " in check_renderer(renderer)
    text = shown(renderer, SYSTEM, TASK)
    assert "Runs a command." in text and SYSTEM.content in text and "Créate" in text


@EACH
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_call_in_the_familys_form_is_read(name: str, arguments: dict[str, Any], opened: Opened) -> None:
    family, renderer = FAMILIES[name], opened(name)
    reply = read(renderer, family.turn("I think.", "I look.", family.call(arguments)))
    assert [(c.name, json.loads(c.arguments)) for c in reply.tool_calls] == [("bash", arguments)]
    assert reply.content == ("I look." if family.says else "")
    assert reply.reasoning == ("I think." if family.thinks else None)


@EACH
def test_a_turn_without_a_call_is_text_and_thinking(name: str, opened: Opened) -> None:
    family = FAMILIES[name]
    reply = read(opened(name), family.turn("Hm “é”\n\n  so.", "It is\n  naïve 🙂.", ""))
    assert reply == Message("assistant", "It is\n  naïve 🙂.", reasoning="Hm “é”\n\n  so." if family.thinks else None)


@EACH
def test_a_malformed_call_stays_text(name: str, opened: Opened) -> None:
    family, renderer = FAMILIES[name], opened(name)
    reply = read(renderer, family.turn("I think.", "I look.", family.broken))
    assert reply.tool_calls == ()
    # What frames a call is not always kept.
    frames = {"gpt-oss": '{"command": "ls', "deepseek-v4": family.broken.partition("tool_calls>\n")[2]}
    broken = frames.get(name, family.broken)
    assert broken in reply.content
    assert "command" in reply.content


@EACH
def test_a_call_is_text_where_no_tools_were_offered(name: str, opened: Opened) -> None:
    family, renderer = FAMILIES[name], opened(name)
    reply = read(renderer, family.turn("I think.", "", family.call({"command": "ls"})), ())
    assert reply.tool_calls == ()
    assert "bash" in reply.content


@EACH
@pytest.mark.parametrize("keep", [False, True])
def test_turns_go_on_from_recorded_tokens_or_say_why_not(name: str, keep: bool, opened: Opened) -> None:
    family, talk = FAMILIES[name], Talk(opened(name, keep_thinking=keep))
    history, causes = [SYSTEM, TASK], []
    for i in range(4):
        call = "" if i == 2 else family.call(ARGUMENTS[i % 3])
        opening, reply = talk.turn(history, family.turn(f"Step {i}: é.", "Done  so." if i == 2 else f"Now {i}.", call))
        causes.append(opening.cause)
        assert len(reply.tool_calls) == (i != 2)
        answer = Message("tool", RESULTS[i % 2], tool_call_id="mine") if call else Message("user", "And  now “so”?")
        history += [played_back(reply), answer]
    last = talk.ask(history)
    kept = (NEW, EXTENDED, EXTENDED, EXTENDED)
    assert (*causes, last.cause) == ((*kept, EXTENDED) if keep else (*family.causes, family.causes[1]))


@EACH
def test_a_reply_cut_by_length_is_closed(name: str, opened: Opened) -> None:
    talk = Talk(opened(name))
    family = FAMILIES[name]
    stop = next(text for text in family.stops if family.turn("", "a", "").endswith(text))
    _, reply = talk.turn([SYSTEM, TASK], family.turn("Hm.", "I was about to", "").removesuffix(stop))
    assert reply.content == "I was about to"
    opening = talk.sessions.open(Conversation((SYSTEM, TASK, reply, Message("user", "Go on.")), (BASH,)))
    text = talk.renderer.decode(opening.prompt.ids.tolist())
    assert text.count("I was about to") == text.count("Go on.") == 1


@EACH
def test_a_system_message_in_the_middle_is_shown_where_it_stands(name: str, opened: Opened) -> None:
    family, talk = FAMILIES[name], Talk(opened(name, keep_thinking=True))
    note = Message("system", NOTE)
    _, reply = talk.turn([SYSTEM, TASK], family.turn("Hm.", "", family.call({"command": "ls"})))
    history = [SYSTEM, TASK, played_back(reply), Message("tool", "one.txt", tool_call_id="mine"), note]
    opening, reply = talk.turn(history, family.turn("Hm.", "So.", ""))
    assert opening.cause is EXTENDED
    text = talk.renderer.decode(opening.prompt.ids.tolist())
    assert family.note in text
    assert text.count(NOTE) == 1 and text.index("one.txt") < text.index(NOTE)
    assert family.note in shown(talk.renderer, *history)
    # The recorded conversation has it as it was sent.
    assert opening.conversation.messages[-1] == note
    assert talk.ask([*history, played_back(reply), Message("user", "Go on.")]).cause is EXTENDED


@EACH
def test_system_messages_are_shown_wherever_they_stand(name: str, opened: Opened) -> None:
    renderer = opened(name)
    note = Message("system", NOTE)
    for messages in ((SYSTEM, note, TASK), (TASK, Message("assistant", "So."), note, Message("user", "Go on."))):
        text = shown(renderer, *messages)
        places = [text.index(message.content.split("\t")[0]) for message in messages]
        assert places == sorted(places)
        assert text.count(NOTE) == 1


@pytest.mark.parametrize("template", [families.REFUSING_TEMPLATE, families.GATHERING_TEMPLATE])
def test_a_template_that_would_not_show_it_there_shows_the_users_word(template: str, tmp_path: Path) -> None:
    directory = families.small_tokenizer(tmp_path, ["<|im_start|>", "<|im_end|>"], "<|im_end|>", template)
    renderer = open_renderer(directory, ModelSection(path=str(directory), tool_format="hermes"))
    TOKENIZERS[renderer] = tokenizer_of(directory)
    talk = Talk(renderer)
    _, reply = talk.turn([SYSTEM, TASK], f"{hermes_call({'command': 'ls'})}<|im_end|>")
    history = [SYSTEM, TASK, reply, Message("tool", "one.txt", tool_call_id="c0"), Message("system", NOTE)]
    opening = talk.ask(history)
    assert opening.cause is EXTENDED
    assert talk.renderer.decode(opening.prompt.ids.tolist()).endswith(
        f"one.txt\n</tool_response><|im_end|>\n<|im_start|>user\n<system>\n{NOTE}\n</system><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_places_of_system_messages_are_tried() -> None:
    def plain(messages: Any) -> str:
        return "".join(f"[{m.role}]{m.content}" for m in messages)

    def refusing(messages: Any) -> str:
        if any(m.role == "system" for m in messages[1:]):
            raise InvalidRequest("no", param="messages")
        return plain(messages)

    def gathering(messages: Any) -> str:
        return plain(sorted(messages, key=lambda m: m.role != "system"))

    def unmarked(messages: Any) -> str:
        return plain(messages).replace("[system]", "[user]")

    def silent(messages: Any) -> str:
        return plain([m for i, m in enumerate(messages) if i == 0 or m.role != "system"])

    assert SystemPlaces.tried(plain) == SystemPlaces(True, True, True)
    assert SystemPlaces.tried(gathering) == SystemPlaces(True, False, False)
    for text_of in (refusing, unmarked, silent):
        assert SystemPlaces.tried(text_of) == SystemPlaces(False, False, False)


@EACH
def test_results_of_two_calls_are_shown_in_order(name: str, opened: Opened) -> None:
    if name in ("llama-3", "gpt-oss"):
        pytest.skip("one call a turn is all that the family's form holds")
    family, talk = FAMILIES[name], Talk(opened(name))
    calls = (
        family.call({"command": "one"})
        + "\n" * (name in ("qwen3", "chatml", "deepseek-v3"))
        + family.call({"command": "two"})
    )
    if name == "deepseek-v4":
        calls = calls.replace("</｜DSML｜tool_calls>\n\n<｜DSML｜tool_calls>\n", "")
    _, reply = talk.turn([SYSTEM, TASK], family.turn("Hm.", "", calls))
    assert [json.loads(call.arguments)["command"] for call in reply.tool_calls] == ["one", "two"]
    results = [Message("tool", f"result {i}", tool_call_id=f"c{i}") for i in range(2)]
    after = talk.ask([SYSTEM, TASK, reply, *results])
    text = talk.renderer.decode(after.prompt.ids.tolist())
    assert text.index("result 0") < text.index("result 1")
    assert after.cause is EXTENDED


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.6"])
def test_a_call_in_open_thinking_is_told_when_the_reply_is_whole(name: str, opened: Opened) -> None:
    family, renderer = FAMILIES[name], opened(name)
    prompt = renderer.render(Conversation((SYSTEM, TASK), (BASH,))).ids.tolist()
    ids = encoded(renderer, "I could say\n" + family.call({"command": "ls"}))
    assert renderer.parse(ids, prompt, (BASH,), final=False).tool_calls == ()
    assert [call.name for call in renderer.parse(ids, prompt, (BASH,)).tool_calls] == ["bash"]
    closed = [*ids, *encoded(renderer, "</think>So.")]
    assert renderer.parse(closed, prompt, (BASH,)).tool_calls == ()


def test_harmony_results_carry_the_name_of_their_function(opened: Opened) -> None:
    renderer = opened("gpt-oss")
    called = Message("assistant", "", (ToolCall("a", "bash", "{}"), ToolCall("b", "look", "{}")))
    results = (Message("tool", "B", tool_call_id="b"), Message("tool", "A", tool_call_id="other"))
    text = shown(renderer, SYSTEM, TASK, called, *results)
    assert "<|start|>functions.look to=assistant<|channel|>commentary<|message|>B<|end|>" in text
    assert "<|start|>functions.bash to=assistant<|channel|>commentary<|message|>A<|end|>" in text
    recorded = Recorded(
        Conversation((SYSTEM, TASK, called), (BASH,)),
        renderer.render(Conversation((SYSTEM, TASK), (BASH,))),
        np.asarray(encoded(renderer, harmony_turn("Hm.", "", harmony_call({}))), np.int32),
    )
    extended = renderer.extend(recorded, Conversation((SYSTEM, TASK, called, *results), (BASH,)))
    assert isinstance(extended, Prompt)
    assert renderer.decode(extended.ids.tolist()).count("functions.look to=assistant") == 1


@EACH
@examples(60)
@given(data=st.data())
def test_what_was_told_of_a_growing_reply_begins_the_finished_one(
    name: str, opened: Opened, data: st.DataObject
) -> None:
    family, renderer = FAMILIES[name], opened(name)
    call = family.call({"command": "echo “é 🙂”"})
    stop = sorted(family.stops)[0]
    whole_turn = family.turn("Hm.", "I say.", call).removesuffix(stop)
    pieces = [call, family.broken, "text 🙂", " \n", "</think>", "<think>", "{", "\n\n", whole_turn, stop, call[:12]]
    says = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=6)))
    tools = data.draw(st.sampled_from([(), (BASH,)]))
    ids = encoded(renderer, says)
    end = next((i for i, token in enumerate(ids) if token in renderer.stop_ids), len(ids) - 1)
    ids = ids[: end + 1]
    prompt = renderer.render(Conversation((SYSTEM, TASK), tools)).ids.tolist()
    whole = renderer.parse(ids, prompt, tools)
    growing = GrowingReply(renderer, prompt, tools, (), live=True, pace_s=0)
    deltas = []
    while ids:
        size = data.draw(st.integers(1, len(ids)))
        deltas.append(growing.grow(ids[:size]))
        ids = ids[size:]
    message, rest = growing.finish()
    assert same_message(message, whole)
    known = [delta for delta in [*deltas, rest] if delta is not None]
    assert "".join(delta.content for delta in known) == message.content
    assert "".join(delta.reasoning for delta in known) == (message.reasoning or "")
    assert [call.name for delta in known for call in delta.calls] == [call.name for call in message.tool_calls]


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-r1"])
def test_deepseeks_own_form_is_refused_tools_but_goes_on(name: str) -> None:
    directory = families.deepseek_directory()
    renderer = open_renderer(directory, ModelSection(path=str(directory), renderer=name, keep_thinking=True))
    assert "tools refused" in check_renderer(renderer)
    with pytest.raises(InvalidRequest, match=r"model\.tool_format: hermes") as caught:
        renderer.render(Conversation((SYSTEM, TASK), (BASH,)))
    assert caught.value.param == "tools"
    thought = "I think.\n</think>\n\n" if name == "deepseek-r1" else ""
    asked = renderer.render(Conversation((SYSTEM, TASK)))
    ids = tokenizer_of(directory).encode(f"{thought}It is  so.<｜end▁of▁sentence｜>", add_special_tokens=False)
    reply = renderer.parse(ids, asked.ids.tolist(), ())
    assert reply == Message("assistant", "It is  so.", reasoning="I think." if thought else None)
    said = Conversation((SYSTEM, TASK, reply))
    extended = renderer.extend(
        Recorded(said, asked, np.asarray(ids, np.int32)), said.followed_by([Message("system", NOTE)])
    )
    assert isinstance(extended, Prompt)
    assert f"so.<｜end▁of▁sentence｜><｜User｜><system>\n{NOTE}\n</system><｜Assistant｜>" in renderer.decode(
        extended.ids.tolist()
    )


def test_llamas_template_is_recognised_with_its_day(tmp_path: Path) -> None:
    directory = families.small_tokenizer(tmp_path, families.LLAMA, "<|eot_id|>", families.LLAMA_TEMPLATE)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    renderer = open_renderer(directory, ModelSection(path=str(directory)))
    assert "llama-3 (agrees with" in renderer.describe()
    assert f"Today Date: {datetime.now():%d %b %Y}\n\nYou work" in shown(renderer, SYSTEM, TASK)


def test_harmony_without_its_vocabulary_says_what_is_missing(tmp_path: Path) -> None:
    directory = families.small_tokenizer(tmp_path, families.HARMONY, "<|return|>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path / "absent"))
        with pytest.raises(ModelError, match=r"gpt-oss does not fit"):
            open_renderer(directory, ModelSection(path=str(directory), renderer="gpt-oss"))
