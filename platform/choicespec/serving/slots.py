"""A replica's slots: blocking streams in threads, at most so many at a time; further ones wait their turn."""

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Generic, TypeVar

Item = TypeVar("Item")
_REMEMBERED = 0.8  # of the mean time that a stream holds its slot, a stream


class Busy(Exception):
    """As many wait as may; carries the seconds after which a slot is likely."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(waiting, retry_after_s)
        self.waiting, self.retry_after_s = waiting, retry_after_s


class _Ended:
    """The end of a stream: its error, or None."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


class Slots(Generic[Item]):
    """Used from one event loop.

    Args:
        number: streams at a time.
        most_waiting: streams that may wait for a slot.
    """

    def __init__(self, number: int, most_waiting: int) -> None:
        self._number, self._most_waiting = number, most_waiting
        self._free = asyncio.Semaphore(number)
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="slot")
        self._held_s = 1.0
        self.waiting = 0

    async def stream(
        self, open_stream: Callable[[], Generator[Item, None, None]], until_s: float
    ) -> AsyncGenerator[Item, None]:
        """The items of a stream that is opened, run and closed in a thread as soon as a slot is free.

        Whoever stops reading closes the stream after the item that is being made; the slot is free once it is closed.

        Args:
            open_stream: makes the stream.
            until_s: on the monotonic clock.

        Raises:
            Busy: at once, where too many wait.
            TimeoutError: neither slot nor item came in time.
        """
        if self._free.locked() and self.waiting >= self._most_waiting:
            raise Busy(self.waiting, math.ceil(self._held_s * (self.waiting + 1) / self._number))
        self.waiting += 1
        try:
            async with asyncio.timeout(until_s - monotonic()):
                await self._free.acquire()
        finally:
            self.waiting -= 1
        loop, items, left = asyncio.get_running_loop(), asyncio.Queue[Item | _Ended](), threading.Event()

        def post(item: Item | _Ended) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        give_back = partial(loop.call_soon_threadsafe, self._give_back, monotonic())
        self._threads.submit(_run, open_stream, post, left, give_back)
        try:
            while True:
                async with asyncio.timeout(until_s - monotonic()):
                    item = await items.get()
                if not isinstance(item, _Ended):
                    yield item
                elif item.error is not None:
                    raise item.error
                else:
                    return
        finally:
            left.set()

    async def alone(self, change: Callable[[], None]) -> None:
        """Make a change while no stream is open; streams that come meanwhile wait, and none is refused for it."""
        held = 0
        try:
            while held < self._number:
                await self._free.acquire()
                held += 1
            await asyncio.get_running_loop().run_in_executor(self._threads, change)
        finally:
            for _ in range(held):
                self._free.release()

    def _give_back(self, started_s: float) -> None:
        self._held_s = _REMEMBERED * self._held_s + (1 - _REMEMBERED) * (monotonic() - started_s)
        self._free.release()


def _run(
    open_stream: Callable[[], Generator[Item, None, None]],
    post: Callable[[Item | _Ended], None],
    left: threading.Event,
    give_back: Callable[[], object],
) -> None:
    error: Exception | None = None
    try:
        stream = open_stream()
        try:
            for item in stream:
                post(item)
                if left.is_set():
                    break
        finally:
            stream.close()
    except Exception as raised:  # belongs to whoever reads the stream
        error = raised
    give_back()  # before the end is told: who comes next must find the slot free
    post(_Ended(error))
