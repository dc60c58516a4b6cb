"""Which task each group is of: a pure function of seed and number, so a resumed run goes on in the same order."""

import random
from collections.abc import Sequence

from longrein.agents.controller import Wanted
from longrein.records import Group, Split, Task


def training_group(tasks: Sequence[Task], number: int, *, rollouts: int, temperature: float, seed: int) -> Wanted:
    """A run's group with this number. Tasks come in epochs: each once, in an order of that epoch's own."""
    epoch, index = divmod(number, len(tasks))
    order = list(range(len(tasks)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    task = tasks[order[index]]
    return Wanted(Group(f"g{number:06d}", None, task.task_id, Split.TRAIN), task, rollouts, temperature)


def evaluation_groups(
    tasks: Sequence[Task], step: int, *, samples: int, temperature: float, label: str
) -> list[Wanted]:
    """One group per held-out task. ``label`` tells evaluations of the same step apart."""
    return [
        Wanted(Group(f"e{step:05d}-{label}-g{place:03d}", step, task.task_id, Split.EVAL), task, samples, temperature)
        for place, task in enumerate(tasks)
    ]
