"""Whole updates: what they move, what they report, and what they leave alone."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from longrein.config import AlgorithmSection, LearnerSection, LoraSection
from longrein.errors import LearnerError
from longrein.learning.batch import TrainBatch, TrainGroup, TrainRollout
from longrein.learning.learner import EmbeddedLearner
from longrein.learning.precision import choose_precision, thread_count
from longrein.records import Call
from tests.forest.random_calls import make_call
from tests.learning import models, separately

LORA = LoraSection(rank=4, alpha=8.0)


def make_batch(module: Any, seed: int = 0, rewards: tuple[float, ...] = (0.0, 1.0, 0.25), **call: Any) -> TrainBatch:
    """Two groups: one whose rollouts differ in reward, one whose rollouts do not."""
    random = np.random.default_rng(seed)
    groups = []
    for number, group_rewards in enumerate((rewards, (1.0, 1.0))):
        prompt = random.integers(0, 400, 12).tolist()
        rollouts = []
        for index, reward in enumerate(group_rewards):
            name = f"{seed}.{number}.{index}"
            rollouts.append(TrainRollout(name, reward, tuple(two_calls(module, random, prompt, name, **call))))
        groups.append(TrainGroup(str(number), tuple(rollouts)))
    return TrainBatch(tuple(groups))


def two_calls(module: Any, random: Any, prompt: list[int], name: str, **call: Any) -> list[Call]:
    """The second extends the first. Their log-probabilities are the module's own."""
    calls = []
    for index in range(2):
        completion = random.integers(0, 400, 5).tolist()
        made = make_call(prompt, completion, call_id=f"{name}.{index}", rollout_id=name, index=index, **call)
        with torch.no_grad():
            logprobs = separately.token_logprobs(module, made).float().tolist()
        calls.append(
            make_call(prompt, completion, call_id=made.call_id, rollout_id=name, index=index, logprobs=logprobs, **call)
        )
        prompt = [*prompt, *completion, *random.integers(0, 400, 3).tolist()]
    return calls


def snapshot(learner: EmbeddedLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_update_reports_what_it_did() -> None:
    learner = models.learner()
    batch = make_batch(learner.module)
    before = snapshot(learner)
    report = learner.update(batch)
    assert report.learned and not report.why_not
    assert not same(before, snapshot(learner))
    assert report.tokens_trained == 5 * 2 * 5
    assert report.tokens_flat == 5 * (17 + 25)
    # Shared: 12 prompt tokens in each group, the first completion and observation within a rollout.
    assert report.tokens_forest == 2 * 12 + 5 * 13
    # The group without contrast is not computed, nor is the last token of a rollout.
    assert report.tokens_computed == 12 + 3 * 12
    assert (report.groups, report.groups_with_contrast) == (2, 1)
    assert report.logprob_difference_max < 1e-4
    assert report.ratio_outside == report.clip_fraction == report.importance_cut == report.kl == 0.0
    assert report.grad_norm > 0 and report.learning_rate == 1e-3
    calls = [call for rollout in batch.groups[0].rollouts for call in rollout.calls]
    assert report.entropy == pytest.approx(-np.mean([call.logprobs for call in calls]), rel=1e-4)


def test_what_the_sampler_got_wrong_is_seen() -> None:
    learner = models.learner()
    batch = make_batch(learner.module)
    shifted = TrainBatch(
        tuple(
            TrainGroup(
                group.group_id,
                tuple(
                    TrainRollout(rollout.rollout_id, rollout.reward, tuple(shift(call, 0.9) for call in rollout.calls))
                    for rollout in group.rollouts
                ),
            )
            for group in batch.groups
        )
    )
    report = learner.update(shifted)
    assert report.logprob_difference_mean == pytest.approx(0.9, abs=1e-3)
    assert report.ratio_outside == 1.0
    assert report.importance_cut == 1.0  # exp(0.9) is above 2


def shift(call: Call, by: float) -> Call:
    return make_call(
        call.prompt_ids.tolist(),
        call.completion_ids.tolist(),
        call_id=call.call_id,
        logprobs=(call.logprobs - by).tolist(),
    )


@pytest.mark.parametrize("lora", [None, LORA])
def test_updates_can_be_repeated_to_the_bit(lora: LoraSection | None) -> None:
    results = []
    for _ in range(2):
        learner = models.learner(lora=lora)
        for seed in range(2):
            learner.update(make_batch(learner.module, seed))
        results.append(snapshot(learner))
    assert same(*results)


@pytest.mark.parametrize("budget", [16, 40, 8192])
def test_the_budget_does_not_change_the_step(budget: int) -> None:
    whole, cut = models.learner(), models.learner(micro_batch_tokens=budget)
    batch = make_batch(whole.module)
    one, other = whole.update(batch), cut.update(batch)
    assert other.loss == pytest.approx(one.loss, abs=1e-5)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


@pytest.mark.parametrize("lora", [None, LORA])
def test_save_load_and_go_on_equals_going_on(tmp_path: Path, lora: LoraSection | None) -> None:
    learner = models.learner(lora=lora, warmup_steps=4)
    learner.update(make_batch(learner.module, 0))
    learner.save(tmp_path)
    resumed = models.learner(lora=lora, warmup_steps=4)
    resumed.load(tmp_path)
    assert same(snapshot(learner), snapshot(resumed))
    batch = make_batch(learner.module, 1)
    one, other = learner.update(batch), resumed.update(batch)
    assert one.learning_rate == other.learning_rate == pytest.approx(1e-3 * 2 / 4)
    assert same(snapshot(learner), snapshot(resumed))


@pytest.mark.parametrize("lora", [None, LORA])
def test_what_is_saved_is_a_model_directory(tmp_path: Path, lora: LoraSection | None) -> None:
    learner = models.learner(lora=lora)
    for seed in range(2):
        learner.update(make_batch(learner.module, seed))
    learner.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.dtype == torch.float32
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, learner.module(ids).logits, rtol=1e-3, atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


def test_adapters_leave_the_base_alone_and_merge_into_its_names() -> None:
    plain, adapted = models.learner(), models.learner(lora=LORA)
    start = snapshot(plain)
    assert same(start, snapshot(adapted))
    adapted.update(make_batch(plain.module))
    after = snapshot(adapted)
    moved = {name for name in start if not torch.equal(start[name], after[name])}
    assert moved == {name for name in start if "_proj.weight" in name}
    base = dict(adapted.module.named_parameters())
    for name, tensor in start.items():
        own = name if name in base else name.replace("_proj.", "_proj.base_layer.")
        assert torch.equal(base[own], tensor)


def test_a_reference_pulls_back() -> None:
    """With KL the loss has a term for every token, and rollouts without contrast are computed too."""
    learner = models.learner({"kl_coefficient": 0.5}, lora=LORA)
    first = learner.update(make_batch(learner.module))
    assert first.kl == pytest.approx(0.0, abs=1e-6)
    assert first.tokens_computed == 2 * 12 + 5 * 12
    second = learner.update(make_batch(learner.module, 1))
    assert second.kl > 0
    still = learner.update(make_batch(learner.module, 2, rewards=(1.0, 1.0)))
    assert still.learned and still.groups_with_contrast == 0


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (TrainBatch(()), "no group reached its quorum"),
        ({"rewards": (1.0, 1.0, 1.0)}, "rewards are equal (all are 1: "),
        ({"delivered": False}, "no trainable token"),
    ],
)
def test_nothing_learned_says_why(batch: Any, says: str) -> None:
    learner = models.learner(weight_decay=0.1)
    learner.update(make_batch(learner.module, 5))
    before = snapshot(learner)
    given = batch if isinstance(batch, TrainBatch) else make_batch(learner.module, **batch)
    report = learner.update(given)
    assert not report.learned and says in report.why_not
    assert same(before, snapshot(learner)) and learner.updates == 1


def test_rollouts_that_were_all_cut_off_teach_nothing() -> None:
    learner = models.learner({"cut_off": "mask"})
    batch = make_batch(learner.module)
    groups = [replace(g, rollouts=tuple(replace(each, cut_off=True) for each in g.rollouts)) for g in batch.groups]
    report = learner.update(TrainBatch(tuple(groups)))
    assert not report.learned and report.tokens_computed == 0
    assert report.why_not == "every rollout was cut off, and algorithm.cut_off is mask"


def test_epochs_and_mini_batches_are_optimizer_steps() -> None:
    learner = models.learner({"epochs": 3, "mini_batches": 2}, learning_rate=1e-4)
    report = learner.update(make_batch(learner.module))
    # The second mini-batch is the group without contrast: no step of its own.
    assert report.optimizer_steps == learner.updates == 3
    assert report.learned and not report.why_not
    assert report.micro_batches == 3 and report.tokens_computed == 3 * (12 + 3 * 12)
    assert report.clip_fraction > 0


def test_a_number_that_is_not_finite_is_never_stepped_on() -> None:
    learner = models.learner()
    batch = make_batch(learner.module)
    with torch.no_grad():
        learner.module.get_input_embeddings().weight[7, 0] = math.inf
    before = snapshot(learner)
    report = learner.update(batch)
    assert not report.learned and "not finite" in report.why_not
    assert same(before, snapshot(learner)) and learner.updates == 0


def test_a_cancelled_update_changes_nothing() -> None:
    learner, undisturbed = models.learner(micro_batch_tokens=40), models.learner(micro_batch_tokens=40)
    batch = make_batch(learner.module)
    seen: list[tuple[int, int]] = []
    before = snapshot(learner)
    with pytest.raises(LearnerError, match="cancelled after 1 of 2"):
        learner.update(batch, lambda done, total: seen.append((done, total)), lambda: len(seen) == 1)
    assert seen == [(1, 2)]
    assert same(before, snapshot(learner)) and learner.updates == 0
    learner.update(batch)
    undisturbed.update(batch)
    assert same(snapshot(learner), snapshot(undisturbed))


def test_reward_goes_up() -> None:
    """A bandit with one right token of 438: probability mass moves there within a few steps."""
    learner = models.learner(learning_rate=3e-3)
    random = np.random.default_rng(0)
    prompt, right = [5, 6, 7], 42
    means = []
    for step in range(12):
        with torch.no_grad():
            logits = learner.module(torch.tensor([prompt])).logits[0, -1].double()
        chances = torch.softmax(logits, -1).numpy()
        # Most samples are drawn among ten tokens, so that a group has contrast from the first step.
        sampled = [int(random.choice(10, p=chances[38:48] / chances[38:48].sum())) + 38 for _ in range(16)]
        means.append(float(chances[right] / chances[38:48].sum()))
        rollouts = []
        for index, token in enumerate(sampled):
            call = make_call(prompt, [token], call_id=f"{step}.{index}", logprobs=[math.log(chances[token])])
            rollouts.append(TrainRollout(call.call_id, float(token == right), (call,)))
        learner.update(TrainBatch((TrainGroup(str(step), tuple(rollouts)),)))
    assert means[0] < 0.5 < 0.9 < means[-1]


def test_bad_configurations_and_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"kl_coefficient.*needs learner\.lora"):
        models.learner({"kl_coefficient": 0.1})
    with pytest.raises(LearnerError, match=r"lora\.targets: query name no linear layer.*q_proj"):
        models.learner(lora=LoraSection(targets=["query", "q_proj"]))
    learner, adapted = models.learner(), models.learner(lora=LORA)
    learner.save(tmp_path)
    with pytest.raises(LearnerError, match="cannot be read"):
        adapted.load(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    adapted.save(other)
    with pytest.raises(LearnerError, match="another rank"):
        models.learner(lora=LoraSection(rank=2)).load(other)
    with pytest.raises(LearnerError, match="optimizer"):
        learner.load(other)
    (tmp_path / "optimizer.pt").write_bytes(b"half of it")
    with pytest.raises(LearnerError, match="optimizer"):
        learner.load(tmp_path)
    qwen = EmbeddedLearner.open(
        models.directory("qwen2"), LearnerSection(precision="float32", threads=1), AlgorithmSection()
    )
    with pytest.raises(LearnerError, match="another model"):
        qwen.load(tmp_path)
    shutil.rmtree(other)


def test_precision_and_threads() -> None:
    module = models.learner().module
    assert choose_precision(module, "bfloat16") == torch.bfloat16
    assert choose_precision(module, "auto") in (torch.float32, torch.bfloat16)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert thread_count(3) == 3 and thread_count("auto") >= 1


def test_bfloat16_is_close() -> None:
    exact, rough = models.learner(), models.learner(precision="bfloat16")
    batch = make_batch(exact.module)
    one, other = exact.update(batch), rough.update(batch)
    assert other.learned and rough.precision == torch.bfloat16
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=0.2)
    assert 0 < other.logprob_difference_mean < 0.5
    assert all(tensor.dtype == torch.float32 for tensor in rough.weights().values())


def test_threads_are_given_back() -> None:
    learner = models.learner(threads=2)
    before = torch.get_num_threads()
    learner.update(make_batch(learner.module))
    assert torch.get_num_threads() == before
    assert "2 threads" in learner.describe() and "all weights" in learner.describe()
