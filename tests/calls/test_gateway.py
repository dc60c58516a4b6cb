"""The endpoint as official clients see it: keys, paths, errors, streams, tools, limits, the gate."""

import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from longrein.calls import listening
from longrein.calls.conversation import Conversation
from longrein.calls.gateway import Gateway
from longrein.calls.rendering import Prompt
from longrein.config import GatewaySection, SamplingSection
from longrein.errors import ConfigError
from longrein.records import Cause
from tests.calls.loaded import renderer_of
from tests.calls.scripted_engine import Notebook, ScriptedEngine, told
from tests.calls.serving import House, serving

ASK: list[Any] = [{"role": "user", "content": "Say something."}]
BASH: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>'


def client(house: House, key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**({"base_url": house.url, "api_key": key, "max_retries": 0} | options))


async def post(house: House, key: str, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    async with httpx.AsyncClient(base_url=house.gateway.url, headers={"authorization": f"Bearer {key}"}) as http:
        return await http.post(path, json=body)


async def test_the_async_client_talks_and_every_call_is_recorded(tiny_directory: Path) -> None:
    async with serving(tiny_directory, " Héllo 🙂\n", "second") as house, client(house, house.open()) as model:
        first = await model.chat.completions.create(model="any-name", messages=ASK, temperature=0.3)
        assert first.choices[0].message.content == " Héllo 🙂\n"
        assert (first.choices[0].finish_reason, first.model) == ("stop", "any-name")
        history = [*ASK, first.choices[0].message.model_dump(), {"role": "user", "content": [text("More.")]}]
        second = await model.chat.completions.create(model="any-name", messages=history)
        assert second.id != first.id
        one, two = house.notebook.calls
        assert (one.cause, two.cause, two.parent_id) == (Cause.NEW_SESSION, Cause.EXTENDED, one.call_id)
        assert two.prompt_ids[: len(told(one))].tolist() == told(one)
        assert (one.index, two.index, one.dialect, one.delivered) == (0, 1, "chat", True)
        assert one.request["temperature"] == 0.3
        assert one.temperature == 1.0
        assert one.reply["choices"][0]["message"]["content"] == " Héllo 🙂\n"
        assert first.usage is not None
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (
            len(one.prompt_ids),
            len(one.completion_ids),
        )
        assert one.logprobs.tolist() == [-0.25 * (i + 1) for i in range(len(one.completion_ids))]
        assert [request.prompt_ids.tolist() for request in house.engine.requests] == [
            one.prompt_ids.tolist(),
            two.prompt_ids.tolist(),
        ]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


async def test_the_sync_client_streams(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "Héllo 🙂 you <b>") as house:
        house.engine.lines[0].delay_s = 0.03
        key = house.open()

        def talk() -> list[Any]:
            with openai.OpenAI(base_url=house.url, api_key=key, max_retries=0) as model:
                return list(
                    model.chat.completions.create(
                        model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
                    )
                )

        chunks = await asyncio.to_thread(talk)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Héllo 🙂 you <b>"
        assert len(chunks) > 5
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage.completion_tokens == len(house.notebook.calls[0].completion_ids)
        assert len({c.id for c in chunks}) == 1


@pytest.mark.parametrize("kind", ["hermes", "package"])
@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_called(kind: str, stream: bool, tiny_directory: Path, qwen3_directory: Path) -> None:
    directory, model = (tiny_directory, {"tool_format": "hermes"}) if kind == "hermes" else (qwen3_directory, {})
    async with (
        serving(directory, f"I look.\n{CALL}\n{CALL}", "Done.", model=model) as house,
        client(house, house.open()) as chat,
    ):
        message = await said(chat, ASK, stream)
        assert message["content"] == "I look."
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
            {"command": "ls é"}
        ] * 2
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == 2
        # Re-serialised, as many harnesses do.
        for call in message["tool_calls"]:
            call["function"]["arguments"] = '{"command":"ls \\u00e9"}'
        results = [{"role": "tool", "tool_call_id": i, "content": "a.txt\n"} for i in ids]
        assert (await said(chat, [*ASK, message, *results], stream))["content"] == "Done."
        one, two = house.notebook.calls
        assert (one.finish_reason, two.finish_reason) == ("tool_calls", "stop")
        assert two.cause is Cause.EXTENDED
        assert two.prompt_ids[: len(told(one))].tolist() == told(one)


async def said(chat: openai.AsyncOpenAI, messages: list[Any], stream: bool) -> dict[str, Any]:
    """The assistant's message, put together by the official client."""
    if not stream:
        reply = await chat.chat.completions.create(model="m", messages=messages, tools=BASH)
        return reply.choices[0].message.model_dump(exclude_none=True)
    async with chat.chat.completions.stream(model="m", messages=messages, tools=BASH) as events:
        async for _ in events:
            pass
        completion = await events.get_final_completion()
    message = completion.choices[0].message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    message.pop("parsed", None)
    return message


async def test_malformed_calls_are_passed_on_as_written(tiny_directory: Path) -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>'
    async with (
        serving(tiny_directory, broken, "ok", model={"tool_format": "hermes"}) as house,
        client(house, house.open()) as chat,
    ):
        message = await said(chat, ASK, False)
        assert message["content"] == broken
        assert "tool_calls" not in message
        assert house.notebook.calls[0].finish_reason == "stop"
        await said(chat, [*ASK, message, {"role": "user", "content": "No."}], False)
        assert house.notebook.calls[1].cause is Cause.EXTENDED


async def test_every_way_to_carry_the_key(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi") as house:
        key = house.open()
        root = house.gateway.url
        ways: list[tuple[str, dict[str, str]]] = [
            ("/v1", {"authorization": f"Bearer {key}"}),
            ("", {"authorization": f"bearer {key}"}),
            ("/v1/v1", {"x-api-key": key}),
            ("/v1", {"x-goog-api-key": key}),
            (f"/k/{key}", {}),
            (f"/k/{key}/v1", {"authorization": "Bearer of-the-harness"}),
        ]
        async with httpx.AsyncClient() as http:
            for i, (path, headers) in enumerate(ways):
                body = {"messages": [{"role": "user", "content": f"{i}"}]}
                reply = await http.post(f"{root}{path}/chat/completions", json=body, headers=headers)
                assert reply.status_code == 200, (path, reply.text)
            assert (await http.get(f"{root}/v1/models?key={key}")).json()["data"][0]["id"] == "policy"
            assert (await http.get(f"{root}/v1/models/policy?key={key}")).json()["id"] == "policy"
        transport = httpx.AsyncHTTPTransport(uds=str(house.gateway.socket))
        async with httpx.AsyncClient(transport=transport) as http:
            reply = await http.post(f"http://sandbox/k/{key}/v1/chat/completions", json={"messages": ASK})
            assert reply.json()["choices"][0]["message"]["content"] == "hi"


async def test_a_key_opens_its_own_running_rollout_only(tiny_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(tiny_directory, "hi") as house:
        key, other = house.open("r0"), house.open("r1")
        assert (await post(house, key, {"messages": ASK})).status_code == 200
        use = await house.gateway.close_rollout("r0")
        assert (use.calls, use.cap_hit, use.engine_error) == (1, None, None)
        assert use.tokens == len(house.notebook.calls[0].completion_ids)
        refused = await post(house, key, {"messages": ASK})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            async with client(house, "lr-wrong") as model:
                await model.models.list()
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{house.url}/models")).status_code == 401
        assert (await post(house, other, {"messages": ASK})).status_code == 200
        assert house.notebook.calls[1].rollout_id == "r1"
        # A second close finds nothing more to say.
        assert (await house.gateway.close_rollout("r0")).calls == 0
    assert key not in caplog.text
    assert other not in caplog.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": ASK, "n": 2}, "n"),
        ({"messages": ASK, "stream": "yes"}, "stream"),
        ({"messages": ASK, "max_tokens": 0}, "max_tokens"),
        ({"messages": ASK, "max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"messages": ASK, "stop": [""]}, "stop"),
        ({"messages": ASK, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": ASK, "response_format": {"type": "yaml"}}, "response_format"),
        ({"messages": ASK, "response_format": {"type": "json_schema", "json_schema": 3}}, "response_format"),
        ({"messages": ASK, "tools": BASH}, "tools"),
        ({"messages": ASK, "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"messages": ASK, "tool_choice": "must"}, "tool_choice"),
        ({"messages": ASK, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"messages": ASK, "functions": []}, "functions"),
    ],
)
async def test_a_field_that_cannot_be_honoured_is_named(body: Any, param: str, tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi") as house:
        reply = await post(house, house.open(), body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert error["message"].startswith(param.split("[")[0])
        assert house.engine.requests == []


async def test_other_errors_have_the_same_shape(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi", gateway={"max_body_mb": 0.01}) as house:
        key = house.open()
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=house.gateway.url, headers=headers) as http:
            answers = {
                404: await http.get("/v1/nothing"),
                405: await http.get("/v1/chat/completions"),
                413: await http.post("/v1/chat/completions", content=b"[" + b" " * 20000),
                400: await http.post("/v1/chat/completions", content=b'{"messages": ['),
                415: await http.post("/v1/chat/completions", content=b"x", headers={"content-encoding": "gzip"}),
            }
            for content in (b"[1]", b'{"a": NaN}', b"\xff\xfe", b"[" * 5000):
                bad = await http.post("/v1/chat/completions", content=content)
                assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")
        for status, answer in answers.items():
            assert answer.status_code == status
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
        assert "gateway.max_body_mb" in answers[413].json()["error"]["message"]
        assert "GET /v1/models" in answers[404].json()["error"]["message"]


async def test_a_prompt_too_long_is_told_in_openai_words(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi", context_length=40) as house, client(house, house.open()) as model:
        with pytest.raises(openai.BadRequestError) as caught:
            await model.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 60}])
        assert caught.value.code == "context_length_exceeded"
        assert "maximum context length is 40 tokens" in caught.value.message
        await model.chat.completions.create(model="m", messages=ASK)
        request = house.engine.requests[0]
        assert len(request.prompt_ids) + request.max_tokens <= 40


async def test_sampling_is_the_configurations(tiny_directory: Path) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 50}
    async with serving(tiny_directory, "hi", sampling=sampling) as house:
        plain, seeded = house.open("r0"), house.gateway.open_rollout("r1", temperature=0.0, seed=3)
        again = house.gateway.open_rollout("r2", temperature=0.0, seed=3)
        wishes = {"messages": ASK, "temperature": 0.1, "top_p": 0.2, "max_tokens": 9, "seed": 1}
        for key in (plain, seeded, again):
            await post(house, key, wishes)
        await post(house, seeded, {"messages": ASK, "max_completion_tokens": 500})
        first, second, third, fourth = house.engine.requests
        assert (first.temperature, first.top_p, first.top_k, first.max_tokens, first.seed) == (0.7, 0.9, 5, 9, None)
        assert (second.temperature, third.temperature, fourth.max_tokens) == (0.0, 0.0, 50)
        assert second.seed is not None
        assert second.seed == third.seed != fourth.seed
        assert [call.temperature for call in house.notebook.calls] == [0.7, 0.0, 0.0, 0.0]


async def test_stop_texts_end_the_reply_and_logprobs_are_those_sampled(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "Thought.\nObservation: made up") as house, client(house, house.open()) as model:
        reply = await model.chat.completions.create(model="m", messages=ASK, stop=["\nObservation:"], logprobs=True)
        choice = reply.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Thought.", "stop")
        call = house.notebook.calls[0]
        assert house.engine.cancelled == 1
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [item.logprob for item in choice.logprobs.content] == call.logprobs.tolist()
        assert "".join(item.token for item in choice.logprobs.content).startswith("Thought.\nObservation:")


async def test_tool_choice_none_hides_the_tools(tiny_directory: Path) -> None:
    async with serving(tiny_directory, CALL, model={"tool_format": "hermes"}) as house:
        reply = await post(house, house.open(), {"messages": ASK, "tools": BASH, "tool_choice": "none"})
        assert reply.json()["choices"][0]["message"]["content"] == CALL
        assert "bash" not in house.shown(0)


async def test_caps_refuse_for_good_and_are_told_at_the_end(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi", gateway={"max_calls": 2}) as house, client(house, house.open()) as model:
        for i in range(2):
            await model.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{i}"}])
        with pytest.raises(openai.PermissionDeniedError, match=r"gateway\.max_calls"):
            await model.chat.completions.create(model="m", messages=ASK)
        use = await house.gateway.close_rollout("r0")
        assert use.calls == 2
        assert use.cap_hit is not None
        assert "gateway.max_calls" in use.cap_hit


async def test_the_token_cap_shortens_then_refuses(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "a long reply", gateway={"max_tokens": 3}) as house:
        key = house.open()
        short = await post(house, key, {"messages": ASK})
        assert short.json()["choices"][0]["finish_reason"] == "length"
        assert short.json()["usage"]["completion_tokens"] == 3
        assert (await post(house, key, {"messages": [*ASK, *ASK]})).status_code == 403


async def test_a_full_queue_asks_to_come_back(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi", gateway={"queue": 1}) as house:
        house.engine.lines[0].delay_s = 0.05
        keys = [house.open("r0"), house.open("r1")]
        replies = await asyncio.gather(*(post(house, key, {"messages": ASK}) for key in keys))
        assert sorted(reply.status_code for reply in replies) == [200, 429]
        refused = next(reply for reply in replies if reply.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        # An official client obeys and gets its turn.
        async with client(house, keys[1], max_retries=3) as model:
            reply = await model.chat.completions.create(model="m", messages=ASK)
            assert reply.choices[0].message.content == "hi"


async def test_calls_wait_at_the_gate_with_signs_of_life(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi", gateway={"keepalive_s": 0.02}) as house:
        key = house.open()
        await house.gateway.pause(1)
        streamed, whole = {"messages": ASK, "stream": True}, {"messages": [*ASK, *ASK]}
        async with house.begun(key, streamed) as events, house.begun(key, whole) as reply:
            lines, body = events.aiter_lines(), reply.aiter_bytes()
            assert (await anext(lines)).startswith("data: ")
            for _ in range(3):
                assert await anext(lines) == ""
                assert await anext(lines) == ": keep-alive"
                assert (await anext(body)).strip() == b""
            assert house.engine.requests == []
            house.gateway.resume()
            assert [line async for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
            assert json.loads(b"".join([part async for part in body]))["choices"][0]["message"]["content"] == "hi"


async def test_an_official_client_sits_an_update_out(tiny_directory: Path) -> None:
    async with (
        serving(tiny_directory, "hi", gateway={"keepalive_s": 0.02}) as house,
        client(house, house.open()) as model,
    ):
        await house.gateway.pause(1)
        asking = asyncio.create_task(model.chat.completions.create(model="m", messages=ASK))
        await asyncio.sleep(0.3)
        assert not asking.done()
        assert house.engine.requests == []
        house.gateway.resume()
        assert (await asking).choices[0].message.content == "hi"


async def test_pause_waits_for_what_ends_in_time(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi") as house:
        hold = house.engine.lines[0].hold()
        asking = asyncio.create_task(post(house, house.open("r9"), {"messages": ASK}))
        await house.until(lambda: house.engine.running == 1)
        pausing = asyncio.create_task(house.gateway.pause(5))
        await asyncio.sleep(0.05)
        assert not pausing.done()
        hold.set()
        assert await pausing == 0
        assert (await asking).status_code == 200
        house.gateway.resume()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_goes_on_from_its_own_tokens(tiny_directory: Path, stream: bool) -> None:
    async with serving(tiny_directory, "one two three", gateway={"keepalive_s": 0.02}) as house:
        whole = house.engine.lines[0].ids
        house.engine.lines[0].hold()
        house.engine.say(whole[1:])
        asking = asyncio.create_task(post(house, house.open(), {"messages": ASK, "stream": stream}))
        await house.until(lambda: house.engine.running == 1)
        await asyncio.sleep(0.05)
        assert await house.gateway.pause(0.0) == 1
        assert house.engine.running == 0 and not house.notebook.calls
        await house.engine.publish({}, 1)
        await asyncio.sleep(0.05)
        assert not asking.done()
        house.gateway.resume()
        reply = await asking
        assert reply.status_code == 200
        if not stream:
            assert reply.json()["choices"][0]["message"]["content"] == "one two three"
            assert reply.json()["usage"]["completion_tokens"] == len(whole)
        first, second = house.engine.requests
        (call,) = house.notebook.calls
        assert second.prompt_ids.tolist() == [*first.prompt_ids.tolist(), whole[0]]
        assert second.max_tokens == first.max_tokens - 1
        assert call.prompt_ids.tolist() == first.prompt_ids.tolist() and call.completion_ids.tolist() == whole
        assert call.versions.tolist() == [0] + [1] * (len(whole) - 1) and call.finish_reason == "stop"
        use = await house.gateway.close_rollout("r0")
        assert (use.calls, use.tokens) == (1, len(whole))


async def test_a_call_that_is_cut_twice_samples_each_part_from_its_own_stream(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two three") as house:
        whole = house.engine.lines[0].ids
        house.engine.lines[0].hold()
        house.engine.say(whole[1:]).hold()
        house.engine.say(whole[2:])
        key = house.gateway.open_rollout("r0", temperature=1.0, seed=5)
        asking = asyncio.create_task(post(house, key, {"messages": ASK}))
        for cut in (1, 2):
            await house.until(lambda cut=cut: len(house.engine.requests) == cut and house.engine.running == 1)  # type: ignore[misc]
            await asyncio.sleep(0.05)
            assert await house.gateway.pause(0.0) == 1
            house.gateway.resume()
        assert (await asking).json()["choices"][0]["message"]["content"] == "one two three"
        assert len({request.seed for request in house.engine.requests}) == 3
        assert house.notebook.calls[0].completion_ids.tolist() == whole


async def test_an_engine_failure_is_ours_not_the_harnesses(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "a reply") as house, client(house, house.open()) as model:
        house.engine.lines[0].fail_after = 2
        with pytest.raises(openai.InternalServerError, match="the script says so"):
            await model.chat.completions.create(model="m", messages=ASK)
        with pytest.raises(openai.APIError, match="the script says so"):
            async for _ in await model.chat.completions.create(model="m", messages=[*ASK, *ASK], stream=True):
                pass
        assert [(call.delivered, call.finish_reason, len(call.completion_ids)) for call in house.notebook.calls] == [
            (False, "cancelled", 2)
        ] * 2
        use = await house.gateway.close_rollout("r0")
        assert use.calls == 0
        assert use.engine_error is not None
        assert "the script says so" in use.engine_error


async def test_a_failure_after_a_sign_of_life_breaks_the_connection(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "a reply", gateway={"keepalive_s": 0.02}) as house:
        hold = house.engine.lines[0].hold()
        house.engine.lines[0].fail_after = 2
        async with house.begun(house.open(), {"messages": ASK}) as reply:
            hold.set()
            # A client retries this; an error inside a 200 it would take for a reply.
            with pytest.raises(httpx.RemoteProtocolError):
                await reply.aread()


async def test_a_call_that_cannot_be_recorded_is_not_answered(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "a reply") as house:
        house.notebook.broken = True
        reply = await post(house, house.open(), {"messages": ASK})
        assert reply.status_code == 500
        assert "a reply" not in reply.text
        use = await house.gateway.close_rollout("r0")
        assert use.engine_error is not None
        assert "the disk is full" in use.engine_error


async def test_closing_a_rollout_ends_its_calls(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "a reply") as house:
        house.engine.lines[0].hold()
        asking = asyncio.create_task(post(house, house.open(), {"messages": ASK}))
        await house.until(lambda: house.engine.running == 1)
        await house.gateway.close_rollout("r0")
        assert house.engine.running == 0
        assert (await asking).status_code == 500
        assert [call.delivered for call in house.notebook.calls] == [False]


async def test_lone_surrogates_of_harnesses_that_cut_text_are_replaced(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi") as house:
        body = (
            b'{"messages": [{"role": "user", "content": "cut \\ud83d"}, {"role": "user", "content": "\\ud83d\\ude42"}]}'
        )
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {house.open()}"}) as http:
            reply = await http.post(f"{house.url}/chat/completions", content=body)
        assert reply.status_code == 200
        assert "cut \ufffd" in house.shown(0)
        assert "🙂" in house.shown(0)


async def test_an_address_in_use_is_named(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi") as house:
        port = int(house.gateway.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"gateway\.port {port}"):
            async with serving(tiny_directory, "hi", gateway={"port": port}):
                pass


async def test_a_socket_path_too_long_is_named(tiny_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40) / "gateway.sock"
    engine = ScriptedEngine(list)
    gateway = Gateway(GatewaySection(), SamplingSection(), renderer_of(tiny_directory), engine, Notebook(), path)
    with pytest.raises(ConfigError, match=r"gateway\.sock cannot be made"):
        await gateway.start()
    await gateway.close()


async def test_what_was_dropped_is_told_whatever_it_is_called(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi") as house:
        body = {"contents": [{"parts": [{"text": "a"}]}], "tools": [{"odd\x00\x01\x7f\n name": {}}]}
        reply = await post(house, house.open(), body, "/v1beta/models/m:generateContent")
        assert reply.status_code == 200
        assert reply.headers["longrein-dropped"].startswith("tools[0].odd name: ")


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "completions"])
async def test_clients_that_end_lines_at_any_separator_read_streams(path: str, tiny_directory: Path) -> None:
    said = "a\u2028b\x85c\u2029d"
    async with (
        serving(tiny_directory, said) as house,
        httpx.AsyncClient(headers={"authorization": f"Bearer {house.open()}"}) as http,
    ):
        asked: dict[str, Any] = {"completions": {"prompt": "a"}, "responses": {"input": "a"}}
        body = {"max_tokens": 50, "stream": True} | asked.get(path, {"messages": ASK})
        async with http.stream("POST", f"{house.url}/{path}", json=body) as reply:
            lines = [line async for line in reply.aiter_lines()]
        for line in lines:
            assert line == "" or line.startswith(("event: ", "data: ", ": "))
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(map(gained, events)) == said


def gained(event: dict[str, Any]) -> str:
    """The text that a stream's event adds, in whichever dialect."""
    for choice in event.get("choices", ()):
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    delta = event.get("delta", "")
    return str(delta.get("text", "") if isinstance(delta, dict) else delta)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_nested_without_end_is_text(stream: bool, qwen3_directory: Path) -> None:
    says = 'Well.\n<tool_call>\n{"name": "bash", "arguments": {"command": ' + "[" * 3000 + "}}\n</tool_call>"
    async with (
        serving(qwen3_directory, says, sampling={"max_tokens": 4096}) as house,
        client(house, house.open()) as chat,
    ):
        message = await said(chat, ASK, stream)
        assert message["content"] == says
        assert "tool_calls" not in message
        assert [call.delivered for call in house.notebook.calls] == [True]


async def test_a_large_request_holds_up_no_other(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, begun, go_on = renderer_of(tiny_directory), threading.Event(), threading.Event()
    render = renderer.render

    def slow(conversation: Conversation) -> Prompt:
        if len(conversation.messages[0].content) > 100_000:
            begun.set()
            go_on.wait(10)
        return render(conversation)

    monkeypatch.setattr(renderer, "render", slow)
    async with serving(tiny_directory, "hi", context_length=1_000_000) as house:
        key, body = house.open(), {"messages": [{"role": "user", "content": "a" * 400_000}]}
        large = [asyncio.create_task(post(house, key, body)) for _ in range(2)]
        await house.until(begun.is_set)
        assert (await post(house, house.open("r1"), {"messages": ASK})).status_code == 200
        assert (await post(house, key, {"messages": ASK})).status_code == 200
        assert not any(task.done() for task in large)
        go_on.set()
        assert [(await task).status_code for task in large] == [200, 200]
        # The same body twice is one call, whichever way it was read.
        assert len(house.engine.requests) == 3


async def test_a_large_request_of_a_rollout_that_has_ended_is_not_sampled(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, begun, go_on = renderer_of(tiny_directory), threading.Event(), threading.Event()
    render = renderer.render

    def slow(conversation: Conversation) -> Prompt:
        begun.set()
        go_on.wait(10)
        return render(conversation)

    monkeypatch.setattr(renderer, "render", slow)
    async with serving(tiny_directory, "hi", context_length=1_000_000) as house:
        body = {"messages": [{"role": "user", "content": "a" * 400_000}]}
        large = asyncio.create_task(post(house, house.open(), body))
        await house.until(begun.is_set)
        await house.gateway.close_rollout("r0")
        go_on.set()
        assert (await large).status_code == 401
        assert not house.engine.requests


async def test_a_tokenizer_that_panics_refuses_the_request(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As the bindings of Rust call it."""

    def panic(conversation: Conversation) -> Prompt:
        raise PanicException("retry-limit-in-match over")

    monkeypatch.setattr(renderer_of(tiny_directory), "render", panic)
    async with serving(tiny_directory, "hi") as house:
        for size in (1, 400_000):
            body = {"messages": [{"role": "user", "content": " " * size}]}
            reply = await post(house, house.open(f"r{size}"), body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
            assert "retry-limit" in reply.text


async def test_connections_that_ask_nothing_give_way(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "most_connections", lambda: 4)
    async with serving(tiny_directory, "hi there") as house:
        host, port = house.gateway.url.removeprefix("http://").split(":")
        hold = house.engine.lines[0].hold()
        asked = asyncio.create_task(post(house, house.open(), {"messages": ASK}))
        await house.until(lambda: house.engine.running == 1)
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        begun = asyncio.create_task(post(house, house.open("r1"), {"messages": ASK}))
        await house.until(lambda: house.engine.running == 2)
        hold.set()
        assert [(await task).status_code for task in (asked, begun)] == [200, 200]
        await asyncio.sleep(0.1)
        assert sum(not reader.at_eof() and reader.exception() is None for reader, _ in idle) <= 4
        for _, writer in idle:
            writer.close()
