"""The fake model of ``streams.py``: what it tells each rollout and when, at longrein's engine seam and over HTTP.

Each token has its due time, counted from the moment the model was asked.
"""

import asyncio
import json
import random
import re
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from longrein.calls.gateway import Gateway
from longrein.calls.rendering import open_renderer
from longrein.config import GatewaySection, ModelSection, SamplingSection
from longrein.engines.engine import SampleChunk, SampleRequest
from longrein.engines.weights import local_directory
from longrein.ledger import Ledger
from longrein.records import Group, Rollout, RolloutState, Split

MODEL = "policy"


@dataclass(frozen=True)
class Shape:
    """What is measured.

    Attributes:
        streams: rollouts at the same time.
        tokens: of each reply, the one that ends it included.
        pace_s: between two tokens of a stream.
        ramp_s: over which the streams begin.
        whole: replies are asked for whole, not streamed.
    """

    streams: int
    tokens: int
    pace_s: float
    ramp_s: float
    whole: bool = False

    @property
    def length_s(self) -> float:
        return self.tokens * self.pace_s

    @property
    def patience_s(self) -> float:
        """Longest time until every reply must have come."""
        return self.ramp_s + 2 * self.length_s + 30


@dataclass(frozen=True)
class Script:
    """What the model tells each rollout: token ids, and each one's text (empty for the token that ends the reply)."""

    ids: Sequence[list[int]]
    texts: Sequence[list[str]]
    pace_s: float


def write_script(tokenizer: Any, end: int, rollouts: int, tokens: int, pace_s: float) -> Script:
    """A text of its own for each rollout, from plain words that are one token each."""
    words = {token: str(tokenizer.decode([token])) for token in range(1000, 20000)}
    first = [token for token, text in words.items() if re.fullmatch("[A-Z][a-z]+", text)]
    later = [token for token, text in words.items() if re.fullmatch(" [a-z]+", text)]
    ids = []
    for rollout in range(rollouts):
        draw = random.Random(rollout)
        ids.append([draw.choice(first), *draw.choices(later, k=tokens - 2), end])
    texts = [[*(words[token] for token in row[:-1]), ""] for row in ids]
    return Script(ids, texts, pace_s)


def number_in(text: str) -> int:
    """Which rollout a prompt is from."""
    found = re.findall(r"You are rollout (\d+)\.", text)
    assert len(found) == 1, text
    return int(found[0])


async def until(due: float) -> None:
    await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))


# ---- the model at longrein's engine seam


class PacedEngine:
    """Says a rollout's reply, one token at each due time; what was missed is said at once."""

    context_length = 8192
    version = 0

    def __init__(self, script: Script, decode: Callable[[Sequence[int]], str]) -> None:
        self._script = script
        self._decode = decode

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        began = asyncio.get_running_loop().time()
        ids = self._script.ids[number_in(self._decode(request.prompt_ids[-40:].tolist()))]
        for place, token in enumerate(ids, 1):
            await until(began + place * self._script.pace_s)
            yield SampleChunk([token], [-0.5], self.version, "stop" if place == len(ids) else None)

    def describe(self) -> str:
        return type(self).__name__

    async def publish(self, weights: Mapping[str, Any], version: int, policy: str = "policy") -> None:
        self.version = version

    async def close(self) -> None:
        pass


def serve_longrein(pipe: Connection, script: Script, model: str) -> None:
    asyncio.run(_serve_longrein(pipe, script, model))


async def _serve_longrein(pipe: Connection, script: Script, model: str) -> None:
    """Over the pipe: the port, then for each list of rollouts their keys, that they are closed once told to close them,
    and how many of their calls lie in the ledger token for token. None ends it."""
    directory = Path(model) if Path(model).is_dir() else local_directory(model, None)
    renderer = open_renderer(directory, ModelSection(path=model, tool_format="hermes"))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lr-")))
        ledger = await Ledger.open(folder / "ledger.db")
        stack.push_async_callback(ledger.close)
        limits = GatewaySection(queue=max(1024, len(script.ids)))
        engine = PacedEngine(script, renderer.decode)
        gateway = Gateway(limits, SamplingSection(), renderer, engine, ledger, folder / "gateway.sock")
        await gateway.start()
        stack.push_async_callback(gateway.close)
        pipe.send(int(gateway.url.rpartition(":")[2]))
        await ledger.add_group(Group("g", 0, "task", Split.TRAIN))
        while (rollouts := await asyncio.to_thread(pipe.recv)) is not None:
            names = [f"{secrets.token_hex(4)}-{rollout}" for rollout in rollouts]
            for name in names:
                rollout = Rollout(name, "g", "task", Split.TRAIN, 0)
                await ledger.add_rollout(rollout)
                await ledger.move(replace(rollout, state=RolloutState.RUNNING))
            pipe.send([gateway.open_rollout(name) for name in names])
            await asyncio.to_thread(pipe.recv)
            for name in names:
                await gateway.close_rollout(name)
            pipe.send(None)
            await asyncio.to_thread(pipe.recv)
            pipe.send(sum([await _exact(ledger, name, script.ids[i]) for i, name in zip(rollouts, names, strict=True)]))


async def _exact(ledger: Ledger, rollout_id: str, ids: list[int]) -> bool:
    calls = await ledger.calls(rollout_id)
    return len(calls) == 1 and calls[0].delivered and calls[0].completion_ids.tolist() == ids


# ---- the same model over HTTP


def serve_model(pipe: Connection, script: Script) -> None:
    asyncio.run(_serve_model(pipe, script))


async def _serve_model(pipe: Connection, script: Script) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                began = asyncio.get_running_loop().time()
                size = re.search(rb"content-length: *(\d+)", head)
                body = await reader.readexactly(int(size.group(1)) if size else 0)
                await _say(writer, script, began, json.loads(body or b"{}"))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=4096)
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.to_thread(pipe.recv)


async def _say(writer: asyncio.StreamWriter, script: Script, began: float, body: Mapping[str, Any]) -> None:
    if "messages" not in body:
        _write_json(writer, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        return
    rollout = number_in(str(body["messages"][-1]["content"]))
    ids, texts = script.ids[rollout], script.texts[rollout]
    head = {"id": f"chatcmpl-{rollout}", "created": 0, "model": MODEL}
    usage = {"prompt_tokens": 500, "completion_tokens": len(ids), "total_tokens": 500 + len(ids)}
    if not body.get("stream"):
        await until(began + len(ids) * script.pace_s)
        _write_json(writer, {**head, "object": "chat.completion", "usage": usage, **_whole(ids, texts)})
        return
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for place, text in enumerate(texts, 1):
        await until(began + place * script.pace_s)
        delta = {"role": "assistant", "content": text} if place == 1 else {"content": text} if text else {}
        choice = {"index": 0, "delta": delta, "finish_reason": None if text else "stop"}
        event = b"data: %b\n\n" % json.dumps({**head, "object": "chat.completion.chunk", "choices": [choice]}).encode()
        event += b"" if text else b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(event), event) + (b"" if text else b"0\r\n\r\n"))


def _whole(ids: list[int], texts: list[str]) -> dict[str, Any]:
    """A whole reply with ids and log-probabilities, as vLLM gives them."""
    logprobs: list[dict[str, Any]] = [
        {"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": []} for text in texts
    ]
    message = {"role": "assistant", "content": "".join(texts)}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": ids}
    return {"prompt_token_ids": list(range(500)), "choices": [{**choice, "logprobs": {"content": logprobs}}]}


def _write_json(writer: asyncio.StreamWriter, body: Mapping[str, Any]) -> None:
    raw = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))
