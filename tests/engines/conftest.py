"""Tiny models and engines over them."""

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from longrein.engines import weights
from longrein.engines.embedded import EmbeddedEngine
from tests.tiny_model import Family, make_tiny_model

MakeEngine = Callable[..., EmbeddedEngine]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """The directory of each family's tiny model, made when first asked for."""
    made: dict[str, Path] = {}

    def directory(family: Family) -> Path:
        if family not in made:
            made[family] = make_tiny_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return directory


@pytest.fixture
def load(directories: Callable[[Family], Path]) -> Callable[[Family], PreTrainedModel]:
    """A fresh module of a family. Biases and norms are drawn at random: at their initial values they do nothing."""

    def fresh(family: Family) -> PreTrainedModel:
        module = weights.load_module(directories(family), torch.float32)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(generator=generator)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5, generator=generator)
        return module

    return fresh


@pytest.fixture
def module(load: Callable[[Family], PreTrainedModel]) -> PreTrainedModel:
    return load("llama")


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest_asyncio.fixture
async def make_engine(executor: ThreadPoolExecutor) -> AsyncIterator[MakeEngine]:
    """Engines that are closed afterwards."""
    made: list[EmbeddedEngine] = []

    def make(module: PreTrainedModel, **settings: Any) -> EmbeddedEngine:
        defaults: dict[str, Any] = {
            "dtype": torch.float32,
            "decode_threads": 1,
            "prefill_threads": 1,
            "max_batch": 8,
            "cache_tokens": 4096,
            "context_length": None,
            "seed": 0,
        }
        made.append(EmbeddedEngine(module, executor=executor, **(defaults | settings)))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()
