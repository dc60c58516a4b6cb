"""Who may sample, when, and how much: the gate, the caps of a rollout, the bounded queue.

While the gate is closed nothing is refused and nothing is sampled. Every wait here has a deadline.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from longrein.config import GatewaySection
from longrein.errors import CapExceeded, DeadlineExceeded, Overloaded
from longrein.waits import waiting

HOLD_S = 3600.0
"""Longest time a call waits for the gate."""

CUT_S = 60.0
"""Longest time until a call that is cut has left the engine."""

RETRY_AFTER_S = 2.0


class Passage:
    """A call in flight.

    Attributes:
        is_cut: whether it must stop at the token it has reached, and come back when the gate is open again.
        when_cut: called when that is so.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.since = time.monotonic()
        self.is_cut = False
        self.when_cut: Callable[[], None] = lambda: None

    def cut(self) -> None:
        self.is_cut = True
        self.when_cut()


class Gate:
    """Holds new calls while the policy changes; those in flight end first, or are cut at a token."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside: set[Passage] = set()

    async def pause(self, drain_s: float) -> int:
        """Close the gate and wait until no call is in flight; how many were cut because they took over ``drain_s``.

        Raises:
            DeadlineExceeded: names the calls that could not be cut; the gate is open again then.
        """
        self._open.clear()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), drain_s)
            late = tuple(self._inside)
            for passage in late:
                passage.cut()
            await asyncio.wait_for(self._empty.wait(), CUT_S)
            return len(late)
        except TimeoutError:
            now = time.monotonic()
            names = ", ".join(f"{passage.name} ({now - passage.since:.0f} s)" for passage in self._inside)
            self._open.set()
            raise DeadlineExceeded(
                f"Waited {drain_s:g} s (gateway.drain_s) for model calls in flight and {CUT_S:g} s more for the engine "
                f"to stop them; still running: {names}."
            ) from None
        except BaseException:
            self._open.set()
            raise

    def resume(self) -> None:
        self._open.set()

    @asynccontextmanager
    async def passing(self, name: str) -> AsyncIterator[Passage]:
        """Wait for the gate, then count as in flight.

        Raises:
            DeadlineExceeded: the gate stayed closed for too long.
        """
        async with waiting(f"the gate, by {name}", HOLD_S):
            # The gate may have closed again before a waiting call gets to run.
            while not self._open.is_set():
                await self._open.wait()
        passage = Passage(name)
        self._inside.add(passage)
        self._empty.clear()
        try:
            yield passage
        finally:
            self._inside.remove(passage)
            if not self._inside:
                self._empty.set()


class Queue:
    """All rollouts' calls that wait or run."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0

    def enter(self) -> None:
        """Raises:
        Overloaded: as many calls as ``gateway.queue`` allows are here already.
        """
        if self._size >= self._limit:
            raise Overloaded(
                f"{self._size} model calls wait or run, as many as gateway.queue allows. Try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._size += 1

    def leave(self) -> None:
        self._size -= 1


class Allowance:
    """What one rollout may use.

    Attributes:
        calls: calls admitted.
        tokens: tokens sampled by calls that have ended.
        hit: the first cap that refused a call, in words; empty if none did.
    """

    def __init__(self, limits: GatewaySection) -> None:
        self._limits = limits
        self._running = 0
        self._reserved = 0
        self._counts = 0
        self.calls = 0
        self.tokens = 0
        self.hit = ""

    def take(self, wanted: int) -> int:
        """Begin a call of at most ``wanted`` tokens; the number it may sample.

        Raises:
            CapExceeded: names the cap and its configuration key; no retry can succeed.
            Overloaded: as many calls as may run at once do.
        """
        if self.calls >= self._limits.max_calls:
            self._refuse(f"{self.calls} model calls", "gateway.max_calls")
        if self.tokens >= self._limits.max_tokens:
            self._refuse(f"{self.tokens} sampled tokens", "gateway.max_tokens")
        left = self._limits.max_tokens - self.tokens - self._reserved
        if left <= 0:
            raise Overloaded(
                f"The {self._running} model calls of this rollout that run may sample all that gateway.max_tokens "
                "leaves. Try again when one has ended.",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._running >= self._limits.max_concurrent_calls:
            raise Overloaded(
                f"{self._running} model calls of this rollout run, as many as gateway.max_concurrent_calls allows. Try "
                "again when one has ended.",
                retry_after_s=RETRY_AFTER_S,
            )
        granted = min(wanted, left)
        self.calls += 1
        self._running += 1
        self._reserved += granted
        return granted

    def take_count(self) -> None:
        """Count the tokens of a prompt, which costs as much as to begin a call.

        Raises:
            CapExceeded: as many were counted as calls may be made.
        """
        if self._counts >= self._limits.max_calls:
            raise CapExceeded(
                f"This rollout has counted tokens {self._counts} times, as often as gateway.max_calls allows."
            )
        self._counts += 1

    def give_back(self, granted: int, sampled: int) -> None:
        """End a call that was granted so many tokens and sampled so many."""
        self._running -= 1
        self._reserved -= granted
        self.tokens += sampled

    def _refuse(self, used: str, key: str) -> None:
        self.hit = self.hit or f"{used} ({key})"
        raise CapExceeded(f"This rollout has used {used}, as many as {key} allows. A retry cannot succeed.")
