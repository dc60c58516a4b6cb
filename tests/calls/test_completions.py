"""Legacy completions: a bare text, continued token for token."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from longrein.calls.completions import CompletionsDialect
from longrein.calls.dialect import Ask, Target
from longrein.errors import InvalidRequest
from longrein.records import Cause
from tests.calls.scripted_engine import told
from tests.calls.serving import END, House, serving

DIALECT = CompletionsDialect()


def client(house: House, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=house.url, api_key=key, max_retries=0)


def read(body: dict[str, Any]) -> Ask:
    return DIALECT.read(body, Target())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_goes_on_token_for_token(stream: bool, tiny_directory: Path) -> None:
    async with serving(tiny_directory, "two", "four") as house, client(house, house.open()) as model:
        house.engine.lines[0].ids.pop()

        async def go_on(text: str) -> str:
            if not stream:
                return (await model.completions.create(model="m", prompt=text)).choices[0].text
            chunks = await model.completions.create(
                model="m", prompt=text, stream=True, stream_options={"include_usage": True}
            )
            return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])

        text = "one "
        text += await go_on(text)
        assert text == "one two"
        assert await go_on(text + " three ") == "four"
        one, two = house.notebook.calls
        assert (one.cause, one.finish_reason, one.dialect) == (Cause.NEW_SESSION, "length", "completions")
        assert (two.cause, two.parent_id, two.finish_reason) == (Cause.EXTENDED, one.call_id, "stop")
        assert two.prompt_ids[: len(told(one))].tolist() == told(one)
        # No template, no roles: the very text.
        assert [house.shown(i) for i in range(2)] == ["one ", "one two three "]


async def test_tokens_that_the_text_does_not_show_are_not_gone_on_from(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "two", " a stop b", "x") as house, client(house, house.open()) as model:
        await model.completions.create(model="m", prompt="one ")
        cut = await model.completions.create(model="m", prompt="one two three", stop="stop")
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == (" a ", "stop")
        await model.completions.create(model="m", prompt="one two three a ")
        one, two, three = house.notebook.calls
        # The stop token ended the first reply, the stop text the second; the text goes on without either.
        assert (two.cause, two.parent_id) == (Cause.TEXT_CHANGED, None)
        assert two.prompt_ids[: len(told(one)) - 1].tolist() == told(one)[:-1]
        assert (three.cause, three.parent_id) == (Cause.TEXT_CHANGED, None)
        assert three.prompt_ids[: len(two.prompt_ids)].tolist() == two.prompt_ids.tolist()
        assert house.shown(2) == "one two three a "


async def test_ids_are_taken_and_told_as_they_are(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "two", "three") as house, client(house, house.open()) as model:
        given = house.tokenizer.encode("one ")
        body: Any = {"return_token_ids": True}
        first = await model.completions.create(model="m", prompt=[given], logprobs=0, extra_body=body)
        choice: Any = first.choices[0]
        assert choice.prompt_token_ids == given
        assert choice.token_ids == house.tokenizer.encode(f"two{END}")
        assert choice.logprobs.token_logprobs == house.notebook.calls[0].logprobs.tolist()
        assert "".join(choice.logprobs.tokens) == f"two{END}"
        assert choice.logprobs.text_offset[0] == 0
        await model.completions.create(model="m", prompt=[*given, *choice.token_ids, *given])
        one, two = house.notebook.calls
        assert two.prompt_ids.tolist() == [*told(one), *given]
        with pytest.raises(openai.BadRequestError, match="expected token ids of the model, 0 to"):
            await model.completions.create(model="m", prompt=[*given, len(house.tokenizer)])
        assert len(house.engine.requests) == 2


async def test_a_second_way_on_from_the_same_text_is_told_apart(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "two") as house, client(house, house.open()) as model:
        house.engine.lines[0].ids.pop()
        for prompt in ("one ", "one two three ", "one two four "):
            await model.completions.create(model="m", prompt=prompt)
        causes = [call.cause for call in house.notebook.calls]
        assert causes == [Cause.NEW_SESSION, Cause.EXTENDED, Cause.HISTORY_REWRITTEN]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 2}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.param == param


def test_what_openai_says_holds_where_the_request_is_silent() -> None:
    ask = read({"prompt": ["a"], "n": 1, "echo": False})
    assert (ask.text, ask.max_tokens, ask.logprobs, ask.stream) == ("a", 16, False, False)


async def test_replies_are_of_the_official_type(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "two") as house, client(house, house.open()) as model:
        raw = await model.completions.with_raw_response.create(model="any", prompt="one")
        reply = Completion.model_validate(json.loads(raw.text))
        assert (reply.object, reply.model, reply.id[:5]) == ("text_completion", "any", "cmpl-")
        assert reply.usage is not None
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_the_longest_text_is_gone_on_from_whatever_its_tokens(qwen3_directory: Path) -> None:
    async with serving(qwen3_directory) as house, client(house, house.open()) as model:
        letters = [i for letter in " to the" for i in house.tokenizer.encode(letter)]
        longer = house.tokenizer.encode(" to the market")
        assert len(longer) < len(letters)
        for ids in (longer, letters):
            house.engine.say(ids)
        for prompt in ("go", "go", "go to the market now"):
            await model.completions.create(model="m", prompt=prompt, max_tokens=50)
        first, _, third = house.notebook.calls
        assert (third.cause, third.parent_id) == (Cause.EXTENDED, first.call_id)
        assert third.prompt_ids[: len(told(first))].tolist() == told(first)


async def test_a_tokenizer_that_puts_a_space_in_front_is_shown_the_very_text(tmp_path: Path) -> None:
    letters = {letter: i for i, letter in enumerate(["<unk>", "</s>", *"▁abcdefghijklmnopqrstuvwxyz:"])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    saved.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    saved.save_pretrained(tmp_path)
    async with serving(tmp_path) as house, client(house, house.open()) as model:
        house.engine.say([letters[letter] for letter in "two"])
        for prompt in ("one ", "one two three", "one twofold"):
            await model.completions.create(model="m", prompt=prompt)
        assert [house.shown(i) for i in range(3)] == ["one ", "one two three", "one twofold"]
        causes = [(call.cause, call.parent_id) for call in house.notebook.calls]
        assert causes == [(Cause.NEW_SESSION, None), (Cause.TEXT_CHANGED, None), (Cause.TEXT_CHANGED, None)]
