"""The engine's promises beyond exactness: ends, cancellation, publishing, errors, bounds."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from longrein.engines.engine import Engine, SampleRequest
from longrein.errors import EngineError
from tests.engines.conftest import MakeEngine
from tests.engines.reference import assert_exact, complete, tokens


async def test_it_is_an_engine(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine: Engine = make_engine(module, context_length=1000)
    assert engine.context_length == 1000
    assert engine.version == 0


async def test_stop_ids_end_a_completion_and_belong_to_it(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    prompt = tokens(0, 30)
    free = await complete(engine, prompt, 20, temperature=0.0)
    assert free.finish_reason == "length" and len(free.ids) == 20
    stop = free.ids[7]
    stopped = await complete(engine, prompt, 20, temperature=0.0, stop_ids=frozenset({stop}))
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]


async def test_a_stop_at_the_last_token_is_a_stop(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    everything = frozenset(range(1000))
    assert (await complete(engine, tokens(0, 5), 1, stop_ids=everything)).finish_reason == "stop"


async def test_a_seed_reproduces(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    prompt = tokens(1, 12)
    first, second = [(await complete(engine, prompt, 15, seed=7)).ids for _ in range(2)]
    other = (await complete(engine, prompt, 15, seed=8)).ids
    unseeded = [(await complete(engine, prompt, 15)).ids for _ in range(2)]
    assert first == second != other
    assert unseeded[0] != unseeded[1]


async def test_the_engine_seed_reproduces_a_run(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    runs = [[(await complete(make_engine(module, seed=s), tokens(1, 12), 15)).ids] for s in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


async def test_closing_the_iterator_frees_the_place(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module, max_batch=1)
    endless = engine.sample(SampleRequest(tokens(2, 10), 3000))
    await anext(endless)
    waiting = asyncio.create_task(complete(engine, tokens(3, 10), 4))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await endless.aclose()  # type: ignore[attr-defined]
    found = await asyncio.wait_for(waiting, 30)
    assert_exact(module, found)


async def test_a_cancelled_waiter_never_runs(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module, max_batch=1)
    running = asyncio.create_task(complete(engine, tokens(2, 10), 60))
    waiting = asyncio.create_task(complete(engine, tokens(3, 10), 60))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await running
    assert engine.stats.decoded_tokens == 60


async def test_publishing_changes_what_is_sampled(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    prompt = tokens(4, 100)
    before = await complete(engine, prompt, 10)
    assert set(before.versions) == {0}
    assert engine.cached_tokens > 0
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    await engine.publish(dict(module.named_parameters()), 1)
    assert engine.version == 1
    assert engine.cached_tokens == 0
    after = await complete(engine, prompt, 10)
    assert set(after.versions) == {1}
    assert_exact(module, after)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"]
)
async def test_publishing_a_part_leaves_the_rest(module: PreTrainedModel, make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(module)
    with torch.no_grad():
        module.get_parameter(name).mul_(1.5)
    await engine.publish({name: module.get_parameter(name)}, 5)
    assert_exact(module, await complete(engine, tokens(4, 40), 10))


async def test_publishing_a_wrong_name_or_shape_loads_nothing(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    good = {"model.norm.weight": torch.zeros(64)}
    with pytest.raises(EngineError, match=r"no parameter 'model\.norms\.weight' \(nearest: model\.norm\.weight\)"):
        await engine.publish(good | {"model.norms.weight": torch.zeros(64)}, 1)
    with pytest.raises(EngineError, match=r"shape \(3,\), the model has \(64, 64\)"):
        await engine.publish(good | {"model.layers.0.self_attn.q_proj.weight": torch.zeros(3)}, 1)
    assert engine.version == 0
    assert_exact(module, await complete(engine, tokens(4, 40), 3))


async def test_publishing_needs_a_drained_engine(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    running = asyncio.create_task(complete(engine, tokens(5, 10), 200))
    await asyncio.sleep(0.01)
    with pytest.raises(EngineError, match="1 samples are in flight"):
        await engine.publish({}, 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # A cancelled sample is no longer in flight, even if its place is not free yet.
    await engine.publish({}, 1)
    assert_exact(module, await complete(engine, tokens(5, 10), 5))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (SampleRequest(np.empty(0, np.int32), 4), "non-empty"),
        (SampleRequest(np.array([1.5, 2.0]), 4), "integers"),
        (SampleRequest(np.array([[1, 2]], np.int32), 4), "non-empty row"),
        (SampleRequest(np.array([1, 99999], np.int32), 4), "the vocabulary has 0 to"),
        (SampleRequest(np.array([-1], np.int32), 4), "reach from -1"),
        (SampleRequest(tokens(0, 90), 11), "90 prompt tokens and 11 to sample exceed the context length of 100"),
        (SampleRequest(tokens(0, 9), 0), "max_tokens is 0"),
        (SampleRequest(tokens(0, 9), 4, temperature=-0.1), "temperature is -0.1"),
        (SampleRequest(tokens(0, 9), 4, temperature=float("nan")), "temperature is nan"),
        (SampleRequest(tokens(0, 9), 4, top_p=0.0), "top_p is 0.0"),
        (SampleRequest(tokens(0, 9), 4, top_k=-1), "top_k is -1"),
    ],
)
async def test_impossible_requests_are_refused_at_once(
    module: PreTrainedModel, make_engine: MakeEngine, request_: SampleRequest, words: str
) -> None:
    engine = make_engine(module, context_length=100)
    with pytest.raises(EngineError, match=words):
        engine.sample(request_)
    assert len((await complete(engine, tokens(0, 90), 10)).ids) == 10


async def test_a_dead_step_fails_every_waiter_and_the_next_request_is_served(
    module: PreTrainedModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(module, max_batch=2)
    decoder: Any = engine._scheduler.decoder
    forward = decoder.forward
    steps = 0

    def breaks(*args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 6:
            raise RuntimeError("out of memory")
        result: torch.Tensor = forward(*args)
        return result

    decoder.forward = breaks
    samples = [asyncio.create_task(complete(engine, tokens(index, 50), 20)) for index in range(5)]
    found = await asyncio.wait_for(asyncio.gather(*samples, return_exceptions=True), 30)
    assert all(isinstance(each, EngineError) and "out of memory" in str(each) for each in found), found
    assert_exact(module, await complete(engine, tokens(0, 50), 20))


async def test_closing_fails_what_is_in_flight(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    running = asyncio.create_task(complete(engine, tokens(5, 10), 500))
    await asyncio.sleep(0.01)
    await engine.close()
    with pytest.raises(EngineError, match="closed while"):
        await asyncio.wait_for(running, 10)
    with pytest.raises(EngineError, match="is closed"):
        await complete(engine, tokens(5, 10), 5)


async def test_the_cache_stays_within_its_bound(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module, cache_tokens=256, max_batch=4)
    for wave in range(3):
        prompts = [tokens(10 * wave + index, 40 + 30 * index) for index in range(6)]
        for completion in await asyncio.gather(*(complete(engine, prompt, 10) for prompt in prompts)):
            assert_exact(module, completion)
        assert engine.cached_tokens <= 256
        assert engine._scheduler.cache.locked_tokens == 0


async def test_a_prompt_larger_than_the_cache_is_served(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module, cache_tokens=256)
    for completion in await asyncio.gather(*(complete(engine, tokens(index, 600), 4) for index in range(3))):
        assert_exact(module, completion)
    assert engine.cached_tokens <= 256


async def test_a_slow_reader_gets_all_tokens(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    ids: list[int] = []
    async for chunk in engine.sample(SampleRequest(tokens(6, 10), 12, seed=1)):
        await asyncio.sleep(0.02)
        ids += chunk.ids
    assert ids == (await complete(engine, tokens(6, 10), 12, seed=1)).ids


async def test_it_says_what_it_is(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    assert make_engine(module).describe().startswith("engine in float32 on cpu, 1 thread decoding")
