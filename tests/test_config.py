"""Bad configurations are refused in one sentence that names file, key, what was given and what to do."""

from pathlib import Path

import pytest

from longrein.config_file import load
from longrein.errors import ConfigError

GOOD = """
model: {path: ./model}
tasks: {train: ./tasks}
harness: {command: [python3, agent.py]}
output: {dir: ./run}
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def test_defaults_and_relative_paths(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD))
    assert config.output.dir == tmp_path / "run"
    assert config.tasks.train == tmp_path / "tasks"
    assert config.algorithm.name == "grpo"


def test_overrides_are_typed_yaml(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD), ["training.steps=3", "learner.lora={rank: 4}", "output.dir=elsewhere"])
    assert config.training.steps == 3
    assert config.learner.lora is not None and config.learner.lora.rank == 4
    assert config.output.dir == tmp_path / "elsewhere"


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    text = GOOD + "learner: {learning_rate: 1e-6, weight_decay: 1.5E-2}\n"
    config = load(write(tmp_path, text), ["algorithm.kl_coefficient=1e-3"])
    assert (config.learner.learning_rate, config.learner.weight_decay) == (1e-6, 0.015)
    assert config.algorithm.kl_coefficient == 0.001


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        (GOOD + "training: {stesp: 3}", [], ["training.stesp", "3", "training.steps"]),
        (GOOD + "trainign: {steps: 3}", [], ["trainign", "training"]),
        (GOOD + "steps: 3", [], ["steps", "training.steps"]),
        (GOOD + "learner: {lora: {rnak: 3}}", [], ["learner.lora.rnak", "learner.lora.rank"]),
        (GOOD, ["training.steps=many"], ["training.steps", "many"]),
        (GOOD, ["training.steps=0"], ["training.steps", "0"]),
        (GOOD, ["training.steps=true"], ["training.steps", "True"]),
        (GOOD, ["sampling.temperature=.nan"], ["sampling.temperature"]),
        (GOOD, ["training"], ["--set training", "section.key=value"]),
        (GOOD, ["harness.name=command", "harness.command=null"], ["harness", "command"]),
        (GOOD, ["tasks.reward.raw_range=[1, 0]"], ["tasks.reward.raw_range", "[1, 0]"]),
        ("model: [", [], ["YAML"]),
        ("- a", [], ["list"]),
        (GOOD + "output: {dir: ./other}", [], ["'output'", "twice"]),
        ("model: {path: m}", [], ["'tasks'", "missing"]),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path: Path, text: str, overrides: list[str], says: list[str]) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load(file, overrides)
    message = str(error.value)
    assert all(part in message for part in says), message
    assert "\n\n" not in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load(tmp_path / "absent.yaml")
