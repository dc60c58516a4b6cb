"""Every algorithm against the naive one: any choice of keys the configuration accepts, loss and gradient."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longrein.config import AlgorithmSection
from longrein.config_file import load
from longrein.errors import ConfigError
from longrein.forest.targets import Targets
from longrein.learning.credit import assign, share
from longrein.learning.importance import importance_weights, over
from longrein.learning.losses import token_losses
from longrein.learning.shaping import shaped
from longrein.presets import PRESETS
from tests.learning import naive
from tests.learning.naive import Attempt, Token, Turn

EXAMPLES = int(os.environ.get("LONGREIN_EXAMPLES", "150"))
MANY = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ROWS, VOCABULARY = 5, 4
JUDGED = (None, 0.0, 0.5, 1.0)
AGENTS = ("main", "main", "helper")
KEYS: dict[str, list[Any]] = {
    "advantage": ["group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std", "reward"],
    "baseline": ["rollout", "agent"],
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
    "old_policy": ["proximal", "proximal", "behaviour"],
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
    """Every key drawn, as far as they fit together."""
    keys = {name: draw(st.sampled_from(choices)) for name, choices in KEYS.items()}
    if keys["surrogate"] == "policy_gradient":
        keys |= {"ratio_level": "token", "old_policy": "proximal", "mini_batches": 1}
    if keys["surrogate"] != "clip":
        keys["dual_clip"] = None
    if keys["old_policy"] == "behaviour":
        keys["importance"] = "none"
    if keys["overlong_limit"] is None:
        keys["overlong_buffer"] = 0
    return AlgorithmSection(**keys)


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
            Turn(
                [token() for _ in range(random.integers(1, 4))],
                JUDGED[int(random.integers(4))],
                AGENTS[int(random.integers(3))],
            )
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
        agent=np.array([AGENTS.index(turn.agent) for _, turn, _ in rows], np.int32),
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
        masked=np.array([algorithm.cut_off == "mask" and attempt.cut_off for attempt in attempts], bool)[
            targets.rollout
        ],
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
@settings(MANY, max_examples=EXAMPLES // 6)
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
@settings(MANY, max_examples=EXAMPLES // 6)
@given(st.integers(2, 4), seeds)
def test_each_preset_is_what_its_paper_prints(name: str, size: int, seed: int) -> None:
    """Without the correction for the sampler, which none of them has; groups of one size, no rollout without tokens."""
    algorithm = AlgorithmSection(name=name, importance="none")
    table, groups = random_groups(np.random.default_rng(seed), [size] * (3 if name in BATCH_WIDE else 1), least_turns=1)
    compare(library_loss(groups, algorithm, 0), -naive.PAPERS[name](groups), table)


def test_every_preset_has_a_paper() -> None:
    assert naive.PAPERS.keys() == PRESETS.keys()


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


def test_every_preset_that_a_peer_has_was_compared() -> None:
    compared = set(re.findall(r"^\| `(\w+)` \| (?:verl|TRL), ", PAGE.read_text(), re.MULTILINE))
    assert compared == PRESETS.keys() - {"starpo_s"}


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
        (
            "{name: dapo, keep_share: 0.5}",
            ["keep_share is 0.5", "belongs to keep_groups 'variance', not to 'contrast'"],
        ),
        ("{name: starpo_s, keep_groups: all}", ["by preset 'starpo_s'", "not to 'all'"]),
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
