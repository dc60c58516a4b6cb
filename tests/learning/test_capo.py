"""CAPO: each role's gradient is that of its loss alone, and reaches its own parameters and no others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longrein.config import LoraSection
from longrein.errors import LearnerError
from longrein.forest.targets import harvest
from longrein.learning.batch import TrainBatch, TrainGroup, TrainRollout
from longrein.learning.capo import ADAPTERS, ROLES, role_tokens
from longrein.learning.learner import EmbeddedLearner
from longrein.records import Call, Role
from tests.forest.random_calls import make_call
from tests.learning import models, separately

LORA = LoraSection(rank=4, alpha=8.0)
REWARDS = (0.0, 1.0, 0.25)


def make_batch(module: Any, seed: int = 0) -> TrainBatch:
    """One group; each call has tokens of all three roles, not the same number in each."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 400, 9).tolist()
    rollouts = []
    for number, reward in enumerate(REWARDS):
        calls, history = [], prompt
        for index in range(2):
            roles = np.array([0, 1, 1, 0, 2, 2, 2][number : 6 + index], np.uint8)
            made = make_call(
                history,
                random.integers(0, 400, len(roles)).tolist(),
                call_id=f"{seed}.{number}.{index}",
                rollout_id=str(number),
                index=index,
            )
            with torch.no_grad():
                logprobs = separately.token_logprobs(module, made).float().numpy()
            calls.append(replace(made, logprobs=logprobs, roles=roles))
            history = [*history, *made.completion_ids.tolist(), *random.integers(0, 400, 3).tolist()]
        rollouts.append(TrainRollout(str(number), reward, tuple(calls)))
    return TrainBatch((TrainGroup("0", tuple(rollouts)),))


def loss_of(module: Any, batch: TrainBatch, role: Role, others: str) -> Tensor:
    """L of one role, naively: GRPO, each rollout's mean over its own tokens of that role."""
    total = torch.zeros((), dtype=torch.float32)
    spread, mean = np.std(REWARDS, ddof=1), np.mean(REWARDS)
    for rollout in batch.rollouts:
        terms = []
        for call in rollout.calls:
            assert call.roles is not None
            for place, logprob in enumerate(separately.token_logprobs(module, call)):
                mine = call.roles[place] == role or (call.roles[place] == Role.OTHER and ADAPTERS[role] == others)
                if mine:
                    terms.append(torch.exp(logprob - logprob.detach()))
        if terms:
            total = total - torch.stack(terms).mean() * (rollout.reward - mean) / spread / len(batch.rollouts)
    return total


def captured(learner: EmbeddedLearner, batch: TrainBatch) -> dict[str, Tensor]:
    """The gradient that an update leaves, before it is clipped and used."""
    found: dict[str, Tensor] = {}
    step = learner._optimizer.step

    def instead(*args: Any, **kwargs: Any) -> None:
        for name, parameter in learner.module.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()

    learner._optimizer.step = instead  # type: ignore[assignment]
    try:
        report = learner.update(batch)
    finally:
        learner._optimizer.step = step  # type: ignore[method-assign]
    assert report.roles is not None and report.learned
    return found


def naive_gradients(module: Any, batch: TrainBatch, role: Role, others: str) -> dict[str, Tensor]:
    module.zero_grad()
    loss_of(module, batch, role, others).backward()
    found = {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    module.zero_grad()
    return found


def close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= 2e-4 * float(other.norm()) + 1e-7


def warmed(form: str, **capo: Any) -> EmbeddedLearner:
    """A learner whose adapters are no longer zero."""
    options = {"lora": LORA} if form == "split_lora" else {}
    learner = models.learner({"capo": {"form": form, **capo}}, grad_clip=1e9, **options)
    learner.update(make_batch(learner.module, seed=5))
    return learner


@pytest.mark.parametrize("others", ["arguments", "action", "leave"])
def test_each_adapter_learns_from_its_role_alone(others: str) -> None:
    learner = warmed("split_lora", others=others)
    batch = make_batch(learner.module)
    wanted = {role: naive_gradients(learner.module, batch, role, others) for role in ROLES}
    found = captured(learner, batch)
    assert found
    for name, gradient in found.items():
        role = Role.ACTION if ".action." in name else Role.ARGUMENTS
        assert close(gradient, wanted[role][name]), name
    flat = {role: torch.cat([each.flatten() for each in wanted[role].values()]) for role in ROLES}
    report = learner.update(batch)
    assert report.roles is not None
    cosine = float(torch.cosine_similarity(flat[Role.ACTION], flat[Role.ARGUMENTS], dim=0))
    assert report.roles.cosine == pytest.approx(cosine, abs=1e-3)
    assert report.roles.action == pytest.approx(float(flat[Role.ACTION].norm()), rel=1e-3)
    assert report.roles.arguments == pytest.approx(float(flat[Role.ARGUMENTS].norm()), rel=1e-3)


def test_without_routing_both_losses_reach_everything() -> None:
    learner = warmed("split_lora", control="unrouted")
    batch = make_batch(learner.module)
    wanted = {role: naive_gradients(learner.module, batch, role, "arguments") for role in ROLES}
    for name, gradient in captured(learner, batch).items():
        assert close(gradient, wanted[Role.ACTION][name] + wanted[Role.ARGUMENTS][name]), name


def test_coefficients_weigh_the_losses() -> None:
    plain, heavy = warmed("split_lora"), warmed("split_lora")
    assert heavy._capo is not None
    heavy._capo.section = heavy._capo.section.model_copy(update={"action_coefficient": 3.0, "arguments_coefficient": 0})
    batch = make_batch(plain.module)
    one, other = captured(plain, batch), captured(heavy, batch)
    for name, gradient in one.items():
        assert close(other[name], gradient * 3) if ".action." in name else not other[name].any()


@pytest.mark.parametrize("control", ["none", "random", "unrouted"])
def test_the_other_units_are_still_to_the_byte(control: str) -> None:
    learner = models.learner({"capo": {"form": "neurons", "share": 0.25, "control": control}}, weight_decay=0.5)
    start = {name: parameter.detach().clone() for name, parameter in learner.module.named_parameters()}
    for seed in range(3):
        assert learner.update(make_batch(learner.module, seed)).learned
    assert learner._capo is not None and learner._capo.units is not None
    chosen = learner._capo.units.chosen
    either = chosen[Role.ACTION] | chosen[Role.ARGUMENTS]
    assert chosen[Role.ACTION].sum(1).tolist() == [round(0.25 * either.shape[1])] * len(either)
    for name, parameter in learner.module.named_parameters():
        moved = (parameter.detach() != start[name]).numpy()
        part = name.split(".")[-2]
        if part not in ("gate_proj", "up_proj", "down_proj"):
            assert not moved.any(), name
            continue
        layer = int(name.split(".layers.")[1].split(".")[0])
        units = moved.any(1) if part != "down_proj" else moved.any(0)
        assert (units == either[layer]).all(), name


def test_units_take_the_gradient_of_their_role() -> None:
    learner = warmed("neurons", share=0.3)
    batch = make_batch(learner.module)
    assert learner._capo is not None and learner._capo.units is not None
    chosen = learner._capo.units.chosen
    wanted = {role: naive_gradients(learner.module, batch, role, "arguments") for role in ROLES}
    for name, gradient in captured(learner, batch).items():
        layer = int(name.split(".layers.")[1].split(".")[0])
        total = torch.zeros_like(gradient)
        for role in ROLES:
            mask = torch.from_numpy(chosen[role][layer]).float()
            total += wanted[role][name] * (mask[None, :] if "down_proj" in name else mask[:, None])
        assert close(gradient, total), name


def test_the_probe_finds_the_most_active_units() -> None:
    learner = models.learner({"capo": {"form": "neurons", "share": 0.1}})
    batch = make_batch(learner.module)
    activity = dict.fromkeys(ROLES, 0.0)
    layers = [layer for layer in learner.module.modules() if hasattr(layer, "down_proj")]
    seen: list[Tensor] = []
    handles = [layer.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0][0])) for layer in layers]
    for rollout in batch.rollouts:
        if rollout.reward <= np.mean(REWARDS):
            continue
        for call in rollout.calls:
            seen.clear()
            with torch.no_grad():
                separately.distributions(learner.module, call)
            states = torch.stack([each.clamp(min=0) for each in seen])  # (layers, tokens, units)
            rows = states[:, len(call.prompt_ids) - 1 : -1]
            for role in ROLES:
                assert call.roles is not None
                activity[role] = activity[role] + rows[:, torch.from_numpy(call.roles == role)].sum(1)
    for handle in handles:
        handle.remove()
    learner.update(batch)
    assert learner._capo is not None and learner._capo.units is not None
    for role in ROLES:
        best = np.argsort(-np.asarray(activity[role]), axis=1)[:, : learner._capo.units.chosen[role][0].sum()]
        for layer, units in enumerate(best):
            assert set(np.flatnonzero(learner._capo.units.chosen[role][layer])) == set(units)


def test_nothing_is_learned_before_the_probe_finds_something() -> None:
    learner = models.learner({"capo": {"form": "neurons"}})
    batch = make_batch(learner.module)
    plain = [replace(rollout, calls=tuple(map(without_roles, rollout.calls))) for rollout in batch.rollouts]
    report = learner.update(TrainBatch((TrainGroup("0", tuple(plain)),)))
    assert not report.learned and "no action and no arguments token" in report.why_not
    assert learner.update(batch).learned


def without_roles(call: Call) -> Call:
    return replace(call, roles=None)


@pytest.mark.parametrize("form", ["split_lora", "neurons"])
def test_save_load_and_go_on(tmp_path: Path, form: str) -> None:
    learner = warmed(form)
    learner.save(tmp_path)
    options = {"lora": LORA} if form == "split_lora" else {}
    other = models.learner({"capo": {"form": form}}, grad_clip=1e9, **options)
    other.load(tmp_path)
    batch = make_batch(learner.module, 1)
    learner.update(batch)
    other.update(batch)
    one, two = learner.weights(), other.weights()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_random_deal_keeps_how_many_of_each() -> None:
    learner = models.learner({"capo": {"control": "random", "others": "leave"}}, lora=LORA)
    assert learner._capo is not None
    targets = harvest([rollout.calls for rollout in make_batch(learner.module).rollouts]).targets
    for role in ROLES:
        dealt = role_tokens(learner._capo.section, targets, role)
        for call in np.unique(targets.call):
            assert dealt[targets.call == call].sum() == (targets.role[targets.call == call] == role).sum()
    assert (role_tokens(learner._capo.section, targets, Role.ACTION) != (targets.role == Role.ACTION)).any()


def test_the_form_and_what_is_trained_belong_together() -> None:
    with pytest.raises(LearnerError, match=r"split_lora needs learner\.lora"):
        models.learner({"capo": {"form": "split_lora"}})
    with pytest.raises(LearnerError, match=r"leave learner\.lora out"):
        models.learner({"capo": {"form": "neurons"}}, lora=LORA)
