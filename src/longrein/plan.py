"""Which tasks each step trains on: a pure function of seed and step, so a resumed run goes on in the same order."""

import random
from collections.abc import Sequence

from longrein.agents.controller import Wanted
from longrein.records import Group, Split, Task


def training_groups(
    tasks: Sequence[Task], step: int, *, groups: int, rollouts: int, temperature: float, seed: int, round_: int = 0
) -> list[Wanted]:
    """The groups of a step. Tasks come in epochs: each once, in an order of that epoch's own.

    Args:
        round_: of collecting within the step; further rounds take tasks in an order of their own, so that they move no
            other step's.
    """
    name = f"s{step:05d}" + (f"-r{round_}" if round_ else "")
    wanted = []
    for place in range(groups):
        epoch, index = divmod(place if round_ else step * groups + place, len(tasks))
        order = list(range(len(tasks)))
        random.Random(f"{seed}/{name}/{epoch}" if round_ else f"{seed}/{epoch}").shuffle(order)
        task = tasks[order[index]]
        group = Group(f"{name}-g{place:02d}", step, task.task_id, Split.TRAIN)
        wanted.append(Wanted(group, task, rollouts, temperature))
    return wanted


def evaluation_groups(
    tasks: Sequence[Task], step: int, *, samples: int, temperature: float, label: str
) -> list[Wanted]:
    """One group per held-out task. ``label`` tells evaluations of the same step apart."""
    return [
        Wanted(Group(f"e{step:05d}-{label}-g{place:03d}", step, task.task_id, Split.EVAL), task, samples, temperature)
        for place, task in enumerate(tasks)
    ]
