"""One rollout of a harness, to see what it does to the endpoint: how many calls, on how many branches and why, how much
of what was sampled would be trained, which calls are side calls.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from longrein.agents.controller import Collected, Wanted
from longrein.config import Config
from longrein.errors import HarnessError
from longrein.forest.targets import trainable
from longrein.progress import Display
from longrein.records import Call, Group, Split
from longrein.run import opened


async def probe_harness(config: Config, name: str) -> str:
    """Run harness ``name`` once on the first training task, with the configured model; the report.

    Nothing of it is kept: the run directory of the configuration is not touched.

    Raises:
        HarnessError: no rollout ended with a reward; says what each try ended with.
    """
    with tempfile.TemporaryDirectory(prefix="longrein-probe-") as folder:
        harness = config.harness if name == config.harness.name else config.harness.model_copy(update=_only(name))
        output = config.output.model_copy(update={"dir": Path(folder) / "run", "tensorboard": False})
        probed = config.model_copy(update={"harness": harness, "output": output})
        with Display(1) as display:
            async with opened(probed, display) as run:
                group = Group("probe", 0, run.tasks[0].task_id, Split.EVAL)
                wanted = Wanted(group, run.tasks[0], 1, config.sampling.temperature)
                (found,) = await run.controller.collect([wanted])
                if not found.rollouts:
                    raise HarnessError(f"harness {name} gave no result: {'; '.join(found.failures)}")
                return report(name, found, await run.ledger.calls(found.rollouts[0].rollout_id))


def _only(name: str) -> dict[str, object]:
    """A profile as it is: what the configuration adds is meant for another harness."""
    return {"name": name, "command": None, "env": {}, "files": {}, "arguments": []}


def report(name: str, found: Collected, calls: Sequence[Call]) -> str:
    """A line per call, and what they come to."""
    rollout = found.rollouts[0]
    lines = [
        f"{name} on {found.task.task_id}: {rollout.ending}, reward {rollout.reward:.2f}, "
        f"{rollout.ended_at - rollout.started_at:.1f} s",
        f"{'call':>4}  {'agent':<12}  {'dialect':<9}  {'prompt':>7}  {'sampled':>7}  {'begins as':<25}  ends with",
    ]
    lines[1:1] = (
        [f"may have swayed its verifier: {line}" for line in rollout.receipt.tampered] if rollout.receipt else []
    )
    lines += [
        f"{call.index:>4}  {call.agent:<12}  {call.dialect:<9}  {len(call.prompt_ids):>7,}  "
        f"{len(call.completion_ids):>7,}  {call.cause.value:<25}  {call.finish_reason}"
        f"{'' if trainable(call) else ' (not trained)'}"
        for call in calls
    ]
    sampled = sum(len(call.completion_ids) for call in calls)
    trained = sum(len(call.completion_ids) for call in calls if trainable(call))
    branches = sum(call.parent_id is None for call in calls)
    causes = ", ".join(f"{cause} {count}" for cause, count in Counter(call.cause.value for call in calls).items())
    side = sum(not call.train for call in calls)
    lines.append(
        f"{len(calls)} calls on {branches} branch{'es' * (branches != 1)} ({causes}); {trained:,} of {sampled:,} "
        f"sampled tokens trained; {side} side call{'s' * (side != 1)}"
    )
    return "\n".join(lines)
