"""What holds in every dialect: signs of life, hang-ups, repeats, refusals in the client's own terms."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.calls.routes import CHAT, COMPLETIONS, GEMINI, MESSAGES, RESPONSES
from tests.calls.properties import examples
from tests.calls.serving import House, serving
from tests.calls.test_bodies import anything


@dataclass(frozen=True)
class Speaker:
    """How a client of one dialect asks.

    Attributes:
        said: the text of a whole reply.
        alive: what a waiting stream is sent.
        message: the message of an error.
    """

    name: str
    path: Callable[[bool], str]
    body: Callable[[str, bool], dict[str, Any]]
    said: Callable[[Any], str]
    alive: bytes
    message: Callable[[Any], str] = lambda error: error["error"]["message"]


def _flagged(field: str) -> Callable[[str, bool], dict[str, Any]]:
    return lambda text, stream: {"model": "m", field: [{"role": "user", "content": text}], "stream": stream}


SPEAKERS = (
    Speaker(
        CHAT.name,
        lambda stream: "/v1/chat/completions",
        _flagged("messages"),
        lambda reply: reply["choices"][0]["message"]["content"],
        b": keep-alive\n\n",
    ),
    Speaker(
        COMPLETIONS.name,
        lambda stream: "/v1/completions",
        lambda text, stream: {"model": "m", "prompt": text, "stream": stream},
        lambda reply: reply["choices"][0]["text"],
        b": keep-alive\n\n",
    ),
    Speaker(
        RESPONSES.name,
        lambda stream: "/v1/responses",
        _flagged("input"),
        lambda reply: reply["output"][-1]["content"][0]["text"],
        b": keep-alive\n\n",
    ),
    Speaker(
        MESSAGES.name,
        lambda stream: "/v1/messages?beta=true",
        _flagged("messages"),
        lambda reply: reply["content"][-1]["text"],
        b"event: ping\n",
    ),
    Speaker(
        GEMINI.name,
        lambda stream: f"/v1beta/models/m:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}",
        lambda text, stream: {"contents": [{"role": "user", "parts": [{"text": text}]}]},
        lambda reply: reply["candidates"][0]["content"]["parts"][-1]["text"],
        b"\n",
    ),
)

BY_NAME = {speaker.name: speaker for speaker in SPEAKERS}

speaking = pytest.mark.parametrize("speaker", SPEAKERS, ids=lambda speaker: speaker.name)
either = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def post(house: House, key: str, speaker: Speaker, text: str = "Hi.", *, stream: bool = False) -> httpx.Response:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=20) as http:
        body = json.dumps(speaker.body(text, stream))
        return await http.post(f"{house.gateway.url}{speaker.path(stream)}", content=body)


@speaking
@either
async def test_a_call_at_the_closed_gate_shows_life_and_is_answered(
    speaker: Speaker, stream: bool, tiny_directory: Path
) -> None:
    async with serving(tiny_directory, "hello", gateway={"keepalive_s": 0.02}) as house:
        key = house.open()
        await house.gateway.pause(1)
        asked = asyncio.create_task(post(house, key, speaker, stream=stream))
        await asyncio.sleep(0.3)
        assert not asked.done() and not house.engine.requests
        house.gateway.resume()
        reply = await asked
        assert reply.status_code == 200
        if stream:
            assert reply.content.count(speaker.alive) >= 3
            await house.until(lambda: list(house.notebook.delivered.values()) == [True])
        else:
            assert reply.content.startswith(b"   ")
            assert speaker.said(reply.json()) == "hello"


@speaking
async def test_a_hang_up_ends_the_sample_and_is_kept_as_an_orphan(speaker: Speaker, tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two three", "again") as house:
        house.engine.lines[0].hold()
        key = house.open()
        asked = asyncio.create_task(post(house, key, speaker, stream=True))
        await house.until(lambda: house.engine.running == 1)
        asked.cancel()
        await house.until(lambda: house.engine.running == 0 and bool(house.notebook.calls))
        orphan = house.notebook.calls[0]
        assert (orphan.delivered, orphan.finish_reason, orphan.dialect) == (False, "cancelled", speaker.name)
        assert speaker.said((await post(house, key, speaker)).json()) == "again"


@speaking
@either
async def test_the_same_request_twice_at_once_is_one_call(speaker: Speaker, stream: bool, tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two three") as house:
        held = house.engine.lines[0].hold()
        key = house.open()
        both = [asyncio.create_task(post(house, key, speaker, stream=stream)) for _ in range(2)]
        await house.until(lambda: house.engine.running == 1)
        await asyncio.sleep(0.2)
        held.set()
        one, other = [(await asked).content for asked in both]
        assert one == other
        assert len(house.engine.requests) == len(house.notebook.calls) == 1


@speaking
@either
async def test_refusals_are_in_the_clients_own_terms(speaker: Speaker, stream: bool, tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hello", gateway={"max_calls": 1}) as house:
        stranger = await post(house, "lr-nobody", speaker, stream=stream)
        assert stranger.status_code == 401
        assert "key" in speaker.message(stranger.json())
        key = house.open()
        assert (await post(house, key, speaker, stream=stream)).status_code == 200
        spent = await post(house, key, speaker, "Again.", stream=stream)
        assert spent.status_code == 403
        assert "gateway.max_calls" in speaker.message(spent.json())


@speaking
async def test_a_full_queue_says_when_to_come_back(speaker: Speaker, tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two", "three", gateway={"queue": 1}) as house:
        held = house.engine.lines[0].hold()
        key = house.open()
        first = asyncio.create_task(post(house, key, speaker))
        await house.until(lambda: house.engine.running == 1)
        refused = await post(house, key, speaker, "Other.")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert speaker.message(refused.json())
        held.set()
        assert (await first).status_code == 200
        assert (await post(house, key, speaker, "Other.")).status_code == 200


@speaking
async def test_a_prompt_that_is_too_long_is_refused_and_not_sampled(speaker: Speaker, tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hello", context_length=64) as house:
        refused = await post(house, house.open(), speaker, "word " * 100)
        assert refused.status_code == 400
        assert "64" in speaker.message(refused.json())
        assert not house.engine.requests


async def test_what_was_left_out_of_a_request_is_said(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hello") as house:
        body = BY_NAME["responses"].body("Hi.", False) | {"tools": [{"type": "web_search"}]}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {house.open()}"}) as http:
            reply = await http.post(f"{house.url}/responses", content=json.dumps(body))
        assert "web_search" in reply.headers["longrein-dropped"]
        assert "longrein-dropped" not in (await post(house, house.open("r1"), BY_NAME["responses"])).headers


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FORMS: dict[str, dict[str, Any]] = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "gemini": {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}},
}
LOOSE: dict[str, dict[str, Any]] = {
    "chat": {"response_format": {"type": "json_object"}},
    "responses": {"text": {"format": {"type": "json_object"}}},
    "gemini": {"generationConfig": {"responseMimeType": "application/json"}},
}
CHOICES: dict[str, list[dict[str, Any]]] = {
    "chat": [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "bash"}}}],
    "responses": [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "name": "bash"}}],
    "messages": [{"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "tool", "name": "bash"}}],
    "gemini": [{"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}],
}


async def ask(house: House, key: str, speaker: Speaker, wishes: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=20) as http:
        body = speaker.body("Where?", False) | wishes
        return await http.post(f"{house.gateway.url}{speaker.path(False)}", content=json.dumps(body))


@pytest.mark.parametrize("name", FORMS)
async def test_a_form_is_told_to_the_model_and_not_enforced(name: str, tiny_directory: Path) -> None:
    async with serving(tiny_directory, "no JSON at all") as house:
        key = house.open()
        reply = await ask(house, key, BY_NAME[name], FORMS[name])
        assert reply.status_code == 200, reply.text
        assert BY_NAME[name].said(reply.json()) == "no JSON at all"
        assert "not enforced" in reply.headers["longrein-dropped"]
        assert json.dumps(SCHEMA) in house.shown(0)
        assert house.shown(0).index(json.dumps(SCHEMA)) < house.shown(0).index("Where?")
        # Any JSON object will do.
        if name in LOOSE:
            loose = await ask(house, key, BY_NAME[name], LOOSE[name])
            assert loose.status_code == 200
            assert "one JSON object" in house.shown(1)


@pytest.mark.parametrize("name", CHOICES)
async def test_a_forced_call_is_not_forced_and_that_is_said(name: str, tiny_directory: Path) -> None:
    async with serving(tiny_directory, "rather not", model={"tool_format": "hermes"}) as house:
        for choice in CHOICES[name]:
            reply = await ask(house, house.open(str(choice)), BY_NAME[name], choice)
            assert reply.status_code == 200, reply.text
            assert BY_NAME[name].said(reply.json()) == "rather not"
            assert "chooses freely" in reply.headers["longrein-dropped"]


COUNTS: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": ("/v1/responses/input_tokens", {"input": "Hi."}),
    "messages": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi."}]}),
    "gemini": ("/v1beta/models/m:countTokens", {"contents": [{"parts": [{"text": "Hi."}]}]}),
}


@pytest.mark.parametrize("name", COUNTS)
async def test_counts_are_capped_but_cost_no_call(name: str, tiny_directory: Path) -> None:
    path, body = COUNTS[name]
    async with serving(tiny_directory, "hello", gateway={"max_calls": 2}) as house:
        key = house.open()
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as http:
            statuses = [(await http.post(f"{house.gateway.url}{path}", json=body)).status_code for _ in range(3)]
        assert statuses == [200, 200, 403]
        assert (await post(house, key, BY_NAME[name])).status_code == 200
        assert (await house.gateway.close_rollout("r0")).cap_hit is None


async def test_a_reply_is_known_in_its_own_rollout_alone(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hello") as house:
        speaker = BY_NAME["responses"]
        reply = (await post(house, house.open(), speaker)).json()
        body = {"input": "And?", "previous_response_id": reply["id"]}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {house.open('r1')}"}) as http:
            stranger = await http.post(f"{house.url}/responses", content=json.dumps(body))
        assert stranger.status_code == 400
        assert stranger.json()["error"]["param"] == "previous_response_id"
        assert "hello" not in stranger.text


def test_no_body_is_answered_with_a_failure_of_ours(tiny_directory: Path) -> None:
    """A good body with anything at all put anywhere in it."""
    house = serving(tiny_directory, "ok", gateway={"max_calls": 1_000_000, "max_tokens": 100_000_000})
    with asyncio.Runner() as runner:
        opened = runner.run(house.__aenter__())
        http = httpx.AsyncClient(headers={"authorization": f"Bearer {opened.open()}"})

        @examples(200)
        @given(data=st.data(), speaker=st.sampled_from(SPEAKERS), stream=st.booleans())
        def ask(data: st.DataObject, speaker: Speaker, stream: bool) -> None:
            body: Any = speaker.body("Hi.", stream)
            for _ in range(data.draw(st.integers(1, 3))):
                body = _with_anything(data, body)
            url = f"{opened.gateway.url}{speaker.path(stream)}"
            reply = runner.run(http.post(url, content=json.dumps(body).encode()))
            assert reply.status_code in (200, 400), reply.text
            if reply.status_code == 400:
                assert speaker.message(reply.json())

        try:
            ask()
        finally:
            runner.run(http.aclose())
            runner.run(house.__aexit__(None, None, None))


FIELDS = (
    "content", "contents", "format", "functionDeclarations", "generationConfig", "include", "input", "instructions",
    "max_output_tokens", "max_tokens", "messages", "metadata", "model", "name", "output_config", "parameters", "parts",
    "prompt", "response_format", "role", "stop", "stop_sequences", "stream", "stream_options", "system",
    "systemInstruction", "text", "thinking", "toolConfig", "tool_choice", "tool_calls", "tools", "type",
)  # fmt: skip


large = st.one_of(
    st.integers(0, 19).map(lambda n: "aé "[: 1 + n % 3] * 2**n),
    st.integers(0, 12).map(lambda n: [{"type": "text", "text": ""}] * 2**n),
    st.integers(1, 300).map(lambda n: json.loads("[" * n + "]" * n)),
)
whatever = st.one_of(anything, anything, anything, large)
"""Up to about a megabyte."""


def _with_anything(data: st.DataObject, value: Any) -> Any:
    """``value`` with something else in one place."""
    if isinstance(value, dict) and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted({*value, *FIELDS})))
        return {**value, key: _with_anything(data, value[key]) if key in value else data.draw(whatever)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], _with_anything(data, value[place]), *value[place + 1 :]]
    return data.draw(whatever)
