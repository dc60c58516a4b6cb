"""Rows through TRL's GRPO trainer, one at a time: its loss, with a worth for each token, and its backward pass.

Runs in TRL's environment, started by ``learner.py``, of which it imports nothing: a file with the task in, one line
with what was measured out.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]


def trainer_of(model: str, precision: str, folder: str) -> Any:
    """A trainer that is given its rows instead of sampling them."""
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=precision == "bfloat16",
        gradient_checkpointing=False,
        loss_type="grpo",
        beta=0.0,
        num_generations=2,
        per_device_train_batch_size=2,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["one", "other"]}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def train(trainer: Any, row: dict[str, Any]) -> int:
    """One row forward and backward; the tokens computed."""
    tokens, places = torch.tensor(row["tokens"])[None], torch.tensor(row["places"])
    first, last = int(places[0]), int(places[-1]) + 1
    sampled = torch.zeros(1, last - first, dtype=torch.long)
    sampled[0, places - first] = 1
    worth = torch.zeros(1, last - first)
    # GRPO takes a row's mean.
    worth[0, places - first] = torch.tensor(row["worth"]) * len(places)
    inputs = {
        "prompt_ids": tokens[:, :first],
        "prompt_mask": torch.ones(1, first, dtype=torch.long),
        "completion_ids": tokens[:, first:last],
        "completion_mask": torch.ones(1, last - first, dtype=torch.long),
        "tool_mask": sampled,
        "advantages": worth,
    }
    trainer.accelerator.backward(trainer.compute_loss(trainer.model, inputs))
    return last


def peak() -> float:
    """GiB of memory this process has had at most since the peak was forgotten."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(task["model"], task["precision"], folder)
        train(trainer, {"tokens": list(range(64)), "places": [63], "worth": [1.0]})
        trainer.model.zero_grad(set_to_none=True)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        began = time.perf_counter()
        tokens = sum(train(trainer, row) for row in task["rows"])
        seconds = time.perf_counter() - began
        gradients = [each.grad.norm() for each in trainer.model.parameters() if each.grad is not None]
        norm = float(torch.stack(gradients).norm())
    print(json.dumps({"seconds": seconds, "tokens": tokens, "gib": peak(), "norm": norm}))


if __name__ == "__main__":
    main()
