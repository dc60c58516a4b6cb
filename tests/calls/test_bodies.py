"""Whatever JSON a client sends, the answer is a reply or an error of the client's making, never a failure of ours."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from tests.calls.properties import examples
from tests.calls.serving import serving

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def mostly(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(strategy, strategy, strategy, anything)


blocks = mostly(st.fixed_dictionaries({"type": mostly(st.just("text")), "text": mostly(st.text(max_size=6))}))
functions = mostly(
    st.fixed_dictionaries(
        {"name": mostly(st.sampled_from(["f", "g"]))},
        optional={
            "description": mostly(st.text(max_size=6)),
            "parameters": mostly(st.dictionaries(st.text(max_size=6), anything, max_size=3)),
            "arguments": mostly(st.sampled_from(["{}", '{"a": [1]}', '{"a"', "3", '"x"'])),
        },
    )
)
calls = mostly(st.fixed_dictionaries({"type": mostly(st.just("function")), "function": functions}))
turns = mostly(
    st.fixed_dictionaries(
        {
            "role": mostly(st.sampled_from(["system", "developer", "user", "assistant", "tool"])),
            "content": mostly(st.none() | st.text(max_size=6) | st.lists(blocks, max_size=2)),
        },
        optional={
            "tool_calls": mostly(st.lists(calls, max_size=2)),
            "tool_call_id": mostly(st.text(max_size=3)),
            "name": mostly(st.text(max_size=3)),
            "reasoning_content": mostly(st.text(max_size=3)),
        },
    )
)
bodies = mostly(
    st.fixed_dictionaries(
        {"messages": mostly(st.lists(turns, max_size=4))},
        optional={
            "model": mostly(st.text(max_size=4)),
            "tools": mostly(st.lists(calls, max_size=2)),
            "tool_choice": mostly(st.sampled_from(["auto", "none"])),
            "stream": mostly(st.booleans()),
            "stream_options": mostly(st.just({"include_usage": True})),
            "max_tokens": mostly(st.integers(1, 9)),
            "stop": mostly(st.text(max_size=3)),
            "logprobs": mostly(st.booleans()),
            "n": mostly(st.just(1)),
        },
    )
)


def test_no_body_is_answered_with_a_failure_of_ours(tiny_directory: Path, qwen3_directory: Path) -> None:
    houses = [
        serving(tiny_directory, "ok <tool_call>", model={"tool_format": "hermes"}, gateway=LIMITS),
        serving(qwen3_directory, "<think>so</think>ok", gateway=LIMITS),
        serving(tiny_directory, "ok", gateway=LIMITS),
    ]
    with asyncio.Runner() as runner:
        opened = [runner.run(house.__aenter__()) for house in houses]
        clients = [httpx.AsyncClient(headers={"authorization": f"Bearer {house.open()}"}) for house in opened]

        @examples(150)
        @given(which=st.integers(0, 2), body=bodies)
        def ask(which: int, body: Any) -> None:
            raw = json.dumps(body).encode()
            reply = runner.run(clients[which].post(f"{opened[which].url}/chat/completions", content=raw))
            assert reply.status_code in (200, 400), reply.text
            if reply.status_code == 400:
                assert reply.json()["error"]["type"] == "invalid_request_error"
                assert reply.json()["error"]["message"]

        try:
            ask()
        finally:
            for http in clients:
                runner.run(http.aclose())
            for house in houses:
                runner.run(house.__aexit__(None, None, None))


LIMITS = {"max_calls": 100_000, "max_tokens": 10_000_000}
