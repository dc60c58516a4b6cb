"""Loss and gradient over the forest are those of separate sequences, however the forest is cut."""

import functools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrein.config import AlgorithmSection, LoraSection
from longrein.forest.packing import pack
from longrein.forest.targets import harvest
from longrein.learning.adapters import attach, without
from longrein.learning.advantages import has_contrast
from longrein.learning.attention import use_forest_attention
from longrein.learning.backend import Packed
from longrein.learning.credit import assign
from longrein.learning.passes import ForestPass, Tally
from longrein.records import Call
from tests.forest.random_calls import make_call, rollouts
from tests.learning import separately
from tests.learning.models import exact_model
from tests.tiny_model import Family

FEW = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
GRPO = AlgorithmSection()


@functools.cache
def pair(family: Family = "llama") -> tuple[Any, Any]:
    """The same model twice: with transformers' attention, and with the forest's."""
    merged = exact_model(family)
    use_forest_attention(merged)
    return exact_model(family), merged


@functools.cache
def adapted_pair() -> tuple[Any, Any]:
    """The same, with equal adapters that are not zero."""
    plain, merged = (attach(exact_model(), LoraSection(rank=4, alpha=8.0)) for _ in range(2))
    use_forest_attention(merged.get_base_model())
    for adapted in (plain, merged):
        torch.manual_seed(1)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return plain, merged


def over_the_forest(
    module: Any,
    batch: list[list[Call]],
    rewards: list[float],
    budget: int,
    algorithm: AlgorithmSection,
    adapted: Any = None,
) -> float:
    """Add the gradient to the module's parameters; return the loss."""
    merged = harvest(batch)
    credit = assign([rewards], merged.targets, algorithm)
    reference = (lambda: without(adapted)) if adapted is not None else nullcontext
    work = ForestPass(
        module, Packed(module, torch.float64), torch.float64, algorithm, merged.targets, credit, reference
    )
    tally = Tally()
    for part in pack(merged.forest, merged.targets.row, credit.credited, budget):
        work.accumulate(part, tally)
    return tally.loss


def gradients(module: Any) -> Tensor:
    """All gradients of a module in one vector."""
    found = [
        (parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)).reshape(-1)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    return torch.cat(found)


def compare(loss: float, expected: float, gradient: Tensor, wanted: Tensor) -> None:
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert float((gradient - wanted).norm()) <= 1e-9 * float(wanted.norm()) + 1e-13


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[list[Call]], list[float]]:
    """A group with contrast."""
    batch = draw(rollouts(most_calls=4))
    rewards = [draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in batch]
    assume(has_contrast(rewards))
    return batch, rewards


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@FEW
@given(groups(), st.integers(1, 80))
def test_loss_and_gradient_are_those_of_separate_sequences(
    family: Family, group: tuple[list[list[Call]], list[float]], budget: int
) -> None:
    batch, rewards = group
    plain, merged = pair(family)
    plain.zero_grad()
    merged.zero_grad()
    expected = separately.loss(plain, batch, rewards, GRPO)
    if expected.requires_grad:
        expected.backward()
    loss = over_the_forest(merged, batch, rewards, budget, GRPO)
    compare(loss, float(expected.detach()), gradients(merged), gradients(plain))


@FEW
@given(groups(), st.integers(1, 80))
def test_the_same_with_adapters_a_reference_and_entropy(
    group: tuple[list[list[Call]], list[float]], budget: int
) -> None:
    batch, rewards = group
    algorithm = AlgorithmSection(kl_coefficient=0.3, entropy_coefficient=0.1)
    plain, merged = adapted_pair()
    plain.zero_grad()
    merged.zero_grad()

    def reference(call: Call) -> Tensor:
        with torch.no_grad():
            return separately.token_logprobs(pair()[0], call)

    expected = separately.loss(plain.get_base_model(), batch, rewards, algorithm, reference)
    if expected.requires_grad:
        expected.backward()
    loss = over_the_forest(merged.get_base_model(), batch, rewards, budget, algorithm, merged)
    compare(loss, float(expected.detach()), gradients(merged), gradients(plain))


@FEW
@given(rollouts(), st.integers(0, 5), st.data())
def test_a_changed_sibling_moves_no_other_log_probability(
    batch: list[list[Call]], token: int, data: st.DataObject
) -> None:
    """Replace one call by another and look at all calls that are there both times."""
    places = [(r, c) for r, calls in enumerate(batch) for c, call in enumerate(calls)]
    assume(places)
    r, c = data.draw(st.sampled_from(places))
    changed = [list(calls) for calls in batch]
    old = changed[r][c]
    changed[r][c] = make_call(
        [*old.prompt_ids.tolist(), token], [token, 1, 2], call_id=old.call_id, temperature=old.temperature
    )
    before, after = (known_logprobs(each) for each in (batch, changed))
    for call_id in before.keys() & after.keys() - {old.call_id}:
        np.testing.assert_allclose(before[call_id], after[call_id], rtol=0, atol=1e-12)


def known_logprobs(batch: list[list[Call]]) -> dict[str, np.ndarray]:
    merged = harvest(batch)
    credit = assign([[0.0] * len(batch)], merged.targets, GRPO)
    work = ForestPass(
        pair()[1], Packed(pair()[1], torch.float64), torch.float64, GRPO, merged.targets, credit, nullcontext
    )
    everything = np.ones(len(merged.targets), bool)
    found = np.zeros(len(merged.targets))
    for part in pack(merged.forest, merged.targets.row, everything, 10_000):
        found[part.targets] = work.logprobs(part).numpy()
    calls = [call for each in batch for call in each if call.delivered and len(call.completion_ids)]
    return {call.call_id: found[merged.targets.call == index] for index, call in enumerate(calls)}


def test_long_branches_in_many_tiles_are_exact_too() -> None:
    """Long enough for several tiles, ranges of keys with gaps, and chunks of the head."""
    random = np.random.default_rng(0)
    trunk = random.integers(0, 400, 150).tolist()
    batch = []
    for number in range(3):
        prompt, calls = trunk, []
        for index, length in enumerate((90, 7, 130)):
            completion = random.integers(0, 400, length).tolist()
            calls.append(make_call(prompt, completion, call_id=f"{number}.{index}", logprobs=[-6.0] * length))
            prompt = [*prompt, *completion, *random.integers(0, 400, 20).tolist()]
        batch.append(calls)
    rewards = [0.0, 1.0, 0.3]
    plain, merged = pair()
    plain.zero_grad()
    expected = separately.loss(plain, batch, rewards, GRPO)
    expected.backward()
    for budget in (10_000, 500):
        merged.zero_grad()
        loss = over_the_forest(merged, batch, rewards, budget, GRPO)
        compare(loss, float(expected.detach()), gradients(merged), gradients(plain))
