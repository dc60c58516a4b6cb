"""The examples load, and the commented one names every key."""

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from longrein.config import Config
from longrein.config_file import load
from longrein.run import load_tasks

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    "name", ["demo/config.yaml", "inhouse/config.yaml", "planner/joint.yaml", "planner/central.yaml", "full.yaml"]
)
def test_an_example_loads_with_its_tasks(name: str) -> None:
    tasks, held_out = load_tasks(load(EXAMPLES / name))
    assert tasks
    assert {task.digest for task in tasks}.isdisjoint(task.digest for task in held_out)


def keys(section: type[BaseModel], tree: dict[str, object], at: str = "") -> list[str]:
    """Keys of the schema that the tree lacks."""
    missing = []
    for name, info in section.model_fields.items():
        if name not in tree:
            missing.append(at + name)
        elif isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            nested = tree[name]
            assert isinstance(nested, dict)
            missing += keys(info.annotation, nested, f"{at}{name}.")
    return missing


def test_the_commented_example_names_every_key_with_its_default() -> None:
    tree = yaml.safe_load((EXAMPLES / "full.yaml").read_text())
    assert keys(Config, tree) == []
    resolved = load(EXAMPLES / "full.yaml").model_dump()
    for section, values in resolved.items():
        for name, value in values.items():
            info = Config.model_fields[section].annotation.model_fields[name]  # type: ignore[union-attr]
            if not info.is_required() and (section, name) != ("harness", "command"):
                default = info.get_default(call_default_factory=True)
                assert value == (default.model_dump() if isinstance(default, BaseModel) else default), (section, name)
