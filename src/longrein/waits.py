"""Who waits for what, for how long, and until when.

Whatever waits for something outside the process's own code says so here. ``report`` tells it on request; ``Watch``
tells it by itself when something takes long, and shows where the process stands when its event loop does not turn.
"""

import asyncio
import faulthandler
import itertools
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from longrein.errors import DeadlineExceeded

LONG_S = 120.0
"""A wait is told of by itself when it has lasted so long and half of its deadline, or five times so long where it has
none; and each time that has doubled."""

STUCK_S = 30.0
"""An event loop that has not turned for so long is told of."""


@dataclass(slots=True)
class Wait:
    """One wait.

    Attributes:
        what: for what, and who waits.
        deadline_s: after which it ends, in seconds from ``since``; None where something else ends it.
        since: of the monotonic clock.
        told_s: how long it had lasted when it was last told of by itself.
    """

    what: str
    deadline_s: float | None
    since: float
    told_s: float = 0.0

    @property
    def lasted_s(self) -> float:
        return time.monotonic() - self.since

    @property
    def is_long(self) -> bool:
        """Whether it is to be told of, anew if it was before."""
        least = 5 * LONG_S if self.deadline_s is None else max(LONG_S, self.deadline_s / 2)
        return self.lasted_s >= max(least, 2 * self.told_s)

    def __str__(self) -> str:
        most = "" if self.deadline_s is None else f" of {self.deadline_s:g}"
        return f"{self.lasted_s:.0f} s{most} for {self.what}"


_numbers = itertools.count()
_waits: dict[int, Wait] = {}


@asynccontextmanager
async def waiting(what: str, deadline_s: float | None, key: str = "") -> AsyncIterator[None]:
    """Say that this task waits for ``what``, and end the wait at its deadline.

    Args:
        key: the configuration key that sets the deadline, for the message.

    Raises:
        DeadlineExceeded: what is inside took longer.
    """
    number = next(_numbers)
    _waits[number] = Wait(what, deadline_s, time.monotonic())
    try:
        async with asyncio.timeout(deadline_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        setting = f" ({key})" if key else ""
        raise DeadlineExceeded(f"Waited {deadline_s:g} s{setting} for {what}.") from None
    finally:
        del _waits[number]


def report() -> list[str]:
    """A line for each wait, the longest first."""
    return [str(wait) for wait in sorted(_waits.values(), key=lambda wait: wait.since)]


def stacks() -> str:
    """Where every task of the running event loop stands."""
    lines = []
    for task in asyncio.all_tasks():
        lines.append(f"task {task.get_name()}: {task.get_coro()}")
        for frame in task.get_stack():
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
    return "\n".join(lines)


class Watch:
    """Tells of long waits and of a loop that is stuck, and of everything on SIGUSR1, for as long as it is entered.

    Args:
        say: takes a line for people.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._over = threading.Event()
        self._beats = itertools.count()
        self._beat = 0
        self._thread = threading.Thread(target=self._listen, name="longrein-watch", daemon=True)
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGUSR1, self._tell_all)
            # Beside it, for a loop that no longer gets to run handlers.
            faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
        self._watching = asyncio.create_task(self._watch(), name="longrein-watch")
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        assert self._watching is not None
        self._watching.cancel()
        if threading.current_thread() is threading.main_thread():
            faulthandler.unregister(signal.SIGUSR1)
            asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

    def _tell_all(self) -> None:
        waits = report()
        self._say("\n".join([f"{len(waits)} waits:", *waits, stacks()]))

    async def _watch(self) -> None:
        while True:
            self._beat = next(self._beats)
            for wait in list(_waits.values()):
                if wait.is_long:
                    wait.told_s = wait.lasted_s
                    self._say(f"waiting: {wait}")
            await asyncio.sleep(1.0)

    def _listen(self) -> None:
        """On a thread of its own: tell when the loop does not turn."""
        seen, told = self._beat, False
        while not self._over.wait(STUCK_S):
            if self._beat == seen and not told:
                print(f"longrein: the event loop has not turned for {STUCK_S:g} s:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
            told = self._beat == seen
            seen = self._beat
