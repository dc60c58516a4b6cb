"""The gate holds and drains, caps refuse, the queue is bounded."""

import asyncio

import pytest

from longrein.calls.admission import Allowance, Gate, Queue
from longrein.config import GatewaySection
from longrein.errors import CapExceeded, DeadlineExceeded, Overloaded


async def test_a_closed_gate_holds_and_an_open_one_lets_through() -> None:
    gate = Gate()
    await gate.pause(1)
    passed: list[int] = []

    async def call(i: int) -> None:
        async with gate.passing(f"call {i}"):
            passed.append(i)

    calls = [asyncio.create_task(call(i)) for i in range(3)]
    await asyncio.sleep(0.02)
    assert passed == []
    gate.resume()
    await asyncio.gather(*calls)
    assert passed == [0, 1, 2]


async def test_pause_waits_for_what_is_in_flight() -> None:
    gate = Gate()
    leave = asyncio.Event()

    async def call() -> None:
        async with gate.passing("call"):
            await leave.wait()

    running = asyncio.create_task(call())
    await asyncio.sleep(0)
    pausing = asyncio.create_task(gate.pause(5))
    await asyncio.sleep(0.02)
    assert not pausing.done()
    leave.set()
    await pausing
    await running


async def test_what_takes_longer_is_cut() -> None:
    gate = Gate()
    parts = []

    async def call() -> None:
        for part in range(2):
            async with gate.passing("r7 call 3") as passage:
                stopped = asyncio.Event()
                passage.when_cut = stopped.set
                parts.append(part)
                if not part:
                    await stopped.wait()

    running = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert await gate.pause(0.02) == 1
    assert parts == [0] and not running.done()
    gate.resume()
    await running
    assert parts == [0, 1] and await gate.pause(1) == 0


async def test_pause_in_vain_names_what_runs_and_opens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.calls.admission.CUT_S", 0.02)
    gate = Gate()
    leave = asyncio.Event()

    async def call() -> None:
        async with gate.passing("r7 call 3"):
            await leave.wait()

    running = asyncio.create_task(call())
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded, match=r"gateway\.drain_s.*r7 call 3"):
        await gate.pause(0.02)
    leave.set()
    await running
    async with asyncio.timeout(1), gate.passing("next"):
        pass


async def test_a_gate_that_closes_again_at_once_lets_nobody_slip_through() -> None:
    gate = Gate()
    await gate.pause(1)
    passed = []

    async def call() -> None:
        async with gate.passing("call"):
            passed.append(True)

    waiting = asyncio.create_task(call())
    await asyncio.sleep(0.01)
    gate.resume()
    await gate.pause(1)
    await asyncio.sleep(0.01)
    assert passed == []
    gate.resume()
    await waiting


def test_caps_name_their_keys() -> None:
    limits = GatewaySection(max_calls=3, max_tokens=10, max_concurrent_calls=2)
    allowance = Allowance(limits)
    assert allowance.take(4) == 4
    assert allowance.take(100) == 6
    # What runs may leave some of what it was granted: a retry can succeed.
    with pytest.raises(Overloaded, match=r"gateway\.max_tokens"):
        allowance.take(1)
    assert not allowance.hit
    allowance.give_back(6, 1)
    assert allowance.take(100) == 5
    with pytest.raises(CapExceeded, match=r"gateway\.max_calls"):
        allowance.take(1)
    assert "gateway.max_calls" in allowance.hit
    spent = Allowance(limits)
    spent.give_back(spent.take(10), 10)
    with pytest.raises(CapExceeded, match=r"gateway\.max_tokens"):
        spent.take(1)
    assert "gateway.max_tokens" in spent.hit
    busy = Allowance(limits)
    busy.take(1)
    busy.take(1)
    with pytest.raises(Overloaded, match=r"gateway\.max_concurrent_calls") as caught:
        busy.take(1)
    assert caught.value.retry_after_s is not None
    assert not busy.hit


def test_the_queue_is_bounded() -> None:
    queue = Queue(1)
    queue.enter()
    with pytest.raises(Overloaded) as caught:
        queue.enter()
    assert caught.value.retry_after_s is not None
    queue.leave()
    queue.enter()
