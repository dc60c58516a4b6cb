"""Task directories are read whole, and what cannot be honoured is refused by name."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrein.agents.tasks import load_task, task_digest
from longrein.errors import TaskError
from longrein.records import RewardProfile
from tests.agents.task_directory import make_task

FULL = """
schema_version = "1.4"
source = "ours"
[metadata]
level = 3
[task]
name = "ours/greet"
keywords = ["small"]
[agent]
timeout_sec = 12
network_mode = "no-network"
[verifier]
timeout_sec = 7.5
environment_mode = "shared"
[environment]
build_timeout_sec = 60
cpus = 1
memory_mb = 512
gpus = 0
workdir = "/srv/here"
env = {PLAIN = "one", FROM_HOST = "${LONGREIN_TEST_VARIABLE}-${LONGREIN_TEST_ABSENT:-two}"}
[solution]
env = {}
"""


def test_a_task_says_what_harness_and_verifier_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREIN_TEST_VARIABLE", "zero")
    profile = RewardProfile("score")
    task = load_task(make_task(tmp_path / "greet", task_toml=FULL), profile)
    assert (task.task_id, task.path, task.instruction) == ("greet", tmp_path / "greet", "Do it.")
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (12.0, 7.5)
    assert task.workdir == "/srv/here"
    assert task.env == {"PLAIN": "one", "FROM_HOST": "zero-two"}
    assert task.metadata == {"level": 3}
    assert task.profile is profile
    assert task.digest == task_digest(tmp_path / "greet")


def test_what_is_not_said_has_harbors_defaults(tmp_path: Path) -> None:
    task = load_task(make_task(tmp_path / "t", task_toml=""), RewardProfile())
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.workdir, task.env) == (None, 600.0, "/app", {})


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        ("FROM x\n", "/app"),
        ("FROM x\nWORKDIR /srv\nworkdir sub/dir\n", "/srv/sub/dir"),
        ("FROM x\nWORKDIR \\\n  /srv\n", "/srv"),
        ("FROM x\nRUN echo WORKDIR /no\nWORKDIR /a/../b/\n", "/b"),
    ],
)
def test_the_dockerfile_gives_the_working_directory(tmp_path: Path, dockerfile: str, workdir: str) -> None:
    task = load_task(make_task(tmp_path / "t", environment_Dockerfile=dockerfile), RewardProfile())
    assert task.workdir == workdir


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("# canary GUID 26b5c67b\n\nDo it.\n", "Do it."),
        ("<!-- harbor-canary 1 -->\n# CANARY\nDo\n\nit.\n", "Do\n\nit."),
        ("# Heading\nDo it. # canary stays\n", "# Heading\nDo it. # canary stays"),
    ],
)
def test_canary_lines_at_the_top_are_not_part_of_the_instruction(tmp_path: Path, text: str, instruction: str) -> None:
    assert load_task(make_task(tmp_path / "t", instruction_md=text), RewardProfile()).instruction == instruction


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[[steps]]\nname = 'one'\n", ["'steps'", "several steps"]),
        ("[environment]\ngpus = 1\n", ["'environment.gpus'", "given 1", "no GPU"]),
        ("[environment]\ngpus = false\n", ["'environment.gpus'", "given False"]),
        ("[[environment.mcp_servers]]\nname = 'm'\n", ["'environment.mcp_servers'"]),
        ("[environment.healthcheck]\ncommand = 'true'\n", ["'environment.healthcheck'"]),
        ("[environment]\ndocker_image = 'python:3'\n", ["'environment.docker_image'", "environment/Dockerfile"]),
        ("[environment]\nnetwork_mode = 'public'\n", ["'environment.network_mode'", "runner.network: host"]),
        ("[agent]\nnetwork_mode = 'allowlist'\n", ["'agent.network_mode'"]),
        ("[verifier.environment]\ncpus = 1\n", ["'verifier.environment'"]),
        ("[verifier]\ntimeout_secs = 1\n", ["'verifier.timeout_secs'", "'timeout_sec'"]),
        ("[verifier]\ntimeout_sec = true\n", ["'verifier.timeout_sec'", "given True"]),
        ("[agent]\ntimeout_sec = inf\n", ["'agent.timeout_sec'"]),
        ("[environment]\nworkdir = 'app'\n", ["'environment.workdir'", "absolute"]),
        ("[environment]\nenv = {A = '${LONGREIN_TEST_ABSENT}'}\n", ["'environment.env.A'", "LONGREIN_TEST_ABSENT"]),
        ("agent = 3\n", ["'agent'", "table"]),
        ("metadata = 3\n", ["'metadata'", "table"]),
        ("[metadata]\ncanary = 'yes'\n", ["'metadata.canary'", "true or false"]),
        ("schema_version = '2.0'\n", ["'schema_version'", "'2.0'"]),
        ("colour = 'red'\n", ["'colour'", "[metadata]"]),
        ("= nothing\n", ["not valid TOML"]),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, toml: str, says: list[str]) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(make_task(tmp_path / "t", task_toml=toml), RewardProfile())
    message = str(caught.value)
    assert str(tmp_path / "t" / "task.toml") in message
    assert all(part in message for part in says), message


def test_a_public_network_is_taken_where_the_runner_gives_it(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", task_toml="[environment]\nnetwork_mode = 'public'\n")
    assert load_task(task, RewardProfile(), network="host").task_id == "t"


@pytest.mark.parametrize("part", ["task_toml", "instruction_md", "environment_Dockerfile", "tests_test_sh"])
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    task = make_task(tmp_path / "t", **{part: None})
    with pytest.raises(TaskError, match="is missing"):
        load_task(task, RewardProfile())


def test_odd_layouts_are_refused(tmp_path: Path) -> None:
    compose = make_task(tmp_path / "compose")
    (compose / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    steps = make_task(tmp_path / "steps")
    (steps / "steps").mkdir()
    empty = make_task(tmp_path / "empty", instruction_md="# canary\n\n")
    variable = make_task(tmp_path / "variable", environment_Dockerfile="FROM x\nWORKDIR $HOME\n")
    for task, says in (
        (compose, "compose"),
        (steps, "several steps"),
        (empty, "no instruction"),
        (variable, "spell the directory out"),
        (tmp_path / "absent", "is not a directory"),
    ):
        with pytest.raises(TaskError, match=says):
            load_task(task, RewardProfile())


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    linked, piped = make_task(tmp_path / "linked"), make_task(tmp_path / "piped")
    (linked / "environment" / "data").symlink_to("/etc")
    os.mkfifo(piped / "environment" / "data")
    with pytest.raises(TaskError, match=r"environment/data: is a symbolic link"):
        task_digest(linked)
    with pytest.raises(TaskError, match=r"environment/data: is neither"):
        task_digest(piped)


NAMES = st.from_regex(r"[a-z]{1,3}(/[a-z]{1,3})?", fullmatch=True)
TREES = st.dictionaries(NAMES, st.tuples(st.binary(max_size=20), st.booleans()), min_size=1, max_size=5)


def plant(root: Path, tree: dict[str, tuple[bytes, bool]]) -> bool:
    """Write the tree; False if one of its names is a directory of another."""
    shutil.rmtree(root, ignore_errors=True)
    for name, (content, executable) in tree.items():
        file = root / name
        if any(other.startswith(f"{name}/") for other in tree):
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o775 if executable else 0o640)
    return True


@settings(max_examples=60, deadline=None)
@given(first=TREES, second=TREES)
def test_digests_are_equal_exactly_where_content_is(
    tmp_path_factory: pytest.TempPathFactory,
    first: dict[str, tuple[bytes, bool]],
    second: dict[str, tuple[bytes, bool]],
) -> None:
    root = tmp_path_factory.getbasetemp()
    one, two, again = root / "one", root / "two", root / "again"
    if not (plant(one, first) and plant(two, second) and plant(again, dict(reversed(first.items())))):
        return
    assert task_digest(one) == task_digest(again)
    assert (task_digest(one) == task_digest(two)) == (first == second)


def test_a_digest_survives_another_umask_but_not_another_mode(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t")
    before = task_digest(task)
    (task / "instruction.md").chmod(0o664)
    assert task_digest(task) == before
    (task / "tests" / "test.sh").chmod(0o755)
    assert task_digest(task) != before
