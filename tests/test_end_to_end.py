"""A whole run, for real: gateway, harness process, sandbox, verifier, forest, loss, update, publish, report."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longrein.config_file import load
from longrein.ledger import Ledger
from longrein.plan import training_group
from longrein.records import Call, Rollout, Split
from longrein.run import _socket, load_tasks
from tests.workshop import HARNESS, make_workshop, read_metrics


def longrein(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "longrein.cli", *map(str, arguments)], capture_output=True, text=True, timeout=240
    )


async def recorded(root: Path, split: Split, steps: int) -> dict[str, list[tuple[Rollout, list[Call]]]]:
    """Group id → its rollouts with their calls."""
    ledger = await Ledger.open(root / "run" / "ledger.db")
    found = {}
    for step in range(steps + 1):
        for group in await ledger.groups(split, step):
            rollouts = await ledger.rollouts(group.group_id)
            found[group.group_id] = [(rollout, await ledger.calls(rollout.rollout_id)) for rollout in rollouts]
    await ledger.close()
    return found


async def test_a_run_trains_and_reports(tmp_path: Path) -> None:
    config = make_workshop(tmp_path)
    ended = longrein("train", "--config", config)
    assert ended.returncode == 0, ended.stderr
    assert "| T=1 |" in ended.stdout and "| greedy |" in ended.stdout

    metrics = read_metrics(tmp_path)
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert all(line["learned"] and line["rollouts"] == 8 and line["calls"] == 16 for line in metrics)
    found = await recorded(tmp_path, Split.TRAIN, 3)
    assert len(found) == 6
    for group, members in found.items():
        step = int(group[1:]) // 2
        for rollout, calls in members:
            assert rollout.valid and rollout.receipt is not None
            assert [call.cause.value for call in calls] == ["new session", "extended"]
            first, second = calls
            spoken = np.concatenate([first.prompt_ids, first.completion_ids])
            np.testing.assert_array_equal(second.prompt_ids[: len(spoken)], spoken)
            assert {int(version) for call in calls for version in call.versions} == {step}
    trained = [line["tokens_trained"] for line in metrics]
    for step in range(3):
        groups = [members for group, members in found.items() if int(group[1:]) // 2 == step]
        assert trained[step] == sum(len(c.completion_ids) for members in groups for _, calls in members for c in calls)
    # The sampler and the learner agree on the tokens' probabilities: what is published is what is trained.
    assert all(float(str(line["logprob_difference_max"])) < 1e-3 for line in metrics)

    start = load_file(tmp_path / "model" / "model.safetensors")
    final = load_file(next((tmp_path / "run" / "checkpoints").glob("step-000003/**/model.safetensors")))
    assert any(not torch.equal(start[name].float(), final[name].float()) for name in start)
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out tasks" in (tmp_path / "run" / "report.md").read_text()

    proved = longrein("audit", "--config", config)
    assert proved.returncode == 0, proved.stdout
    assert '"detail": "6 groups are of the tasks that the plan names, in its order"' in proved.stdout
    assert '"detail": "72 calls are whole, and go on from exactly what they say"' in proved.stdout

    again = longrein("train", "--config", config)
    assert again.returncode == 0, again.stderr
    assert read_metrics(tmp_path) == metrics
    assert (await recorded(tmp_path, Split.TRAIN, 3)).keys() == found.keys()


async def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=3, groups=2, rollouts=4)
    command = [sys.executable, "-m", "longrein.cli", "train", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as first:
        deadline = time.monotonic() + 120
        # In the middle of the second step: after the first was committed, with rollouts of the next under way.
        while not read_metrics(tmp_path):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.4)
        os.kill(first.pid, signal.SIGKILL)
    before = await recorded(tmp_path, Split.TRAIN, 3)
    delivered = {
        call.call_id
        for members in before.values()
        for rollout, calls in members
        for call in calls
        if rollout.valid and call.delivered
    }

    ended = longrein("train", "--config", config)
    assert ended.returncode == 0, ended.stderr
    assert "going on after step 1" in ended.stderr
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
    after = await recorded(tmp_path, Split.TRAIN, 3)
    kept = {call.call_id for members in after.values() for rollout, calls in members for call in calls if rollout.valid}
    assert delivered <= kept
    for members in after.values():
        valid = Counter(rollout.index for rollout, _ in members if rollout.valid)
        assert valid == dict.fromkeys(range(4), 1)
    resolved = load(config)
    tasks, _ = load_tasks(resolved)
    for step in range(3):
        for number in range(2 * step, 2 * step + 2):
            want = training_group(tasks, number, rollouts=4, temperature=1.0, seed=0)
            assert {rollout.task_id for rollout, _ in after[want.group.group_id]} == {want.task.task_id}


async def test_an_async_run_trains_each_group_once_and_nothing_too_old(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=5)
    given = [
        argument
        for key in ("mode=async", "max_staleness=2", "keep_checkpoints=9")
        for argument in ("--set", f"training.{key}")
    ]
    ended = longrein("train", "--config", config, *given)
    assert ended.returncode == 0, ended.stderr
    metrics = read_metrics(tmp_path)
    ages = {int(age) for line in metrics for age in line["by_age"]}  # type: ignore[attr-defined]
    assert ages <= {0, 1, 2} and max(ages) > 0, "rollouts rode across updates, and none too long"
    found = await recorded(tmp_path, Split.TRAIN, 5)
    assert sorted(found) == [f"g{number:06d}" for number in range(10)]
    tokens = Counter[str]()
    for group, members in found.items():
        valid = [calls for rollout, calls in members if rollout.valid]
        assert len(valid) == 4
        tokens[group] = sum(len(call.completion_ids) for calls in valid for call in calls)
        for call in (call for calls in valid for call in calls):
            assert call.versions.tolist() == sorted(call.versions.tolist()), "a call may see several versions, in order"
    trained = sum(int(str(line["tokens_trained"])) + int(str(line["tokens_stale"])) for line in metrics)
    assert trained == sum(tokens.values())
    assert (proved := longrein("audit", "--config", config, *given)).returncode == 0, proved.stdout
    calls = [call for members in found.values() for _, calls in members for call in calls]
    # What a version said of its tokens is what its checkpoint says of them.
    for version in range(5):
        module = model_after(tmp_path, version)
        for call in [call for call in calls if version in call.versions][:6]:
            mine = call.versions == version
            assert np.abs(logprobs(module, call) - call.logprobs)[mine].max() < 1e-4, (version, call.call_id)
            if version:
                older = logprobs(model_after(tmp_path, version - 1), call)
                assert np.abs(older - call.logprobs)[mine].max() > 1e-3, "another version would have been told apart"


def model_after(root: Path, step: int) -> Any:
    """The policy after so many steps, from its checkpoint."""
    module = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    if step:
        (file,) = (root / "run" / "checkpoints" / f"step-{step:06d}").glob("**/model.safetensors")
        missing, unknown = module.load_state_dict(load_file(file), strict=False)
        assert not unknown and set(missing) <= {"lm_head.weight"}
    return module.eval()


def logprobs(module: Any, call: Call) -> Any:
    """Of a call's sampled tokens, at temperature 1."""
    ids = torch.tensor(np.concatenate([call.prompt_ids, call.completion_ids])[None].astype(np.int64))
    with torch.inference_mode():
        found = module(ids).logits[0, len(call.prompt_ids) - 1 : -1].double().log_softmax(-1)
    return found.gather(1, ids[0, len(call.prompt_ids) :, None])[:, 0].numpy()


async def test_a_killed_async_run_goes_on_where_it_was(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=4)
    given = ["--config", str(config), "--set", "training.mode=async", "--set", "training.save_every=2"]
    command = [sys.executable, "-m", "longrein.cli", "train", *given]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as first:
        deadline = time.monotonic() + 120
        # After the third step, whose weights no checkpoint holds.
        while len(read_metrics(tmp_path)) < 3:
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGKILL)
    before = await taken(tmp_path)
    assert longrein("train", *given).returncode == 0
    assert (proved := longrein("audit", *given)).returncode == 0, proved.stdout
    after = await taken(tmp_path)
    assert set(before) >= {0, 1, 2} and all(after[step] == groups for step, groups in before.items())
    assert [len(after[step]) for step in range(4)] == [2, 2, 2, 2]
    assert sorted(group for groups in after.values() for group in groups) == [f"g{number:06d}" for number in range(8)]


async def taken(root: Path) -> dict[int, list[str]]:
    """Step → the groups it took."""
    ledger = await Ledger.open(root / "run" / "ledger.db")
    steps = {step: [group.group_id for group in await ledger.groups(Split.TRAIN, step)] for step in range(10)}
    await ledger.close()
    return {step: groups for step, groups in steps.items() if groups}


def test_ledger_and_checkpoints_stay_together(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=3, groups=1, rollouts=2)
    sparse: list[str | Path] = ["train", "--config", config, "--set", "training.save_every=2"]
    assert longrein(*sparse).returncode == 0
    # As if killed after the third step was committed and before its checkpoint was whole: the step is made again.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    ended = longrein(*sparse)
    assert ended.returncode == 0 and "going on after step 2 of 3" in ended.stderr, ended.stderr
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
    # Fewer steps than were made: the report is of those that were.
    ended = longrein("train", "--config", config, "--set", "training.steps=1")
    assert ended.returncode == 0 and "nan" not in ended.stdout, ended.stderr
    assert "3 steps" in (tmp_path / "run" / "report.md").read_text()
    # Without its ledger, a checkpoint is not gone on from: nobody could tell what it has learned from.
    for file in (tmp_path / "run").glob("ledger.db*"):
        file.write_bytes(b"")
    ended = longrein("train", "--config", config)
    assert ended.returncode == 1 and "knows of 0 steps, but step-000003" in ended.stderr, ended.stderr
    assert len(read_metrics(tmp_path)) == 3


async def test_the_socket_of_a_killed_run_is_removed_and_no_other() -> None:
    sockets = [Path(tempfile.mkdtemp(prefix="longrein-")) / "gateway.sock" for _ in range(2)]
    ends = [socket.socket(socket.AF_UNIX) for _ in sockets]
    for end, file in zip(ends, sockets, strict=True):
        end.bind(str(file))
        end.listen()
    ends[0].close()
    try:
        async with AsyncExitStack() as stack:
            own = _socket(stack)
            assert own.parent.is_dir() and not sockets[0].parent.exists() and sockets[1].exists()
        assert not own.parent.exists()
    finally:
        ends[1].close()
        for file in sockets:
            shutil.rmtree(file.parent, ignore_errors=True)


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=2)
    # Where the tests run in the background, the shell has Ctrl-C ignored, and what they start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "longrein.cli", "train", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
        deadline = time.monotonic() + 120
        while not read_metrics(tmp_path):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        assert run.stderr is not None
        said = run.stderr.read()
        assert run.wait(timeout=60) == 130, said
    assert "stopped" in said and "Traceback" not in said
    ended = longrein("train", "--config", config)
    assert ended.returncode == 0, ended.stderr
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--set", "model.path=./absent"], ["absent", "model"]),
        (["--set", "tasks.train=./absent"], ["absent"]),
        (["--set", "training.stesp=1"], ["training.stesp", "training.steps"]),
        (["--set", "harness.command=[no-such-program]"], ["no-such-program"]),
        (["--set", "learner.lora={targets: [query]}"], ["learner.lora.targets", "query", "q_proj"]),
        (["--set", "model.context_length=16"], ["model.context_length", "16"]),
        (["--set", "training.rollouts=1"], ["--set training.rollouts=1", "training.rollouts"]),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, change: list[str], says: list[str]) -> None:
    config = make_workshop(tmp_path)
    ended = longrein("train", "--config", config, *change)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert all(part in ended.stderr for part in says), ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_told_before_anything_is_written(tmp_path: Path) -> None:
    config = make_workshop(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = longrein("train", "--config", config, "--set", f"gateway.port={taken.getsockname()[1]}")
    assert ended.returncode == 1 and "gateway" in ended.stderr and "in use" in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("import sys; sys.exit('no such key: MODEL')", "it said last: no such key: MODEL"),
        (
            HARNESS.replace('"messages": messages}', '"messages": messages, "n": 3}'),
            "each was refused, the last with 400: n: 3 was given",
        ),
    ],
)
def test_where_no_rollout_works_the_run_ends_at_once_and_says_why(tmp_path: Path, agent: str, says: str) -> None:
    config = make_workshop(tmp_path)
    (tmp_path / "agent.py").write_text(agent)
    ended = longrein("train", "--config", config)
    assert ended.returncode == 1
    assert "none of its 4 rollouts gave a reward" in ended.stderr and says in ended.stderr, ended.stderr
    assert read_metrics(tmp_path) == []


def test_a_run_says_whose_rewards_may_be_hacked(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=1, groups=1)
    for task in (tmp_path / "tasks" / "held-out").iterdir():
        with (task / "task.toml").open("a") as file:
            file.write("[metadata]\ncanary = true\n")
    forge = "def loads(text): pass\ndef dumps(value): return '{\\\"reward\\\": 1}'\n"
    (tmp_path / "agent.py").write_text(f'{HARNESS}\nopen("json.py", "w").write("""{forge}""")\n')
    ended = longrein("train", "--config", config)
    assert ended.returncode == 1, ended.stderr
    hacked = "REWARDS ARE BEING HACKED: a canary, which cannot be solved, was rewarded 1"
    assert hacked in ended.stderr and "/app/json.py: stands before Python's module json" in ended.stderr

    ended = longrein("train", "--config", config, "--set", "tasks.evaluate=null", "--set", "output.dir=./again")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("TAMPERED: ") == 4 and "reward 1: /app/json.py: stands before" in ended.stderr
    assert '"rollouts_tampered": 4' in (tmp_path / "again" / "metrics.jsonl").read_text()
    assert "In 4 rollouts the harness did what may sway its verifier" in (tmp_path / "again" / "report.md").read_text()


def test_a_changed_task_is_refused_on_resume(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=1)
    assert longrein("train", "--config", config).returncode == 0
    (tmp_path / "tasks" / "train" / "say-1" / "instruction.md").write_text("Something else.\n")
    ended = longrein("train", "--config", config, "--set", "training.steps=2")
    assert ended.returncode == 1
    assert "tasks.train: its files have changed" in ended.stderr and str(tmp_path / "run") in ended.stderr
    other = longrein("train", "--config", config, "--set", "model.keep_thinking=true", "--set", "sampling.top_k=5")
    assert other.returncode == 1
    assert "model.keep_thinking was False, now True" in other.stderr
    assert "sampling.top_k was 0, now 5" in other.stderr, other.stderr


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    config = make_workshop(tmp_path)
    ended = longrein("train", "--config", config, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert "first_step" in ended.stdout and "rollouts_per_step: 8" in ended.stdout
    assert not (tmp_path / "run").exists()


def test_a_harness_can_be_tried_without_a_run(tmp_path: Path) -> None:
    config = make_workshop(tmp_path)
    tried = longrein(
        "harness", "probe", "command", "--config", config, "--set", "agents.rules=[{name: asker, user: Again}]"
    )
    assert tried.returncode == 0, tried.stderr
    head, _, first, second, total = tried.stdout.splitlines()
    assert "exited 0, reward" in head
    assert "main" in first and "new session" in first
    assert "asker" in second and "extended" in second
    assert total.startswith("2 calls on 1 branch (new session 1, extended 1); ") and total.endswith("; 0 side calls")
    assert not (tmp_path / "run").exists()
    unknown = longrein("harness", "probe", "mini-swe", "--config", config)
    assert unknown.returncode == 1 and "Did you mean 'mini-swe-agent'?" in unknown.stderr


def test_doctor_prints_one_object(tmp_path: Path) -> None:
    import json

    config = make_workshop(tmp_path)
    good = longrein("doctor", "--config", config)
    assert good.returncode == 0, good.stdout + good.stderr
    report = json.loads(good.stdout)
    assert report["ok"] and {"tasks", "model", "template", "sandbox", "harness", "output"} <= report["checks"].keys()
    bad = longrein("doctor", "--config", config, "--set", "model.path=./absent", "--set", "tasks.train=./gone")
    checks = json.loads(bad.stdout)["checks"]
    assert bad.returncode == 1 and not checks["model"]["ok"] and not checks["tasks"]["ok"] and checks["sandbox"]["ok"]


# Asks the worker after the main agent, and a judge that is never trained.
TEAM = HARNESS.replace('"model": "policy"', '"model": model').replace("def ask(messages):", "def ask(messages, model):")
TEAM = TEAM.replace("first = ask(messages)", 'first = ask(messages, "planner")')
TEAM = TEAM.replace("second = ask(messages)", 'second = ask(messages, "worker")\nask(messages, "judge")')

RULES = """[
{name: worker, model: ^worker$, policy: worker},
{name: judge, model: ^judge$, train: false, policy: base}]"""


async def test_agents_have_policies_of_their_own(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=2)
    (tmp_path / "agent.py").write_text(TEAM)
    team = ["--set", f"agents.rules={RULES}", "--set", "learner.lora={rank: 4}"]
    ended = longrein("train", "--config", config, *team)
    assert ended.returncode == 0, ended.stderr
    metrics = read_metrics(tmp_path)
    assert all(line["learned"] and line["policies"]["worker"]["learned"] for line in metrics)  # type: ignore[index]
    found = await recorded(tmp_path, Split.TRAIN, 2)
    calls = [call for members in found.values() for _, calls in members for call in calls]
    assert {(call.agent, call.policy, call.train) for call in calls} == {
        ("main", "policy", True),
        ("worker", "worker", True),
        ("judge", "base", False),
    }
    # The base is what training began with, whatever the others have become: its tokens have version 0.
    assert {int(version) for call in calls if call.policy == "base" for version in call.versions} == {0}
    assert {int(version) for call in calls if call.policy == "worker" for version in call.versions} == {0, 1}
    # Each policy's learner saw the log-probabilities its sampler gave.
    for line in metrics:
        for report in (line, line["policies"]["worker"]):  # type: ignore[index]
            assert report["logprob_difference_max"] < 1e-3  # type: ignore[index]
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    weights = [load_file(next(saved.glob(f"**/{policy}/model.safetensors"))) for policy in ("policy", "worker")]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    again = longrein("train", "--config", config, *team, "--set", "training.steps=3")
    assert again.returncode == 0 and "going on after step 2 of 3" in again.stderr, again.stderr


def test_dapo_collects_until_its_groups_have_contrast(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=1, groups=2)
    # Of three tasks two give every rollout the same reward.
    for index in (0, 1):
        test = tmp_path / "tasks" / "train" / f"say-{index}" / "tests" / "test.sh"
        test.write_text("#!/bin/sh\necho '{\"reward\": 1}' > /logs/verifier/reward.json\n")
    ended = longrein("train", "--config", config, "--set", "algorithm.name=dapo")
    assert ended.returncode == 0, ended.stderr
    (line,) = read_metrics(tmp_path)
    assert line["groups"] == line["groups_with_contrast"]
    assert 3 <= int(str(line["groups_collected"])) <= 2 * 4
    assert "of them with contrast; collecting" in ended.stderr


def test_steps_that_go_wrong_say_so_and_in_a_row_stop_the_run(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=4)
    for test in (tmp_path / "tasks" / "train").glob("*/tests/test.sh"):
        test.write_text("#!/bin/sh\necho '{\"reward\": 1}' > /logs/verifier/reward.json\n")
    # So low a bound that rounding is above it.
    given = ["--set", "training.nothing_learned=2", "--set", "training.mismatch=1e-12"]
    ended = longrein("train", "--config", config, *given)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert ended.stderr.count("TROUBLE: nothing was learned: no contrast: within each of the 2 groups") == 2
    assert "2 steps in a row (training.nothing_learned) went wrong" in ended.stderr
    assert len(read_metrics(tmp_path)) == 2
    rewarding = make_workshop(tmp_path / "again", steps=4)
    ended = longrein("train", "--config", rewarding, *given)
    assert ended.returncode == 1 and ended.stderr.count("TROUBLE: sampler and learner disagree") == 2, ended.stderr
    assert [line["learned"] for line in read_metrics(tmp_path / "again")] == [True, True]


def test_several_updates_a_step_with_every_correction(tmp_path: Path) -> None:
    config = make_workshop(tmp_path, steps=1)
    # So small a step that the second epoch's ratios are within gspo's narrow bounds, or every token would be clipped.
    keys = "{name: gspo, mini_batches: 2, epochs: 2, process: {coefficient: 0.5, source: verifier}}"
    ended = longrein("train", "--config", config, "--set", f"algorithm={keys}", "--set", "learner.learning_rate=1e-7")
    assert ended.returncode == 0, ended.stderr
    (line,) = read_metrics(tmp_path)
    assert line["optimizer_steps"] == 4
    assert 0.9 < float(str(line["effective_sample_size"])) <= 1
    assert list(line["by_age"]) == ["0"]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("algorithm.name=grop", ["algorithm", "no algorithm is called 'grop'", "dr_grpo"]),
        ("algorithm={name: rloo, epochs: 2}", ["only the first of several updates would be on-policy"]),
        ("algorithm.mini_batches=3", ["algorithm.mini_batches is 3", "has only 2 groups"]),
        ("algorithm.process={coefficient: 1, source: hook}", ["source 'hook'", "package.module:function"]),
        ("algorithm.process={coefficient: 1, source: hook, hook: 'gone:f'}", ["gone:f", "No module named"]),
        ("agents.rules=[{name: a, model: a, policy: a}]", ["several policies (policy, a)", "set learner.lora"]),
        ("agents.rules=[{name: a, model: a, policy: base}]", ["never trained: set train to false"]),
    ],
)
def test_an_algorithm_that_means_nothing_is_refused(tmp_path: Path, change: str, says: list[str]) -> None:
    config = make_workshop(tmp_path)
    ended = longrein("train", "--config", config, "--set", change)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert all(part in ended.stderr for part in says), ended.stderr
    assert not (tmp_path / "run").exists()
