"""Whether a long run grows: the resident memory of a training process over 20,000 short rollouts.

Everything is as in a training run, the gateway on its sockets, the embedded engine, the ledger, the learner, in
asynchronous mode, with one exception: what a harness and a verifier do is done in this process, since sandboxes would
take hours and are processes of their own. Memory is read after each fiftieth of the rollouts.

    python -m bench.soak [--rollouts 20000]
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("LRU_CACHE_CAPACITY", "256")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

from tests.workshop import make_workshop

import longrein.run
from longrein.agents.rewards import read_reward
from longrein.agents.runner import Outcome, Trial
from longrein.config_file import load
from longrein.train import train

GROUPS, ROLLOUTS = 4, 8


class Here:
    """A runner that does what the workshop's harness and verifier do, in this process."""

    ended = 0
    every = 1

    def __init__(self, section: object) -> None:
        self._http = httpx.AsyncClient(timeout=60)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        await self._http.aclose()

    async def run(self, trial: Trial) -> Outcome:
        messages = [
            {"role": "system", "content": "Say many letters."},
            {"role": "user", "content": trial.task.instruction},
        ]
        first = await self._ask(trial, messages)
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Again."}]
        text = first + await self._ask(trial, messages)
        await trial.verifying()
        trial.evidence.mkdir(parents=True, exist_ok=True)
        reward = sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1)
        (trial.evidence / "reward.json").write_text(json.dumps({"reward": reward}))
        receipt = read_reward(trial.evidence, trial.task.profile)
        Here.ended += 1
        if Here.ended % Here.every == 0:
            print(f"| {Here.ended:,} | {resident_mb():.1f} |", flush=True)
        return Outcome("exited 0", receipt)

    async def _ask(self, trial: Trial, messages: list[dict[str, str]]) -> str:
        env = trial.launch.env
        reply = await self._http.post(
            env["OPENAI_BASE_URL"] + "/chat/completions",
            headers={"authorization": f"Bearer {env['OPENAI_API_KEY']}"},
            json={"model": "policy", "messages": messages},
        )
        reply.raise_for_status()
        content: Any = reply.json()["choices"][0]["message"]["content"]
        return content or ""


def resident_mb() -> float:
    """Of this process, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rollouts", type=int, default=20_000)
    given = arguments.parse_args()
    steps = -(-given.rollouts // (GROUPS * ROLLOUTS))
    Here.every = max(1, given.rollouts // 50)
    longrein.run.process.ProcessRunner = Here  # type: ignore[misc,assignment]
    with tempfile.TemporaryDirectory(prefix="lr-soak-") as folder:
        file = make_workshop(Path(folder), steps=steps, groups=GROUPS, rollouts=ROLLOUTS)
        keys = ["training.mode=async", "training.eval_samples=0", "tasks.evaluate=null", "training.save_every=50"]
        keys += ["runner.network=host", "runner.concurrency=32", "learner.learning_rate=1e-6", "training.collect_s=600"]
        began = time.monotonic()
        print("| rollouts | resident, MiB |\n|---|---|")
        asyncio.run(train(load(file, keys)))
        print(f"\n{Here.ended:,} rollouts in {steps} steps, {time.monotonic() - began:.0f} s")
        size = (Path(folder) / "run" / "ledger.db").stat().st_size
        print(f"the ledger holds {size / 2**20:.0f} MiB, {size / Here.ended:,.0f} bytes a rollout")


if __name__ == "__main__":
    main()
