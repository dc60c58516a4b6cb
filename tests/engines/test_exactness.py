"""What the engine samples is what transformers would compute, however requests mix."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from longrein.engines.embedded import EmbeddedEngine
from longrein.engines.prefill import BLOCK
from longrein.records import IntArray
from tests.engines.conftest import MakeEngine
from tests.engines.reference import assert_exact, complete, tokens
from tests.tiny_model import Family

FAMILIES: list[Family] = ["llama", "qwen2", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_are_those_of_transformers(
    family: Family, load: Callable[[Family], PreTrainedModel], make_engine: MakeEngine
) -> None:
    module = load(family)
    engine = make_engine(module)
    shared = tokens(0, 3 * BLOCK + 7)
    lengths = (1, 2, BLOCK, BLOCK + 1, 2 * BLOCK + 50, len(shared))
    prompts = [np.concatenate([shared[:n], tokens(n, n % 5)]) for n in lengths for _ in range(2)]
    found = await asyncio.gather(*(complete(engine, p, 12, temperature=t) for p in prompts for t in (1.0, 0.6)))
    for completion in found:
        assert_exact(module, completion)


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_is_transformers_greedy(
    family: Family, load: Callable[[Family], PreTrainedModel], make_engine: MakeEngine
) -> None:
    module = load(family)
    engine = make_engine(module)
    prompts = [tokens(seed, 20 + seed) for seed in range(3)]
    found = await asyncio.gather(*(complete(engine, prompt, 16, temperature=0.0) for prompt in prompts))
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        expected = module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, min_new_tokens=16
        )
        assert completion.ids == expected[0, len(prompt) :].tolist()
        assert_exact(module, completion)


async def test_requests_join_and_leave_a_running_batch(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module, max_batch=3)
    shared = tokens(1, 300)

    async def late(index: int) -> None:
        await asyncio.sleep(0.004 * index)
        prompt = np.concatenate([shared[: 290 + index % 2 * 10], tokens(index, index)])
        assert_exact(module, await complete(engine, prompt, 3 + 7 * index % 11))

    await asyncio.gather(*(late(index) for index in range(14)))


async def test_a_conversation_is_extended_from_the_cache(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    conversation = tokens(2, 150)
    for turn in range(4):
        before = engine.stats
        completion = await complete(engine, conversation, 9)
        assert_exact(module, completion)
        if turn:
            # All but the sampled last token of the reply, the new text, and less the last prompt token.
            assert engine.stats.prefill_tokens - before.prefill_tokens == 1 + 20 - 1
        conversation = np.concatenate([completion.whole, tokens(turn, 20)])


async def test_a_shared_prefix_is_computed_once(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    shared = tokens(3, 500)
    prompts = [np.concatenate([shared, np.full(1 + index, 7 + index, np.int32)]) for index in range(6)]
    found = await asyncio.gather(*(complete(engine, prompt, 5) for prompt in [*prompts, *prompts]))
    for completion in found:
        assert_exact(module, completion)
    assert engine.stats.prefill_tokens == 500 + sum(range(6))
    given = sum(len(prompt) - 1 for prompt in prompts) * 2
    assert engine.stats.prefill_tokens + engine.stats.reused_tokens == given


async def test_a_node_split_under_running_sequences(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    """A first group holds a long node as a segment; a second one diverges inside it and shares its beginning."""
    engine = make_engine(module, max_batch=12)
    shared = tokens(4, 700)
    first = [asyncio.create_task(complete(engine, shared, 40)) for _ in range(4)]
    while engine.stats.decode_steps < 3:
        await asyncio.sleep(0.001)
    other = np.concatenate([shared[:600], tokens(5, 80)])
    second = [asyncio.create_task(complete(engine, other, 25)) for _ in range(4)]
    alone = asyncio.create_task(complete(engine, np.concatenate([shared[:500], tokens(6, 9)]), 30))
    for completion in await asyncio.gather(*first, *second, alone):
        assert_exact(module, completion)


async def test_shared_nodes_at_several_depths(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    """All share a prefix, two groups share more, and one sequence of a third kind shares nothing."""
    engine = make_engine(module, max_batch=12)
    trunk = tokens(20, 300)
    groups = [np.concatenate([trunk, tokens(21 + index, 450 + 100 * index)]) for index in range(2)]
    prompts = [group for group in groups for _ in range(4)]
    prompts += [np.concatenate([groups[0], tokens(30, 5)]), tokens(31, 80)]
    samples = [asyncio.create_task(complete(engine, prompt, 12)) for prompt in prompts]
    while engine.stats.decode_steps < 3:
        await asyncio.sleep(0.001)
    samples.append(asyncio.create_task(complete(engine, np.concatenate([groups[1], tokens(32, 3)]), 12)))
    for completion in await asyncio.gather(*samples):
        assert_exact(module, completion)
    assert engine.stats.prefill_tokens == 300 + (449 + 1 + 4) + 549 + 79 + (1 + 2)


async def test_prompts_longer_than_a_pass(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module)
    shared = tokens(7, 2600)
    prompts = [np.concatenate([shared, tokens(8 + index, 700)]) for index in range(3)]
    for completion in await asyncio.gather(*(complete(engine, prompt, 3) for prompt in prompts)):
        assert_exact(module, completion)
    assert engine.stats.prefill_tokens == 2600 + 3 * 699


async def test_bfloat16_stays_close(module: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(module, dtype=torch.bfloat16)
    completion = await complete(engine, tokens(9, 200), 50)
    ids = torch.from_numpy(completion.whole.astype(np.int64))[None]
    with torch.no_grad():
        expected = module(ids).logits[0, 199:-1].log_softmax(1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
    assert (torch.tensor(completion.logprobs) - expected).abs().mean() < 0.2


@dataclass(frozen=True)
class Plan:
    """A random batch: prompts that share beginnings in every way, and when each of them comes."""

    prompts: list[IntArray]
    lengths: list[int]
    delays: list[int]
    max_batch: int
    cache_tokens: int


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    trunk = tokens(draw(st.integers(0, 99)), 400)
    prompts: list[IntArray] = []
    for _ in range(draw(st.integers(1, 10))):
        # Off the trunk, or off an earlier prompt; two letters only, so that divergence after a few tokens is common.
        stem = draw(st.sampled_from([trunk, *prompts]))
        cut = draw(st.integers(0, len(stem)))
        ending = draw(st.lists(st.integers(3, 4), min_size=1, max_size=12))
        prompts.append(np.concatenate([stem[:cut], np.array(ending, np.int32)]))
    count = len(prompts)
    return Plan(
        prompts,
        draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)),
        draw(st.lists(st.integers(0, 6), min_size=count, max_size=count)),
        draw(st.integers(1, 6)),
        draw(st.sampled_from([64, 300, 4096])),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans())
def test_any_mix_of_prompts(plan: Plan, load: Callable[[Family], PreTrainedModel]) -> None:
    module = load("qwen3")

    async def all_of_them() -> None:
        with ThreadPoolExecutor(1) as executor:
            engine = EmbeddedEngine(
                module,
                dtype=torch.float32,
                decode_threads=1,
                prefill_threads=1,
                max_batch=plan.max_batch,
                cache_tokens=plan.cache_tokens,
                context_length=None,
                executor=executor,
                seed=0,
            )

            async def one(index: int) -> None:
                await asyncio.sleep(plan.delays[index] / 1000)
                completion = await complete(engine, plan.prompts[index], plan.lengths[index])
                assert_exact(module, completion)
                again = np.append(completion.whole, np.int32(5))
                assert_exact(module, await complete(engine, again, plan.lengths[index]))

            await asyncio.gather(*(one(index) for index in range(len(plan.prompts))))
            assert engine.cached_tokens <= plan.cache_tokens
            await engine.close()

    asyncio.run(all_of_them())
