"""The load of ``streams.py``: many clients in one process, each with one request, reading all of its reply."""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paced import MODEL, Script, Shape, until

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
