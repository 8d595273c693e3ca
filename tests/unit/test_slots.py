"""Slots: who decodes, who waits, who is told to come back. Threads are held by events, never by time."""

import asyncio
import threading
from collections.abc import Coroutine, Generator
from contextlib import aclosing
from time import monotonic
from typing import Any

import pytest
from choicespec.serving.slots import Busy, Slots

_FOREVER_S = 60.0


class _Held:
    """Streams of numbers that go on only when they are let."""

    def __init__(self) -> None:
        self.let, self.closed, self.finished = threading.Event(), threading.Event(), 0

    def open(self) -> Generator[int, None, None]:
        try:
            yield 0
            assert self.let.wait(_FOREVER_S)
            yield 1
            self.finished += 1
        finally:
            self.closed.set()


async def _read(slots: Slots[int], held: _Held) -> list[int]:
    async with aclosing(slots.stream(held.open, monotonic() + _FOREVER_S)) as items:
        return [item async for item in items]


def _run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, _FOREVER_S))


def test_one_more_than_may_wait_is_told_to_come_back() -> None:
    """Fails if a queue grows without bound, or if a slot that is free refuses."""

    async def main() -> None:
        slots, held = Slots[int](1, 1), _Held()
        first = slots.stream(held.open, monotonic() + _FOREVER_S)
        assert await anext(first) == 0
        second = asyncio.create_task(_read(slots, held))
        while not slots.waiting:
            await asyncio.sleep(0)
        with pytest.raises(Busy) as busy:
            await _read(slots, held)
        assert (busy.value.waiting, busy.value.retry_after_s) == (1, 2)
        held.let.set()
        assert [item async for item in first] == [1]
        assert await second == [0, 1]
        assert await _read(slots, held) == [0, 1]

    _run(main())


def test_who_stops_reading_frees_the_slot() -> None:
    """Fails if a client that went away holds the target until its answer would have ended."""

    async def main() -> None:
        slots, left, other = Slots[int](1, 4), _Held(), _Held()
        other.let.set()
        async with aclosing(slots.stream(left.open, monotonic() + _FOREVER_S)) as items:
            assert await anext(items) == 0
        left.let.set()
        assert await _read(slots, other) == [0, 1]
        assert left.closed.is_set()
        assert left.finished == 0

    _run(main())


def test_who_stops_waiting_leaves_the_queue() -> None:
    """Fails if a cancelled wait takes a place in the queue, or the slot, with it."""

    async def main() -> None:
        slots, held = Slots[int](1, 1), _Held()
        first = slots.stream(held.open, monotonic() + _FOREVER_S)
        assert await anext(first) == 0
        waiting = asyncio.create_task(_read(slots, held))
        while not slots.waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert slots.waiting == 0
        held.let.set()
        assert [item async for item in first] == [1]
        assert await _read(slots, held) == [0, 1]

    _run(main())


def test_an_answer_that_is_late_ends() -> None:
    """Fails if a stream that hangs keeps its client for ever."""

    async def main() -> None:
        slots, held = Slots[int](1, 1), _Held()
        with pytest.raises(TimeoutError):
            async for _ in slots.stream(held.open, monotonic() + 0.01):
                pass
        held.let.set()
        assert await _read(slots, held) == [0, 1]

    _run(main())


def test_a_change_waits_for_open_streams_and_drops_none() -> None:
    """Fails if a method is exchanged under a decode, or if requests are refused for it."""

    async def main() -> None:
        slots, held, seen = Slots[int](2, 4), _Held(), list[int]()
        first = slots.stream(held.open, monotonic() + _FOREVER_S)
        assert await anext(first) == 0
        change = asyncio.create_task(slots.alone(lambda: seen.append(held.finished)))
        await asyncio.sleep(0)
        later = asyncio.create_task(_read(slots, held))
        held.let.set()
        assert [item async for item in first] == [1]
        await change
        assert seen == [1]
        assert await later == [0, 1]

    _run(main())


def test_a_stream_that_fails_gives_its_slot_back() -> None:
    """Fails if an error is swallowed, or costs the slot."""

    def broken() -> Generator[int, None, None]:
        yield 0
        raise ValueError("planted")

    async def main() -> None:
        slots, held = Slots[int](1, 0), _Held()
        held.let.set()
        with pytest.raises(ValueError, match="planted"):
            async for _ in slots.stream(broken, monotonic() + _FOREVER_S):
                pass
        with pytest.raises(RuntimeError, match="planted"):
            await slots.alone(_fail)
        assert await _read(slots, held) == [0, 1]

    _run(main())


def _fail() -> None:
    raise RuntimeError("planted")
