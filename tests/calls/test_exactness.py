"""Random conversations, in every dialect, with every family of models: recorded tokens are those the engine saw, and a
call begins with its parent's tokens or says why not.

``make properties`` plays 200 with each family.
"""

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.calls.gateway import Gateway
from longrein.calls.rendering import Renderer
from longrein.config import GatewaySection, SamplingSection
from longrein.records import Cause
from tests.calls.properties import examples
from tests.calls.scripted_engine import Line, Notebook, ScriptedEngine, told
from tests.calls.spoken import BASH, EACH, FAMILIES, Opened, encoded

WORDS = ("naïve", "🙂", "  two", "a\tb", "\n\nend", "<b>", "{", '"q"', "日本", "é\u0301", "</x>", " ", "\r\n", "ls")
OTHER = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
BASH_TOOL = BASH.as_function()["function"]


@dataclass
class Harness:
    """A client of one dialect, with its own history in that dialect's wire form.

    Attributes:
        entries: history; each entry is what one side said at one time.
        tools: functions to offer.
    """

    random: random.Random
    entries: list[list[Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=lambda: [BASH_TOOL])
    path = ""

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def system(self, text: str) -> list[Any]:
        raise NotImplementedError

    def user(self, text: str) -> list[Any]:
        raise NotImplementedError

    def hear(self, reply: Any) -> None:
        """Keep a reply as clients do, and answer its calls."""
        raise NotImplementedError

    def flat(self) -> list[Any]:
        return [item for entry in self.entries for item in entry]

    def spelt(self, arguments: str) -> str:
        """Arguments as some clients play them back: in a spelling of their own."""
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        return json.dumps(parsed, separators=(",", ":")) if self.random.random() < 0.5 else arguments


class Chat(Harness):
    path = "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        return {"messages": self.flat(), "tools": [{"type": "function", "function": tool} for tool in self.tools]}

    def system(self, text: str) -> list[Any]:
        return [{"role": "system", "content": text}]

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": self.random.choice([text, [{"type": "text", "text": text}]])}]

    def hear(self, reply: Any) -> None:
        message = reply["choices"][0]["message"]
        if self.random.random() < 0.3:
            message.pop("reasoning_content", None)
        calls = message.get("tool_calls", ())
        for call in calls:
            call["function"]["arguments"] = self.spelt(call["function"]["arguments"])
        self.entries.append([message])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": words(self.random)} for call in calls]
        self.entries.append(results or self.user(words(self.random)))


class Messages(Harness):
    path = "/v1/messages"

    def body(self) -> dict[str, Any]:
        tools = [{**tool, "input_schema": tool["parameters"]} for tool in self.tools]
        for tool in tools:
            del tool["parameters"]
        return {"max_tokens": 4096, "messages": self.flat(), "tools": tools}

    def system(self, text: str) -> list[Any]:
        return [{"role": "system", "content": text}]

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": self.random.choice([text, [{"type": "text", "text": text}]])}]

    def hear(self, reply: Any) -> None:
        blocks = reply["content"]
        if self.random.random() < 0.3:
            blocks = [block for block in blocks if block["type"] != "thinking"]
        self.entries.append([{"role": "assistant", "content": blocks}])
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": words(self.random)}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        self.entries.append([{"role": "user", "content": results}] if results else self.user(words(self.random)))


class Responses(Harness):
    path = "/v1/responses"

    def body(self) -> dict[str, Any]:
        return {"input": self.flat(), "tools": [{"type": "function", **tool} for tool in self.tools]}

    def system(self, text: str) -> list[Any]:
        return [{"role": "developer", "content": text}]

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": [{"type": "input_text", "text": text}]}]

    def hear(self, reply: Any) -> None:
        items = reply["output"]
        if self.random.random() < 0.3:
            items = [item for item in items if item["type"] != "reasoning"]
        if self.random.random() < 0.3:
            items = [{key: value for key, value in item.items() if key != "id"} for item in items]
        self.entries.append(items)
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": words(self.random)}
            for item in items
            if item["type"] == "function_call"
        ]
        self.entries.append(results or self.user(words(self.random)))


class Gemini(Harness):
    path = "/v1beta/models/m:generateContent"

    def body(self) -> dict[str, Any]:
        system = [item["parts"][0] for item in self.flat() if item["role"] == "system"]
        contents = [item for item in self.flat() if item["role"] != "system"]
        declared = [
            {"name": tool["name"], "description": tool["description"], "parametersJsonSchema": tool["parameters"]}
            for tool in self.tools
        ]
        extra = {"systemInstruction": {"parts": system}} if system else {}
        return {"contents": contents, "tools": [{"functionDeclarations": declared}], **extra}

    def system(self, text: str) -> list[Any]:
        return [{"role": "system", "parts": [{"text": text}]}]

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "parts": [{"text": text}]}]

    def hear(self, reply: Any) -> None:
        content = reply["candidates"][0]["content"]
        if self.random.random() < 0.3:
            content["parts"] = [part for part in content["parts"] if not part.get("thought")] or [{"text": ""}]
        self.entries.append([content])
        results = [
            {"functionResponse": {"name": call["name"], "response": {"output": words(self.random)}}}
            for part in content["parts"]
            if (call := part.get("functionCall"))
        ]
        self.entries.append([{"role": "user", "parts": results}] if results else self.user(words(self.random)))


HARNESSES: tuple[Callable[[random.Random], Harness], ...] = (Chat, Messages, Responses, Gemini)


def words(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(1, 6)))


def meddle(rng: random.Random, harness: Harness) -> None:
    """What harnesses do to their own history."""
    chance = rng.random()
    if chance < 0.08 and len(harness.entries) > 5:
        # Compaction, or a turn that failed and is forgotten.
        del harness.entries[2:4]
    elif chance < 0.16 and len(harness.entries) > 5:
        # Another way on from an earlier turn.
        del harness.entries[-2:]
        harness.entries[-1] = harness.user(words(rng))
    elif chance < 0.22:
        harness.tools = [BASH_TOOL] if len(harness.tools) > 1 else [BASH_TOOL, OTHER]
    elif chance < 0.3:
        harness.entries[-1] = [*harness.entries[-1], *harness.system(words(rng))]


def sampled(rng: random.Random, name: str, renderer: Renderer) -> list[int]:
    """A reply as a model might sample it, well-formed or not, ended or cut."""
    family = FAMILIES[name]
    calls = "".join(
        family.call({"command": words(rng), "seconds": rng.randint(0, 9)}) for _ in range(rng.randint(0, 2))
    )
    if rng.random() < 0.1:
        calls = family.broken
    text = rng.choice(["", words(rng)]) if family.says or not calls else ""
    ids = encoded(renderer, family.turn(rng.choice(["", "Hm.", words(rng)]), text, calls))
    end = next((i for i, token in enumerate(ids) if token in renderer.stop_ids), len(ids) - 1)
    ids = ids[: end + 1]
    return ids[: rng.randint(1, len(ids))] if rng.random() < 0.1 else ids


async def converse(rng: random.Random, name: str, renderer: Renderer, http: httpx.AsyncClient, house: "Played") -> None:
    """One rollout: up to 6 calls of one harness."""
    rollout_id = f"r{len(house.rollouts)}"
    house.rollouts.append(rollout_id)
    key = house.gateway.open_rollout(rollout_id)
    harness = rng.choice(HARNESSES)(rng)
    harness.entries = [harness.system(words(rng)), harness.user(words(rng))]
    for _ in range(rng.randint(2, 6)):
        ids = sampled(rng, name, renderer)
        house.engine.lines = [Line(ids)]
        reply = await http.post(
            f"{house.gateway.url}{harness.path}", json=harness.body(), headers={"authorization": f"Bearer {key}"}
        )
        assert reply.status_code == 200, reply.text
        assert house.notebook.calls[-1].completion_ids.tolist() == ids
        harness.hear(reply.json())
        meddle(rng, harness)
    await house.gateway.close_rollout(rollout_id)


@dataclass
class Played:
    gateway: Gateway
    engine: ScriptedEngine
    notebook: Notebook
    rollouts: list[str] = field(default_factory=list)

    def check(self) -> None:
        """What must hold of all calls so far; forgets them."""
        assert len(self.engine.requests) == len(self.notebook.calls)
        known = {call.call_id: call for call in self.notebook.calls}
        for request, call in zip(self.engine.requests, self.notebook.calls, strict=True):
            assert call.delivered
            assert call.prompt_ids.tolist() == request.prompt_ids.tolist()
            if call.parent_id is None:
                assert call.cause is not Cause.EXTENDED and call.inherited == 0
            else:
                assert call.cause in (Cause.EXTENDED, Cause.HISTORY_REWRITTEN, Cause.TOOLS_CHANGED)
                parent = known[call.parent_id]
                assert parent.rollout_id == call.rollout_id
                assert call.inherited == len(told(parent))
                assert call.prompt_ids[: call.inherited].tolist() == told(parent)
        self.engine.requests.clear()
        self.notebook.calls.clear()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@EACH
def test_any_conversation_is_recorded_as_it_was_seen(name: str, opened: Opened, runner: asyncio.Runner) -> None:
    renderer = opened(name)
    engine, notebook = ScriptedEngine(lambda text: encoded(renderer, text), 100_000), Notebook()
    causes: Counter[Cause] = Counter()
    with tempfile.TemporaryDirectory(prefix="lr-") as folder:
        socket = Path(folder) / "gateway.sock"
        gateway = Gateway(GatewaySection(), SamplingSection(max_tokens=4096), renderer, engine, notebook, socket)
        house = Played(gateway, engine, notebook)
        runner.run(gateway.start())
        http = httpx.AsyncClient(timeout=30)

        @examples(15)
        @given(seed=st.integers(0, 2**32))
        def play(seed: int) -> None:
            runner.run(converse(random.Random(seed), name, renderer, http, house))
            causes.update(call.cause for call in notebook.calls)
            house.check()

        try:
            play()
        finally:
            runner.run(http.aclose())
            runner.run(gateway.close())
    # Were everything begun anew, nothing above would be wrong and nothing right.
    assert causes[Cause.EXTENDED] >= causes.total() // 5, causes
