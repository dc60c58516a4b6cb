"""Clients that hang up and clients that ask again."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from longrein.records import Call
from tests.calls.serving import House, serving

ASK: list[Any] = [{"role": "user", "content": "Say something."}]


def request(key: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST /k/{key}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def hang_up(house: House, key: str, body: dict[str, Any], after: bytes) -> None:
    """Ask, read until ``after`` has come, and cut the connection."""
    host, port = house.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request(key, body))
    if after:
        await asyncio.wait_for(reader.readuntil(after), 10)
    else:
        await house.until(lambda: house.engine.running > 0)
    writer.transport.abort()


async def ask(house: House, key: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.post(f"{house.gateway.url}/k/{key}/v1/chat/completions", content=json.dumps(body), timeout=20)


async def test_a_hang_up_mid_stream_frees_the_engine_and_leaves_an_orphan(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two three", "again") as house:
        house.engine.lines[0].hold()
        key = house.open()
        await hang_up(house, key, {"messages": ASK, "stream": True}, after=b'"content": "o')
        await house.until(lambda: house.engine.running == 0 and bool(house.notebook.calls))
        orphan = house.notebook.calls[0]
        assert (orphan.delivered, orphan.finish_reason, len(orphan.completion_ids)) == (False, "cancelled", 1)
        assert (await ask(house, key, {"messages": ASK})).json()["choices"][0]["message"]["content"] == "again"
        use = await house.gateway.close_rollout("r0")
        assert use.calls == 1
        assert use.tokens == sum(len(call.completion_ids) for call in house.notebook.calls)


async def test_a_retry_does_not_join_a_call_that_is_being_ended(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two three", "again", gateway={"keepalive_s": 0.02}) as house:
        house.engine.lines[0].hold()
        key = house.open()
        await hang_up(house, key, {"messages": ASK, "stream": True}, after=b'"content": "o')
        house.notebook.hold.clear()
        await house.until(lambda: house.engine.running == 0)
        async with house.begun(key, {"messages": ASK, "stream": True}) as reply:
            house.notebook.hold.set()
            assert b"DONE" in await reply.aread()
        assert len(house.engine.requests) == 2


async def test_a_hang_up_while_waiting_for_a_whole_reply_ends_it_too(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two three") as house:
        house.engine.lines[0].hold()
        await hang_up(house, house.open(), {"messages": ASK}, after=b"")
        await house.until(lambda: house.engine.running == 0)
        assert house.engine.cancelled == 1


async def test_a_hang_up_at_the_gate_leaves_nothing(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "hi", gateway={"keepalive_s": 0.02, "queue": 1}) as house:
        key = house.open()
        await house.gateway.pause(1)
        await hang_up(house, key, {"messages": ASK, "stream": True}, after=b": keep-alive")
        await asyncio.sleep(0.1)
        house.gateway.resume()
        assert (await ask(house, key, {"messages": ASK})).status_code == 200
        assert [call.delivered for call in house.notebook.calls] == [True]


async def test_the_same_body_joins_the_call_in_flight(tiny_directory: Path) -> None:
    for stream in (False, True):
        async with serving(tiny_directory, "one two", "other", gateway={"keepalive_s": 0.02}) as house:
            hold = house.engine.lines[0].hold()
            key = house.open()
            body = {"messages": ASK, "stream": stream}
            async with house.begun(key, body) as first, house.begun(key, body) as second:
                hold.set()
                one, two = said(await first.aread()), said(await second.aread())
            assert one == two
            assert (len(house.engine.requests), len(house.notebook.calls)) == (1, 1)
            # Delivered by now: the same body is a wish for another sample.
            assert said((await ask(house, key, body)).content) != one
            assert len(house.engine.requests) == 2


def said(reply: bytes) -> bytes:
    """A reply without its signs of life."""
    return reply.replace(b": keep-alive\n\n", b"").strip()


async def test_the_first_client_may_leave_once_a_retry_has_joined(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two", gateway={"keepalive_s": 0.02}) as house:
        hold = house.engine.lines[0].hold()
        key = house.open()
        async with AsyncExitStack() as first:
            await first.enter_async_context(house.begun(key, {"messages": ASK}))
            async with house.begun(key, {"messages": ASK}) as second:
                await first.aclose()
                await asyncio.sleep(0.1)
                hold.set()
                assert json.loads(await second.aread())["choices"][0]["message"]["content"] == "one two"
        assert [house.notebook.delivered[call.call_id] for call in house.notebook.calls] == [True]


async def lost(house: House, key: str, body: dict[str, Any]) -> Call:
    """A call whose client leaves when it is sampled and on its way into the record."""
    house.notebook.hold.clear()
    async with house.begun(key, body):
        await house.until(lambda: bool(house.engine.requests) and house.engine.running == 0)
    await asyncio.sleep(0.1)
    house.notebook.hold.set()
    await house.until(lambda: False in house.notebook.delivered.values())
    return house.notebook.calls[0]


async def test_a_reply_nobody_received_is_given_to_the_retry(tiny_directory: Path) -> None:
    for stream in (False, True):
        async with serving(tiny_directory, "precious", "next", "other", gateway={"keepalive_s": 0.02}) as house:
            key = house.open()
            body = {"messages": ASK, "stream": stream}
            call = await lost(house, key, body)
            retried = await ask(house, key, body)
            assert call.reply["id"] in retried.text
            assert retried.status_code == 200
            assert house.notebook.delivered[call.call_id] is True
            assert (len(house.engine.requests), len(house.notebook.calls)) == (1, 1)
            # It is a call like any other now: the next one goes on from its tokens.
            history = [*ASK, {"role": "assistant", "content": "precious"}, {"role": "user", "content": "b"}]
            await ask(house, key, {"messages": history})
            assert house.notebook.calls[1].parent_id == call.call_id


async def test_another_body_leaves_the_undelivered_reply_behind(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "lost", "found", "anew", gateway={"keepalive_s": 0.02}) as house:
        key = house.open()
        await lost(house, key, {"messages": ASK})
        assert "found" in (await ask(house, key, {"messages": [*ASK, *ASK]})).text
        assert "anew" in (await ask(house, key, {"messages": ASK})).text
        history = [*ASK, {"role": "assistant", "content": "lost"}, {"role": "user", "content": "b"}]
        await ask(house, key, {"messages": history})
        assert list(house.notebook.delivered.values()) == [False, True, True, True]
        assert house.notebook.calls[-1].parent_id is None


async def test_a_hang_up_is_seen_though_more_was_sent_ahead(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one two", "again") as house:
        hold = house.engine.lines[0].hold()
        key = house.open()
        host, port = house.gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request(key, {"messages": ASK}))
        await house.until(lambda: house.engine.running > 0)
        writer.write(request(key, {"messages": [*ASK, *ASK]}))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await house.until(lambda: house.engine.running == 0)
        hold.set()
        await house.gateway.close_rollout("r0")
        assert [call.delivered for call in house.notebook.calls] == [False]


async def test_requests_sent_ahead_are_answered_in_turn(tiny_directory: Path) -> None:
    async with serving(tiny_directory, "one", "two", "three") as house:
        key = house.open()
        host, port = house.gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"".join(request(key, {"messages": ASK * n}) for n in (1, 2, 3)))
        for said in (b"one", b"two", b"three"):
            told = await asyncio.wait_for(reader.readuntil(b"total_tokens"), 10)
            assert said in told
        writer.close()
