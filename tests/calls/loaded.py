"""Tokenizers and renderers are slow to load and never change: each is loaded once."""

import functools
from pathlib import Path
from typing import Any

from longrein.calls.rendering import Renderer, load_tokenizer, open_renderer
from longrein.config import ModelSection


@functools.cache
def tokenizer_of(directory: Path) -> Any:
    return load_tokenizer(directory)


@functools.cache
def renderer_of(directory: Path, **keys: Any) -> Renderer:
    """The renderer for ``model`` keys that can be hashed."""
    return open_renderer(directory, ModelSection(path=str(directory), **keys))
