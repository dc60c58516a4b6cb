"""Several ranks make the update that one process makes, and none is left when something goes wrong."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longrein.config import AlgorithmSection, CapoSection, LearnerSection, LoraSection
from longrein.errors import LearnerError
from longrein.forest.forest import grow
from longrein.forest.packing import MicroBatch
from longrein.learning import fsdp, ranks
from longrein.learning.batch import TrainBatch
from longrein.learning.figures import UpdateReport
from longrein.learning.fsdp import FsdpLearner, check
from longrein.learning.learner import EmbeddedLearner
from tests.learning import exact_rank, models
from tests.learning.test_invariance import WAYS, cut, rollouts
from tests.learning.test_learner import make_batch

LORA = LoraSection(rank=4, alpha=8.0)
ROOT = Path(__file__).parents[2]
EXACT = "tests.learning.exact_rank:main"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks import the tests' model."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def section(**config: Any) -> LearnerSection:
    return LearnerSection(
        **{
            "precision": "float32",
            "forest": "packed",
            "threads": 1,
            "learning_rate": 1e-3,
            "grad_clip": 1e6,
            "micro_batch_tokens": 40,
            **config,
        }
    )


def one_process(algorithm: AlgorithmSection, **config: Any) -> EmbeddedLearner:
    return exact_rank.open_exact(models.directory(), section(**config), algorithm, None)


@contextmanager
def several(count: int, algorithm: AlgorithmSection | None = None, **config: Any) -> Iterator[FsdpLearner]:
    learner = FsdpLearner(
        models.directory(),
        section(kind="fsdp", ranks=count, **config),
        algorithm or AlgorithmSection(),
        program=config.pop("program", EXACT),
    )
    try:
        yield learner
    finally:
        learner.close()


def batches(count: int = 2, **given: Any) -> list[TrainBatch]:
    module = models.exact_model()
    return [make_batch(module, seed, **given) for seed in range(count)]


def gradients(directory: Path) -> dict[int, Tensor]:
    """What the first update's gradient was, of each parameter: AdamW's first moment is 0.1 of it."""
    state = torch.load(directory / "optimizer.pt", weights_only=True)["optimizer"]["state"]
    return {index: each["exp_avg"] for index, each in state.items()}


def close(one: dict[Any, Tensor], other: dict[Any, Tensor], rtol: float = 1e-9) -> None:
    assert one.keys() == other.keys()
    for name in one:
        size = float(one[name].norm())
        assert float((one[name] - other[name]).norm()) <= rtol * max(size, 1e-6), name


def alike(one: UpdateReport, other: UpdateReport) -> None:
    for name in ("loss", "grad_norm", "entropy", "logprob_difference_mean", "kl", "effective_sample_size"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-9, abs=1e-12), name
    for name in ("learned", "why_not", "optimizer_steps", "micro_batches", "tokens_computed", "clip_fraction"):
        assert getattr(other, name) == getattr(one, name), name


@pytest.mark.filterwarnings("ignore:.*activation_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(
    ("count", "algorithm", "config"),
    [
        (1, {}, {"micro_batch_tokens": 16}),
        (2, {}, {"micro_batch_tokens": 16}),  # three micro-batches
        (3, {}, {"micro_batch_tokens": 40}),  # two: a rank is idle
        (3, {}, {"micro_batch_tokens": 8192, "grad_clip": 1e-3}),  # one
        (2, {"epochs": 2, "importance_level": "rollout"}, {"activation_checkpointing": True}),
        (2, {"kl_coefficient": 0.5}, {"lora": LORA}),
    ],
    ids=["alone", "three parts", "two parts", "one part", "epochs", "lora"],
)
def test_ranks_make_the_update_of_one_process(
    tmp_path: Path, count: int, algorithm: dict[str, Any], config: dict[str, Any]
) -> None:
    chosen = AlgorithmSection(**algorithm)
    single = one_process(chosen, **config)
    told: list[tuple[int, int]] = []
    with several(count, chosen, **config) as learner:
        assert f"on {count} rank" in learner.describe()
        for number, batch in enumerate(batches()):
            directories = [tmp_path / f"{name}-{number}" for name in ("one", "several")]
            for each in directories:
                each.mkdir()
            told.clear()
            alike(single.update(batch), learner.update(batch, lambda done, total: told.append((done, total))))
            single.save(directories[0])
            learner.save(directories[1])
            close(gradients(directories[0]), gradients(directories[1]))
            close(dict(single.weights()), dict(learner.weights()))
            assert told == [(done, len(told)) for done in range(1, len(told) + 1)] and told
            names = [{str(path.relative_to(each)) for path in each.rglob("*")} for each in directories]
            assert names[0] == names[1]
        # Each goes on from what the other wrote.
        single.load(directories[1])
        learner.load(directories[0])
        alike(single.update(batch), learner.update(batch))
        close(dict(single.weights()), dict(learner.weights()))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_gradient_does_not_depend_on_how_rollouts_are_cut_and_dealt(tmp_path: Path, count: int) -> None:
    groups, random = rollouts(2), np.random.default_rng(count)
    algorithm = AlgorithmSection(importance="truncate", entropy_coefficient=0.01)
    single = one_process(algorithm)
    start, wanted, found = (tmp_path / name for name in ("start", "wanted", "found"))
    for each in (start, wanted, found):
        each.mkdir()
    single.save(start)
    report = single.update(TrainBatch(tuple(groups)))
    single.save(wanted)
    with several(count, algorithm, micro_batch_tokens=48) as learner:
        for _ in range(WAYS):
            learner.load(start)
            loss = learner.update(cut(groups, random)).loss
            learner.save(found)
            assert loss == pytest.approx(report.loss, rel=1e-9)
            close(gradients(wanted), gradients(found))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_users_start_makes_the_update_of_the_embedded_learner(precision: str) -> None:
    single = EmbeddedLearner.open(models.directory(), section(precision=precision), AlgorithmSection())
    config = section(kind="fsdp", ranks=2, precision=precision)
    learner = FsdpLearner(models.directory(), config, AlgorithmSection())
    try:
        assert precision in learner.describe()
        for batch in batches():
            one, other = single.update(batch), learner.update(batch)
            assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4 if precision == "float32" else 1e-2)
            assert other.loss == pytest.approx(one.loss, abs=1e-6 if precision == "float32" else 1e-3)
        weights = learner.weights()
        assert all(tensor.dtype == torch.float32 for tensor in weights.values())
        assert weights.keys() == single.weights().keys()
    finally:
        learner.close()


def test_what_is_refused_leaves_the_ranks_as_they_were(tmp_path: Path) -> None:
    algorithm = AlgorithmSection(epochs=2)
    single = one_process(algorithm)
    batch, other = batches()
    rollouts = (replace(batch.groups[0].rollouts[0], process=(1.0,)), *batch.groups[0].rollouts[1:])
    wrong = TrainBatch((replace(batch.groups[0], rollouts=rollouts),))
    with several(2, algorithm) as learner:
        with pytest.raises(LearnerError, match=r"^rollout 0\.0\.0 has 2 trainable calls, but 1 process rewards"):
            learner.update(wrong)
        with pytest.raises(LearnerError, match="cannot be read"):
            learner.load(tmp_path)
        with pytest.raises(OSError, match="absent"):
            learner.save(tmp_path / "absent")
        before = {name: tensor.clone() for name, tensor in learner.weights().items()}
        with pytest.raises(LearnerError, match="cancelled after 0 of 4 micro-batches"):
            learner.update(batch, None, lambda: True)
        assert all(torch.equal(before[name], tensor) for name, tensor in learner.weights().items())
        nothing = learner.update(TrainBatch(()))
        assert not nothing.learned and "no group reached its quorum" in nothing.why_not
        alike(single.update(other), learner.update(other))
        close(dict(single.weights()), dict(learner.weights()))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_ends_the_update(monkeypatch: pytest.MonkeyPatch, sign: signal.Signals) -> None:
    monkeypatch.setattr(fsdp, "GRACE_S", 1.0)
    with several(2, AlgorithmSection(epochs=500)) as learner:
        processes = learner.processes
        monkeypatch.setattr(fsdp, "SILENCE_S", 4.0)
        lost: list[float] = []

        def lose(done: int, total: int) -> None:
            if not lost:
                os.kill(processes[1], sign)
                lost.append(time.monotonic())

        says = "rank 1 of 2 ended .killed by SIGKILL." if sign == signal.SIGKILL else "rank . of 2 said nothing for 4 s"
        with pytest.raises(LearnerError, match=says):
            learner.update(batches(1)[0], lose)
        assert time.monotonic() - lost[0] < 20
        assert not any(alive(process) for process in processes)
        with pytest.raises(LearnerError, match=r"cannot go on: .*while updating"):
            learner.weights()


def test_a_rank_that_cannot_start_says_why() -> None:
    with pytest.raises(LearnerError, match=r"rank . of 2 ended \(exit status 1\); it said last: ModuleNotFoundError"):
        FsdpLearner(models.directory(), section(kind="fsdp", ranks=2), AlgorithmSection(), program="no_such:main")


PARENT = """
import time
from longrein.learning.fsdp import FsdpLearner
from tests.learning.test_ranks import AlgorithmSection, EXACT, batches, models, section

learner = FsdpLearner(models.directory(), section(kind="fsdp", ranks=2), AlgorithmSection(epochs=10000), program=EXACT)
print(*learner.processes, flush=True)
learner.update(batches(1)[0], lambda done, total: print("going", flush=True) if done == 2 else None)
"""


def test_a_parent_that_is_killed_leaves_no_rank() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        ids = [int(each) for each in parent.stdout.readline().split()]
        assert len(ids) == 2 and all(alive(each) for each in ids)
        # In the middle of an update.
        assert parent.stdout.readline() == "going\n"
        parent.kill()
    deadline = time.monotonic() + 20
    while any(alive(each) for each in ids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(process: int) -> bool:
    """Whether it runs; one that has ended and waits to be asked about does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def parts_of(lengths: Sequence[int]) -> list[MicroBatch]:
    none = np.zeros(0, np.int64)
    return [MicroBatch(grow([np.arange(length, dtype=np.int32)])[0], none, none) for length in lengths]


@pytest.mark.parametrize("lengths", [[3], [5, 9, 2, 9, 7], [4, 4, 4, 4], []])
def test_every_part_has_one_rank_and_all_ranks_have_as_many_passes(lengths: list[int]) -> None:
    parts = parts_of(lengths)
    slots = [ranks.dealt(parts, number, 3) for number in range(3)]
    assert {len(each) for each in slots} == {-(-len(lengths) // 3)}
    assert [each.together for each in slots[0]] == [each.together for each in slots[2]]
    assert sum(each.together for each in slots[0]) == len(lengths)
    given = [slot.part for each in slots for slot in each]
    assert all(sum(part is each for each in given) == 1 for part in parts)
    assert all(len(part.forest) == 1 and not len(part.targets) for part in given if not any(part is p for p in parts))
    longest = [max(len(each[k].part.forest) for each in slots) for k in range(len(slots[0]))]
    assert longest == sorted(lengths, reverse=True)[::3]


@pytest.mark.parametrize(
    ("config", "algorithm", "policies", "says"),
    [
        ({"ranks": 2}, {}, ("policy",), "learner.ranks is 2, which needs learner.kind: fsdp"),
        ({"kind": "fsdp"}, {}, ("policy", "critic"), "trains one policy, not several .policy, critic."),
        ({"kind": "fsdp"}, {"capo": CapoSection(form="neurons")}, ("policy",), "does not compute algorithm.capo"),
        ({"kind": "fsdp", "forest": "walk"}, {}, ("policy",), "learner.forest: packed"),
    ],
)
def test_what_ranks_do_not_compute_is_refused(
    config: dict[str, Any], algorithm: dict[str, Any], policies: tuple[str, ...], says: str
) -> None:
    with pytest.raises(LearnerError, match=says):
        check(LearnerSection(**config), AlgorithmSection(**algorithm), policies)
