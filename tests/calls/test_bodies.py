"""Whatever JSON a client sends, the answer is a reply or an error of the client's making, never a failure of ours."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
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


DEEP = 600
NESTED = '{"a":' * DEEP + "1" + "}" * DEEP
MESSAGES = '"messages": [{"role": "user", "content": "\\u0061"}'
FUNCTION = '"function": {"name": "f", '
CALLED = MESSAGES + ', {"role": "assistant", "tool_calls": [{"id": "1", ' + FUNCTION + '"arguments": '


@pytest.mark.parametrize(
    ("renderer", "body"),
    [
        ("auto", "{" + MESSAGES + '], "metadata": ' + NESTED + "}"),
        ("auto", "{" + MESSAGES + '], "metadata": ' + "[" * 100_000),
        (
            "template",
            "{" + MESSAGES + '], "tools": [{"type": "function", ' + FUNCTION + f'"parameters": {NESTED}' + "}}]}",
        ),
        ("template", "{" + CALLED + json.dumps(NESTED) + "}}]}]}"),
    ],
    ids=["unknown", "open", "schema", "arguments"],
)
async def test_what_is_nested_too_deeply_is_refused(renderer: str, body: str, qwen3_directory: Path) -> None:
    async with serving(qwen3_directory, "ok", model={"renderer": renderer}) as house, httpx.AsyncClient() as http:
        url = f"{house.gateway.url}/k/{house.open()}/v1/chat/completions"
        reply = await http.post(url, content=body, timeout=20)
        assert reply.status_code == 400, reply.text
        assert "nested too deeply" in reply.text or "recursion" in reply.text
        shallow = json.dumps({"messages": [{"role": "user", "content": "é"}], "x": json.loads("[" * 90 + "]" * 90)})
        assert (await http.post(url, content=shallow, timeout=20)).status_code == 200
        assert len(house.engine.requests) == 1


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_bodies_are_utf_8(path: str, tiny_directory: Path) -> None:
    body = '{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stop": "?"}'
    half = body.encode().replace(b'"a"', b'"\xed\xa0\xbd"')
    async with serving(tiny_directory, "ok") as house, httpx.AsyncClient() as http:
        url = f"{house.gateway.url}/k/{house.open()}/v1/{path}"
        stop = body.encode().replace(b"?", b"\xed\xa0\xbd")
        for raw in (half, stop, body.replace("?", "\\ud83d").encode("utf-16"), b"\xff" + body.encode()):
            reply = await http.post(url, content=raw)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
        assert not house.engine.requests
        # As some editors and shells send it.
        assert (await http.post(url, content=b"\xef\xbb\xbf" + body.encode())).status_code == 200
