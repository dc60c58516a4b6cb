"""Every algorithm against the naive one: any choice of keys the configuration accepts, loss and gradient."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from longrein.config import AlgorithmSection, LearnerSection, LoraSection, ProcessSection
from longrein.config_file import load
from longrein.errors import ConfigError, LearnerError
from longrein.forest.targets import Targets
from longrein.learning.adapters import attach, without
from longrein.learning.attention import use_forest_attention
from longrein.learning.backend import Packed
from longrein.learning.batch import TrainBatch, TrainGroup, TrainRollout, Work
from longrein.learning.credit import assign, share
from longrein.learning.figures import UpdateReport
from longrein.learning.importance import importance_weights, over
from longrein.learning.learner import Body, EmbeddedLearner
from longrein.learning.losses import token_losses
from longrein.learning.shaping import shaped
from longrein.learning.walk import Walk
from longrein.presets import PRESETS
from longrein.records import Call
from tests.forest.random_calls import make_call
from tests.learning import models, naive, separately
from tests.learning.naive import Attempt, Token, Turn

MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ROWS, VOCABULARY = 5, 4
JUDGED = (None, 0.0, 0.5, 1.0)
KEYS: dict[str, list[Any]] = {
    "advantage": ["group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std", "reward"],
    "normalization": ["rollout_mean", "token_mean", "constant"],
    "constant_length": [1, 7, 1024],
    "discount": [1.0, 0.9, 0.5],
    "process": [
        {},
        {"coefficient": 0.5},
        {"coefficient": -2.0, "discount": 0.7},
        {"coefficient": 1.0, "discount": 0.0},
    ],
    "surrogate": ["clip", "clip", "cispo", "policy_gradient"],
    "ratio_level": ["token", "call", "rollout"],
    "old_policy": ["proximal", "behaviour"],
    "clip_low": [0.2, 0.05, 3e-4, 1.0],
    "clip_high": [0.28, 0.05, 4e-4, 3.0],
    "dual_clip": [None, 1.2, 3.0],
    "importance": ["none", "truncate", "mask", "band"],
    "importance_level": ["token", "call", "rollout"],
    "importance_mean": ["product", "geometric"],
    "importance_low": [0.0, 0.5, 0.9],
    "importance_high": [1.1, 2.0, 5.0],
    "kl_coefficient": [0.0, 0.04, 1.5],
    "kl_estimator": ["k1", "k2", "k3"],
    "entropy_coefficient": [0.0, 0.01, 0.5],
    "overlong_limit": [None, 3, 8],
    "overlong_buffer": [0, 1, 3],
    "cut_off": ["keep", "mask"],
    "mini_batches": [1, 2, 3],
}


@st.composite
def algorithms(draw: st.DrawFn) -> AlgorithmSection:
    """A preset with some keys changed; what it refuses is drawn again."""
    for _ in range(100):
        names = draw(st.lists(st.sampled_from(sorted(KEYS)), max_size=12, unique=True))
        keys = {name: draw(st.sampled_from(KEYS[name])) for name in names}
        try:
            return AlgorithmSection(name=draw(st.sampled_from(sorted(PRESETS))), **keys)
        except ValidationError:
            continue
    raise AssertionError("a hundred choices in a row were refused")


def random_groups(
    random: np.random.Generator, sizes: list[int], *, most_turns: int = 3, least_turns: int = 0
) -> tuple[Tensor, list[list[Attempt]]]:
    """Rollouts of a model that is a table of logits (ROWS, VOCABULARY), and that table, with gradient.

    A token's policies differ as after a few steps, and now and then not at all.
    """
    table = torch.tensor(random.normal(size=(ROWS, VOCABULARY)), requires_grad=True)
    apart = random.choice([0.0, 0.02, 0.3])

    def token() -> Token:
        logprobs = torch.log_softmax(table[int(random.integers(ROWS))], 0)
        current = logprobs[int(random.integers(VOCABULARY))]
        proximal = float(current.detach()) + apart * float(random.normal())
        return Token(
            behaviour=float(np.float32(proximal + random.normal() * 0.5)),
            proximal=proximal,
            current=current,
            entropy=-(logprobs.exp() * logprobs).sum(),
            reference=proximal + float(random.normal()) * 0.2,
        )

    def attempt() -> Attempt:
        turns = [
            Turn([token() for _ in range(random.integers(1, 4))], JUDGED[int(random.integers(4))])
            for _ in range(random.integers(least_turns, most_turns + 1))
        ]
        return Attempt(float(random.choice([0.0, 0.25, 1.0])), turns, bool(random.integers(4) == 0))

    return table, [[attempt() for _ in range(size)] for size in sizes]


def targets_of(groups: naive.Groups) -> Targets:
    attempts = [attempt for group in groups for attempt in group]
    rows = [(index, turn, token) for index, each in enumerate(attempts) for turn in each.turns for token in turn.tokens]
    calls: dict[int, int] = {}
    for _, turn, _ in rows:
        calls.setdefault(id(turn), len(calls))
    count = len(rows)
    return Targets(
        row=np.zeros(count, np.int64),
        token=np.zeros(count, np.int32),
        rollout=np.array([index for index, _, _ in rows], np.int32),
        call=np.array([calls[id(turn)] for _, turn, _ in rows], np.int32),
        logprob=np.array([token.behaviour for _, _, token in rows], np.float32),
        version=np.zeros(count, np.int32),
        temperature=np.ones(count, np.float32),
        role=np.zeros(count, np.uint8),
    )


def library_loss(groups: naive.Groups, algorithm: AlgorithmSection, hand: int) -> Tensor:
    """The loss of the optimizer step on mini-batch ``hand``, as the learner puts it together."""
    targets = targets_of(groups)
    attempts = [attempt for group in groups for attempt in group]
    tokens = [token for attempt in attempts for token in attempt.tokens]
    credit = assign(
        [[shaped(attempt.reward, len(attempt.tokens), algorithm) for attempt in group] for group in groups],
        targets,
        algorithm,
        process=[[[turn.reward for turn in attempt.turns] for attempt in group] for group in groups],
        masked=np.array([algorithm.cut_off == "mask" and attempt.cut_off for attempt in attempts], bool),
    )
    if algorithm.mini_batches > 1:
        mine = np.repeat(np.arange(len(groups)) % algorithm.mini_batches == hand, [len(group) for group in groups])
        credit = share(credit, targets, algorithm, mine[targets.rollout], int(mine.sum()))
    if not credit.credited.any():
        return torch.zeros((), dtype=torch.float64)
    proximal = np.array([token.proximal for token in tokens])
    old = proximal if algorithm.old_policy == "proximal" else targets.logprob.astype(np.float64)
    current = torch.stack([token.current for token in tokens])
    apart = over(algorithm.ratio_level, targets, current.detach().numpy() - old, mean=True)
    losses = token_losses(
        algorithm,
        current,
        torch.from_numpy(apart),
        torch.from_numpy(credit.advantage),
        torch.from_numpy(importance_weights(algorithm, targets, proximal).weight),
        torch.tensor([token.reference for token in tokens], dtype=torch.float64),
        torch.stack([token.entropy for token in tokens]),
    )
    return (torch.from_numpy(credit.weight * credit.credited) * losses.loss).sum()


def gradient(loss: Tensor, table: Tensor) -> Tensor:
    if not loss.requires_grad:
        return torch.zeros_like(table)
    (found,) = torch.autograd.grad(loss, table, retain_graph=True)
    return found


def compare(found: Tensor, wanted: Tensor, table: Tensor) -> None:
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-9, abs=1e-12)
    mine, theirs = gradient(found, table), gradient(wanted, table)
    assert float((mine - theirs).norm()) <= 1e-9 * float(theirs.norm()) + 1e-12


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("name", PRESETS)
@settings(MANY, max_examples=25)
@given(sizes, seeds)
def test_each_preset(name: str, sizes: list[int], seed: int) -> None:
    algorithm = AlgorithmSection(name=name)
    table, groups = random_groups(np.random.default_rng(seed), sizes)
    compare(library_loss(groups, algorithm, 0), naive.loss(groups, algorithm, range(len(groups))), table)


@MANY
@given(algorithms(), sizes, seeds)
def test_any_combination_of_keys(algorithm: AlgorithmSection, sizes: list[int], seed: int) -> None:
    table, groups = random_groups(np.random.default_rng(seed), sizes)
    for hand, chosen in enumerate(naive.optimizer_steps(len(groups), algorithm)[: algorithm.mini_batches]):
        compare(library_loss(groups, algorithm, hand), naive.loss(groups, algorithm, chosen), table)


BATCH_WIDE = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "starpo_s", "policy_gradient")


@pytest.mark.parametrize("name", PRESETS)
@settings(MANY, max_examples=25)
@given(st.integers(2, 4), seeds)
def test_each_preset_is_what_its_paper_prints(name: str, size: int, seed: int) -> None:
    """Without the correction for the sampler, which none of them has; groups of one size, no rollout without tokens."""
    algorithm = AlgorithmSection(name=name, importance="none")
    table, groups = random_groups(np.random.default_rng(seed), [size] * (3 if name in BATCH_WIDE else 1), least_turns=1)
    compare(library_loss(groups, algorithm, 0), -naive.PAPERS[name](groups), table)


def test_every_preset_has_a_paper() -> None:
    assert naive.PAPERS.keys() == PRESETS.keys()


LORA = LoraSection(rank=4, alpha=8.0)


@dataclasses.dataclass(frozen=True)
class How:
    """How the forest is computed: in micro-batches of so many tokens, by which back end."""

    budget: int
    forest: Literal["packed", "walk"] = "packed"


class ExactLearner(EmbeddedLearner):
    """In float64 and by plain gradient descent. ``gradients`` keeps that of each optimizer step, all in one vector."""

    def __init__(self, algorithm: AlgorithmSection, rate: float, how: How) -> None:
        module = models.exact_model()
        if how.forest == "packed":
            use_forest_attention(module)
        backend = (Packed if how.forest == "packed" else Walk)(module, torch.float64)
        lora = LORA if algorithm.kl_coefficient else None
        body = Body(module, attach(module, lora) if lora else None, backend, torch.float64, threads=1)
        section = LearnerSection(micro_batch_tokens=how.budget, learning_rate=rate, grad_clip=1e12, lora=lora)
        super().__init__(body, section, algorithm)
        descent: Any = torch.optim.SGD(self._trained, lr=rate)
        self._optimizer = descent
        self.gradients: list[Tensor] = []
        descent.register_step_pre_hook(lambda *_: self.gradients.append(separately.gradient(self.module)))


def descend(
    module: Any, batch: TrainBatch, algorithm: AlgorithmSection, rate: float, reference: dict[str, Tensor] | None
) -> tuple[list[Tensor], list[float]]:
    """The gradient of each optimizer step, and each step's loss, naively. A step whose gradient is zero is none."""
    with torch.no_grad():
        proximal = {call.call_id: separately.token_logprobs(module, call) for call in calls_of(batch)}
    gradients, losses = [], []
    for chosen in naive.optimizer_steps(len(batch.groups), algorithm):
        module.zero_grad()
        loss = naive.loss(separately.attempts(module, batch, proximal, reference), algorithm, chosen)
        losses.append(float(loss.detach()))
        if loss.requires_grad:
            torch.autograd.backward(loss)
        gradient = separately.gradient(module)
        if float(gradient.norm()) == 0:
            continue
        gradients.append(gradient)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    return gradients, losses


def calls_of(batch: TrainBatch) -> list[Call]:
    return [call for rollout in batch.rollouts for call in rollout.calls]


def random_batch(module: Any, random: np.random.Generator, sizes: list[int], process: bool) -> TrainBatch:
    """Rollouts of calls that extend one another, now and then start anew, and are not all delivered.

    The second group has no contrast. What the sampler says lies beside what the module says.
    """
    groups = []
    for number, size in enumerate(sizes):
        prompt = random.integers(0, 30, 6).tolist()
        rollouts = []
        for index in range(size):
            reward = 1.0 if number == 1 else (0.0, 1.0, 0.25)[index % 3]
            rollouts.append(_random_rollout(module, random, prompt, f"{number}.{index}", reward, process))
        groups.append(TrainGroup(str(number), tuple(rollouts)))
    return TrainBatch(tuple(groups))


def _random_rollout(
    module: Any, random: np.random.Generator, prompt: list[int], name: str, reward: float, process: bool
) -> TrainRollout:
    calls: list[Call] = []
    ids = prompt
    for index in range(random.choice([0, 1, 2, 3], p=[0.1, 0.2, 0.4, 0.3])):
        completion = random.integers(0, 30, random.integers(1, 5)).tolist()
        delivered, temperature = bool(random.integers(6)), float(random.choice([1.0, 1.0, 0.5]))
        made = make_call(
            ids, completion, call_id=f"{name}.{index}", rollout_id=name, delivered=delivered, temperature=temperature
        )
        with torch.no_grad():
            logprobs = separately.token_logprobs(module, made) + torch.tensor(random.normal(size=len(completion))) * 0.4
        calls.append(dataclasses.replace(made, logprobs=logprobs.float().numpy()))
        ids = [*(ids if random.integers(4) else prompt), *completion, *random.integers(0, 30, 2).tolist()]
    given = [JUDGED[int(random.integers(4))] for call in calls if call.delivered] if process else []
    return TrainRollout(name, reward, tuple(calls), bool(random.integers(5) == 0), tuple(given))


def check_update(
    algorithm: AlgorithmSection,
    seed: int,
    rate: float,
    how: How,
    change: Callable[[TrainBatch], TrainBatch] = lambda batch: batch,
) -> UpdateReport:
    """A whole update against the naive one, step by step; what it reported."""
    learner = ExactLearner(algorithm, rate, how)
    torch.manual_seed(seed)
    for name, parameter in learner.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    plain = models.exact_model()
    base = attach(plain, LORA) if algorithm.kl_coefficient else None
    plain.load_state_dict(learner.module.state_dict())
    random = np.random.default_rng(seed)
    batch = change(random_batch(plain, random, [3, 2, 4, 3, 3], process=algorithm.process.coefficient != 0))
    reference = None
    if base is not None:
        with torch.no_grad(), without(base):
            reference = {call.call_id: separately.token_logprobs(plain, call) for call in calls_of(batch)}
    wanted, losses = descend(plain, batch, algorithm, rate, reference)
    report = learner.update(batch)
    assert len(learner.gradients) == len(wanted), report.why_not
    for mine, theirs in zip(learner.gradients, wanted, strict=True):
        assert float((mine - theirs).norm()) <= 1e-9 * float(theirs.norm())
    if len(wanted) == algorithm.updates:
        assert report.loss == pytest.approx(np.mean(losses), rel=1e-9, abs=1e-12)
    return report


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("seed", "how"), [(0, How(40)), (1, How(8192)), (2, How(60, "walk"))])
def test_whole_updates(name: str, seed: int, how: How) -> None:
    """Several mini-batches and epochs where there is a ratio."""
    keys: dict[str, Any] = {"name": name, "constant_length": 8}
    if AlgorithmSection(name=name).surrogate != "policy_gradient":
        keys |= {"epochs": 2, "mini_batches": 2}
    report = check_update(AlgorithmSection(**keys), seed, rate=6e-6 if name == "gspo" else 0.02, how=how)
    if "epochs" in keys:
        assert report.optimizer_steps > 2 and 0 < report.clip_fraction < 0.9


@pytest.mark.parametrize(
    "keys",
    [
        {"ratio_level": "call", "old_policy": "behaviour", "importance": "none"},
        {"ratio_level": "rollout", "old_policy": "behaviour", "importance": "none", "epochs": 1, "mini_batches": 1},
        {"importance": "band", "importance_level": "call", "importance_mean": "product", "importance_low": 0.8},
        {"importance": "mask", "importance_level": "rollout", "importance_high": 1.05, "epochs": 1, "mini_batches": 1},
        {"importance": "truncate", "importance_high": 1.05, "name": "cispo", "ratio_level": "rollout"},
        {"discount": 0.8, "process": {"coefficient": 0.7, "discount": 0.9}, "dual_clip": 1.1},
        {"name": "dr_grpo", "process": {"coefficient": 1.0}, "overlong_limit": 6, "overlong_buffer": 3},
        {"name": "dapo", "cut_off": "mask", "mini_batches": 3},
        {"kl_coefficient": 0.5, "kl_estimator": "k1"},
        {"kl_coefficient": 0.5, "kl_estimator": "k2", "entropy_coefficient": 0.1, "advantage": "leave_one_out"},
        {"kl_coefficient": 0.5, "kl_estimator": "k3", "ratio_level": "call", "normalization": "token_mean"},
        {"name": "rloo", "entropy_coefficient": 0.1, "epochs": 1, "mini_batches": 1, "importance_level": "rollout"},
    ],
)
def test_whole_updates_with_other_keys(keys: dict[str, Any]) -> None:
    algorithm = AlgorithmSection(**{"epochs": 2, "mini_batches": 2, "constant_length": 8, **keys})
    report = check_update(algorithm, 2, rate=0.02, how=How(60))
    assert report.optimizer_steps == algorithm.updates


def test_a_step_without_gradient_is_no_end() -> None:
    """All of the first mini-batch is rejected; the second is learned from all the same."""
    algorithm = AlgorithmSection(importance="mask", mini_batches=2)

    def rejected(batch: TrainBatch) -> TrainBatch:
        return TrainBatch((implausible(batch.groups[0]), batch.groups[2]))

    def implausible(group: TrainGroup) -> TrainGroup:
        rollouts = []
        for rollout in group.rollouts:
            calls = tuple(dataclasses.replace(call, logprobs=call.logprobs - 3) for call in rollout.calls)
            rollouts.append(dataclasses.replace(rollout, calls=calls))
        return dataclasses.replace(group, rollouts=tuple(rollouts))

    report = check_update(algorithm, 0, rate=0.02, how=How(8192), change=rejected)
    assert report.learned and report.optimizer_steps == 1


def test_rollouts_without_process_rewards_leave_the_others_theirs() -> None:
    algorithm = AlgorithmSection(process=ProcessSection(coefficient=1.0))
    calls = [make_call([1, 2], [3, 4], call_id=str(index), delivered=index != 1) for index in range(5)]
    rewarded = TrainRollout("b", 0.0, tuple(calls[3:]), process=(0.0, 1.0))

    def advantages(*process: float | None) -> list[float]:
        silent = TrainRollout("a", 0.0, tuple(calls[:3]), process=process)
        work = Work(TrainBatch((TrainGroup("g", (silent, rewarded)),)), algorithm, 8192, None, None)
        return work.credit.advantage.tolist()

    apart = 0.5**0.5
    assert advantages() == advantages(None, None) == pytest.approx([0, 0, 0, 0, 0, 0, apart, apart])
    with pytest.raises(LearnerError, match="rollout a has 2 trainable calls, but 3 process rewards; give one, or None"):
        advantages(None, None, None)


ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "algorithms.md"


def documented() -> dict[str, tuple[str, str]]:
    """Of each preset that ``docs/algorithms.md`` lists, its paper and its keys."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (paper, keys) for name, paper, keys in rows}


def test_the_page_lists_the_presets_as_they_are() -> None:
    listed = documented()
    assert listed.keys() == PRESETS.keys()
    for name, (_, keys) in listed.items():
        found = {key: yaml.safe_load(value) for key, value in re.findall(r"`(\w+): ([^`]+)`", keys)}
        assert found == dict(PRESETS[name]), name


def test_the_page_and_the_presets_name_the_same_papers() -> None:
    """The comment above a preset names its paper; where it says the same paper's, the one above that does."""
    source = (ROOT / "src" / "longrein" / "presets.py").read_text()
    known = ""
    for comment, name in re.findall(r"((?:^    #.*\n)+)    \"(\w+)\": \{", source, re.MULTILINE):
        numbers = re.findall(r"arXiv:[\d.]+\d|Williams 1992", comment)
        known = numbers[0] if numbers else known
        assert known in documented()[name][0], name


GOOD = """
model: {path: ./model}
tasks: {train: ./tasks}
harness: {command: [python3, agent.py]}
output: {dir: ./run}
"""


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (
            "{name: rloo, epochs: 2}",
            ["'policy_gradient' has no ratio", "set epochs and mini_batches to 1, or surrogate to clip or cispo"],
        ),
        ("{surrogate: policy_gradient, mini_batches: 2}", ["'policy_gradient' has no ratio", "mini_batches to 1"]),
        ("{surrogate: policy_gradient, ratio_level: call}", ["no ratio", "leave out ratio_level and old_policy"]),
        (
            "{name: policy_gradient, old_policy: behaviour, importance: none}",
            ["no ratio", "leave out ratio_level and old_policy"],
        ),
        ("{name: cispo, dual_clip: 3}", ["dual_clip belongs to surrogate 'clip', not to 'cispo'"]),
        ("{name: rloo, dual_clip: 3}", ["dual_clip belongs to surrogate 'clip', not to 'policy_gradient'"]),
        ("{old_policy: behaviour}", ["importance 'truncate' would correct for it twice", "set importance to none"]),
        (
            "{importance: band, importance_low: 2, importance_high: 2}",
            ["importance_low 2 must be below importance_high 2"],
        ),
        ("{name: dapo, keep_share: 0.5}", ["keep_share belongs to keep_groups 'variance', not to 'contrast'"]),
        ("{name: starpo_s, keep_groups: all}", ["keep_share belongs to keep_groups 'variance', not to 'all'"]),
        ("{overlong_buffer: 4}", ["overlong_buffer needs overlong_limit"]),
        ("{overlong_limit: 4, overlong_buffer: 5}", ["overlong_buffer 5 must not exceed overlong_limit 4"]),
        ("{name: gpro}", ["no algorithm is called 'gpro'", ", ".join(PRESETS)]),
        ("{process: {source: hook}}", ["source 'hook'", "package.module:function", "algorithm.process"]),
        ("{process: {hook: 'a:b'}}", ["source 'hook'", "package.module:function", "algorithm.process"]),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, algorithm: str, says: list[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(GOOD + f"algorithm: {algorithm}\n")
    with pytest.raises(ConfigError) as refused:
        load(file)
    for part in [str(file), "'algorithm", *says]:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    "algorithm",
    [
        "{surrogate: policy_gradient}",
        "{dual_clip: 3, epochs: 2, mini_batches: 2}",
        "{name: gspo, old_policy: behaviour, importance: none}",
        "{importance: mask, importance_low: 2, importance_high: 2}",
        "{name: starpo_s, keep_share: 0.5}",
        "{overlong_limit: 4, overlong_buffer: 4}",
    ],
)
def test_what_is_close_to_a_refusal_is_not_refused(tmp_path: Path, algorithm: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(GOOD + f"algorithm: {algorithm}\n")
    load(file)


def test_no_step_without_a_group_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(GOOD + "training: {groups: 2}\nalgorithm: {mini_batches: 3}\n")
    with pytest.raises(ConfigError, match=r"algorithm\.mini_batches is 3, but a step has only 2 groups"):
        load(file)
