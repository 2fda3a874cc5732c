"""Waiting in an event loop for what a thread brings: one wake-up, and no thread that waits.

The core imports this file, so it imports no event loop before one runs.
"""

from __future__ import annotations

import sys
from _queue import Empty, SimpleQueue
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["LoopCall", "ReadyQueue", "is_trio", "loop_call", "wait_ready"]

T = TypeVar("T")

LoopCall = Callable[[Callable[[], object]], object]


def loop_call() -> LoopCall:
    """A function that runs another one soon in the event loop of the calling task, from any thread.

    Raises:
        RuntimeError: Of the function, when the loop has ended.
    """
    if is_trio():
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon
    import asyncio

    return asyncio.get_running_loop().call_soon_threadsafe


def is_trio() -> bool:
    """Whether the calling task is one of trio's; otherwise it is one of asyncio's."""
    sniffio: Any = sys.modules.get("sniffio")  # trio imports it
    return sniffio is not None and sniffio.current_async_library() == "trio"


class ReadyQueue(SimpleQueue[T]):
    """A queue from threads to a thread or to an event loop; in the latter nobody blocks in ``get``."""

    def __init__(self) -> None:
        self._wakers: list[Callable[[], object]] = []

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:  # noqa: FBT001, FBT002 - as the base
        """Also wakes the tasks that wait."""
        super().put(item, block, timeout)
        # After the item is in: a task adds its waker first and looks into the queue then, so one of the two sees it.
        for wake in tuple(self._wakers):
            wake()

    def poll(self) -> T | None:
        """An item, None if there is none."""
        try:
            return self.get_nowait()
        except Empty:
            return None


async def wait_ready(queue: ReadyQueue[Any]) -> None:
    """Until there may be something in ``queue``; it is left there, so that a cancelled task loses nothing."""
    import anyio

    event = anyio.Event()
    call = loop_call()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended, and the task with it
            call(event.set)

    queue._wakers.append(wake)  # noqa: SLF001 - the other half of the class
    try:
        if queue.empty():
            await event.wait()
    finally:
        queue._wakers.remove(wake)  # noqa: SLF001
