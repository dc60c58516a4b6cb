"""CAPO beside its controls on a task where which tool and which argument are right pull against each other.

A context is one of eight tokens. The right tool is a function of the context, and so is the right argument, but
contexts that share a tool never share an argument: what helps one of the two choices for a context moves the other
choice of its neighbours. A rollout is one call of two tokens, the tool and the argument; each is worth half of the
reward. The model is a random Llama of two narrow layers, sampled and trained in this process by the learner itself.

    python bench/capo.py [--seeds 5] [--steps 60]

Prints the mean reward over steps as markdown, mean and range over the seeds.
"""

import argparse
import statistics
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from longrein.config import AlgorithmSection, LearnerSection, LoraSection
from longrein.learning.adapters import attach
from longrein.learning.attention import use_forest_attention
from longrein.learning.backend import Packed
from longrein.learning.batch import TrainBatch, TrainGroup, TrainRollout
from longrein.learning.capo import ADAPTERS
from longrein.learning.learner import Body, EmbeddedLearner
from longrein.records import Call, Cause, Role

CONTEXTS, TOOLS, ARGUMENTS = 8, 4, 4
ROLLOUTS = 16
MOMENTS = (0, 10, 20, 40, 60)

WAYS: dict[str, dict[str, Any]] = {
    "split LoRA": {"form": "split_lora", "others": "leave"},
    "split LoRA, random": {"form": "split_lora", "others": "leave", "control": "random"},
    "split LoRA, unrouted": {"form": "split_lora", "others": "leave", "control": "unrouted"},
    "neurons": {"form": "neurons", "others": "leave", "share": 0.3},
    "neurons, random": {"form": "neurons", "others": "leave", "share": 0.3, "control": "random"},
    "neurons, unrouted": {"form": "neurons", "others": "leave", "share": 0.3, "control": "unrouted"},
}


def right(context: int) -> tuple[int, int]:
    """The tokens of the right tool and the right argument."""
    return CONTEXTS + context // 2, CONTEXTS + TOOLS + (context % 2 + 2 * (context // 4)) % ARGUMENTS


def make_learner(way: dict[str, Any], seed: int) -> EmbeddedLearner:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=CONTEXTS + TOOLS + ARGUMENTS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        # Wide enough that what it says depends on what it is told from the beginning.
        initializer_range=0.3,
    )
    module: PreTrainedModel = LlamaForCausalLM(config).eval()
    use_forest_attention(module)
    algorithm = AlgorithmSection(capo=way)
    lora = LoraSection(rank=8, alpha=16.0) if way["form"] == "split_lora" else None
    names = tuple(ADAPTERS.values())
    adapted = attach(module, lora, names, seed) if lora is not None else None
    body = Body(module, adapted, Packed(module, torch.float32), torch.float32, 1)
    return EmbeddedLearner(body, LearnerSection(lora=lora, learning_rate=1e-2), algorithm, names)


def collect(module: PreTrainedModel, step: int, random: torch.Generator) -> TrainBatch:
    """A group for each context, sampled from the module."""
    contexts = torch.arange(CONTEXTS).repeat_interleave(ROLLOUTS)[:, None]
    ids, logprobs = contexts, []
    with torch.no_grad():
        for _ in range(2):
            distribution = torch.log_softmax(module(ids, use_cache=False).logits[:, -1].float(), -1)
            token = torch.multinomial(distribution.exp(), 1, generator=random)
            logprobs.append(distribution.gather(1, token))
            ids = torch.cat([ids, token], 1)
    told = torch.cat(logprobs, 1).numpy()
    groups: list[list[TrainRollout]] = [[] for _ in range(CONTEXTS)]
    for index, (context, tool, argument) in enumerate(ids.tolist()):
        wanted = right(context)
        reward = ((tool == wanted[0]) + (argument == wanted[1])) / 2
        groups[context].append(
            TrainRollout(str(index), reward, (make_call(context, tool, argument, told[index], index),))
        )
    return TrainBatch(tuple(TrainGroup(str(number), tuple(group)) for number, group in enumerate(groups)), step)


def make_call(context: int, tool: int, argument: int, logprobs: np.ndarray, index: int) -> Call:
    return Call(
        call_id=str(index),
        rollout_id=str(index),
        index=0,
        agent="main",
        dialect="chat",
        request={},
        reply={},
        prompt_ids=np.array([context], np.int32),
        completion_ids=np.array([tool, argument], np.int32),
        logprobs=logprobs.astype(np.float32),
        versions=np.zeros(2, np.int32),
        temperature=1.0,
        policy="policy",
        finish_reason="stop",
        cause=Cause.NEW_SESSION,
        roles=np.array([Role.ACTION, Role.ARGUMENTS], np.uint8),
    )


def curve(way: dict[str, Any], seed: int, steps: int) -> tuple[list[float], float]:
    """Mean reward of each step, and the mean cosine of the two gradients."""
    learner = make_learner(way, seed)
    random = torch.Generator().manual_seed(seed)
    rewards, cosines = [], []
    for step in range(steps + 1):
        batch = collect(learner.module, step, random)
        rewards.append(statistics.fmean(rollout.reward for rollout in batch.rollouts))
        report = learner.update(batch)
        if report.roles is not None:
            cosines.append(report.roles.cosine)
    return rewards, statistics.fmean(cosines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    moments = [moment for moment in MOMENTS if moment <= given.steps]
    print(f"| way | {' | '.join(f'step {moment}' for moment in moments)} | mean over all steps | cosine |")
    print("|---" * (len(moments) + 3) + "|")
    for name, way in WAYS.items():
        found = [curve(way, seed, given.steps) for seed in range(given.seeds)]
        cells = [cell([rewards[moment] for rewards, _ in found]) for moment in moments]
        whole = cell([statistics.fmean(rewards) for rewards, _ in found])
        cosine = statistics.fmean(each for _, each in found)
        print(f"| {name} | {' | '.join(cells)} | {whole} | {cosine:.2f} |", flush=True)


def cell(values: list[float]) -> str:
    """Mean and range over the seeds."""
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
