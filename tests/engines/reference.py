"""What a plain transformers forward says about a sample."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from longrein.engines.embedded import EmbeddedEngine
from longrein.engines.engine import SampleRequest
from longrein.records import IntArray

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Completion:
    prompt: IntArray
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str | None
    temperature: float

    @property
    def whole(self) -> IntArray:
        """Prompt and completion."""
        return np.concatenate([self.prompt, np.array(self.ids, np.int32)])


async def complete(engine: EmbeddedEngine, prompt: IntArray, max_tokens: int, **sampling: Any) -> Completion:
    """Sample to the end."""
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    reason = None
    request = SampleRequest(prompt, max_tokens, **sampling)
    async for chunk in engine.sample(request):
        assert chunk.ids and len(chunk.ids) == len(chunk.logprobs)
        assert reason is None, "a chunk after the last"
        ids += chunk.ids
        logprobs += chunk.logprobs
        versions += [chunk.version] * len(chunk.ids)
        reason = chunk.finish_reason
    return Completion(prompt, ids, logprobs, versions, reason, request.temperature)


def reference(module: PreTrainedModel, completion: Completion) -> Tensor:
    """(C, V) log-probabilities at the completion's positions and temperature."""
    ids = torch.from_numpy(completion.whole.astype(np.int64))[None]
    with torch.no_grad():
        logits = module(input_ids=ids, use_cache=False).logits[0, len(completion.prompt) - 1 : -1]
    scaled: Tensor = logits / (completion.temperature or 1.0)
    return scaled.log_softmax(1)


def assert_exact(module: PreTrainedModel, completion: Completion) -> None:
    """The sampler's log-probabilities are transformers'; a greedy token is transformers' likeliest."""
    expected = reference(module, completion)
    ids = torch.tensor(completion.ids)
    given = torch.tensor(completion.logprobs)
    torch.testing.assert_close(given, expected.gather(1, ids[:, None])[:, 0], atol=TOLERANCE, rtol=0)
    if completion.temperature == 0:
        # A tie within rounding may go either way.
        assert (expected.max(1).values - expected.gather(1, ids[:, None])[:, 0]).max() < TOLERANCE


def tokens(seed: int, count: int) -> IntArray:
    """Random ids of the tiny vocabulary."""
    return np.random.default_rng(seed).integers(0, 400, count, dtype=np.int32)
