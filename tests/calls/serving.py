"""A gateway on real sockets over a scripted engine."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from longrein.calls.gateway import Gateway
from longrein.config import GatewaySection, SamplingSection
from tests.calls.loaded import renderer_of, tokenizer_of
from tests.calls.scripted_engine import Notebook, ScriptedEngine

END = "<|im_end|>"


@dataclass
class House:
    """All that a test speaks to."""

    gateway: Gateway
    engine: ScriptedEngine
    notebook: Notebook
    tokenizer: Any

    def open(self, rollout_id: str = "r0") -> str:
        """The key of a new rollout."""
        return self.gateway.open_rollout(rollout_id)

    def shown(self, index: int) -> str:
        """The prompt of a sample, as text."""
        return str(self.tokenizer.decode(self.engine.requests[index].prompt_ids.tolist()))

    @asynccontextmanager
    async def begun(self, key: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """A reply whose headers have come: by a stream's first event, or by the first sign of life."""
        async with (
            httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=20) as http,
            http.stream("POST", f"{self.url}/chat/completions", content=json.dumps(body)) as reply,
        ):
            yield reply

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something has happened on the other side of a socket."""
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)

    @property
    def url(self) -> str:
        return f"{self.gateway.url}/v1"


@asynccontextmanager
async def serving(
    directory: Path,
    *replies: str,
    model: dict[str, Any] | None = None,
    gateway: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    context_length: int = 4096,
    engine: Any = None,
) -> AsyncIterator[House]:
    """A started gateway; what the model says is scripted, ended by the stop token; or ``engine`` says it."""
    tokenizer = tokenizer_of(directory)
    if engine is None:
        engine = ScriptedEngine(lambda text: tokenizer.encode(text, add_special_tokens=False), context_length)
        for reply in replies:
            engine.say(reply + END)
    notebook = Notebook()
    with tempfile.TemporaryDirectory(prefix="lr-") as folder:
        served = Gateway(
            GatewaySection(**(gateway or {})),
            SamplingSection(**(sampling or {})),
            renderer_of(directory, **(model or {})),
            engine,
            notebook,
            Path(folder) / "gateway.sock",
        )
        await served.start()
        try:
            yield House(served, engine, notebook, tokenizer)
        finally:
            await served.close()
