"""An asynchronous source, seen from the thread that packs its batches."""

from __future__ import annotations

import contextvars
import inspect
from _queue import Empty, SimpleQueue
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

from prefetchpipe.device.base import Device, Stream
from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.pipeline.waking import LoopCall, is_trio, loop_call

__all__ = ["AsyncSource", "SourceLeftError", "SourceWaitsError", "start_async_source"]

_WAKE = object()
_LOOP_ENDED = "the event loop of this source has ended"


class SourceLeftError(IteratorClosedError):
    """Brings our thread back out of a source when its pass is left; nobody hears of it."""


class SourceWaitsError(Exception):
    """Nothing came within the patience of our thread. What was asked for stays asked for; nobody else hears of it."""


class _Outcome:
    """What one pull came to: a batch, an error, or the end."""

    __slots__ = ("batch", "error", "is_end")

    def __init__(self, batch: Any = None, error: BaseException | None = None, *, is_end: bool = False) -> None:
        self.batch = batch
        self.error = error
        self.is_end = is_end


class AsyncSource(Iterator[Any]):
    """``next`` in a thread of ours is one pull by one task in the consumer's event loop.

    The coroutines of the source run where its connections belong, all in the same task: cancel scopes and task groups
    that it holds open between two batches stay sound. That task is nobody's child: a timeout or a cancellation around
    the consumer's ``await`` does not reach into the source, whose next batch would be lost with it. The task ends, and
    closes the source, when that is closed; with the pass, if the iterator was made for it; and with the loop.

    Nothing is pulled before the thread asks, which it does when it has packed the batch before (contracts 5 and 8).

    Args:
        iterator: What is pulled.
        own: Whether it was made for this pass, and ends with it. Otherwise it is the user's object, and what it gives
            after the pass was left is for the next pass. An asynchronous generator of the user's is closed with the
            prefetcher: by this task, since no other may leave the scopes that it holds open.
        device: Whose current stream is noted behind each pull; None: no matter.

    Attributes:
        stream: The stream that was current when the source handed out its last batch.
        patience: Seconds that ``next`` waits before it raises :class:`SourceWaitsError`; None: for ever.
    """

    def __init__(self, iterator: AsyncIterator[Any], *, own: bool, device: Device | None) -> None:
        self.iterator: AsyncIterator[Any] | None = iterator
        self.own = own
        self.close_error: BaseException | None = None
        self.stream: Stream = None
        self.patience: float | None = None
        self._device = device
        self._outcomes: SimpleQueue[Any] = SimpleQueue()
        self._is_asked = False  # a pull was asked for, and its outcome not taken yet
        self._is_left = False
        self._is_unanswered = False  # the same, as the loop's thread sees it
        self._is_ending = False
        self._is_cancelled = False  # by us, in asyncio's own way
        self._is_done = False  # it has given its last batch, or raised
        self._task_runs = False
        self._is_trios = False
        self._task: Any = None  # asyncio holds its tasks weakly
        self._call: LoopCall | None = None
        self._scope: Any = None  # of anyio, as are these events; this file is imported where no loop will ever run
        self._wanted: Any = None
        self._ended: Any = None

    # The thread's side

    def __next__(self) -> Any:
        if not self._is_asked:
            if self._is_left:
                raise SourceLeftError("this pass has ended")
            self._is_asked = True
            self._in_loop(self._ask)
        while (outcome := self._next_outcome()) is _WAKE:
            if self._is_left:
                raise SourceLeftError("this pass has ended")
        self._is_asked = False
        if outcome.is_end:
            raise StopIteration
        if outcome.error is not None:
            try:
                raise outcome.error
            finally:
                outcome.error = None
        return outcome.batch

    def _next_outcome(self) -> Any:
        try:
            return self._outcomes.get(timeout=self.patience)
        except Empty:
            raise SourceWaitsError from None

    def leave(self) -> None:
        """The pass was left; from any thread, also from the collector."""
        self._is_left = True
        self._outcomes.put(_WAKE)
        if self.own:
            self.cancel()

    def cancel(self) -> None:
        """There will be no other pass."""
        self._is_left = True
        self._outcomes.put(_WAKE)
        with suppress(RuntimeError):
            self._in_loop(self._end)

    def _in_loop(self, function: Callable[[], object]) -> None:
        call = self._call
        assert call is not None
        try:
            call(function)
        except RuntimeError as error:
            raise IteratorClosedError(_LOOP_ENDED) from error

    # The loop's side

    def start(self) -> None:
        """Start the task, in the loop that is running; or go on with the one of the pass before."""
        self._is_left = False
        if self._task_runs and not self._is_ending:
            return
        self._is_ending = self._is_done = self._is_cancelled = False
        self._task_runs = True
        self._call = loop_call()
        import anyio

        self._scope, self._wanted, self._ended = anyio.CancelScope(), anyio.Event(), anyio.Event()
        context = contextvars.copy_context()
        self._is_trios = is_trio()
        if self._is_trios:
            import trio

            self._task = trio.lowlevel.spawn_system_task(self._run, name="prefetchpipe-source", context=context)
        else:
            import asyncio

            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(), name="prefetchpipe-source", context=context)

    async def wait_ended(self) -> None:
        """Until the task has ended and the iterator, if it is ours, is closed."""
        await self._ended.wait()
        error, self.close_error = self.close_error, None
        if error is not None:
            raise error

    def _ask(self) -> None:
        self._is_unanswered = True
        if self._task_runs:
            self._wanted.set()
        else:
            self._answer(_Outcome(error=IteratorClosedError(_LOOP_ENDED)))

    def _end(self) -> None:
        if self._is_ending:
            return  # a second cancellation would interrupt the source's cleaning up
        self._is_ending = True
        if not self._is_unanswered:
            self._wanted.set()
        elif self._is_trios:
            self._scope.cancel()
        elif self._task_runs:
            # Once, as asyncio's users know it: a scope would cancel each `await` of the source's `finally` too.
            self._is_cancelled = True
            self._task.cancel()

    def _answer(self, outcome: _Outcome) -> None:
        self._is_unanswered = False
        self._outcomes.put(outcome)

    async def _run(self) -> None:
        """The task. Raises nothing but the cancellation by its loop."""
        import anyio

        try:
            with self._scope:
                try:
                    while not self._is_ending and not self._is_done:
                        await self._pull()
                except anyio.get_cancelled_exc_class():
                    if not self._is_cancelled or self._task.cancelling() > 1:
                        raise
                finally:
                    if self._is_cancelled:
                        self._task.uncancel()
                    # Inside of the scope and outside of any other: the source may hold open some of its own.
                    await self._close_iterator()
        finally:
            self._task_runs = False
            if self._is_unanswered and self._is_left:
                self._is_unanswered = self._is_asked = False  # given up: a later pass asks again
            elif self._is_unanswered:  # the loop ends while our thread waits
                self._answer(_Outcome(error=IteratorClosedError(_LOOP_ENDED)))
            self._ended.set()

    async def _pull(self) -> None:
        import anyio

        await self._wanted.wait()
        self._wanted = anyio.Event()
        if not self._is_unanswered:
            return
        assert self.iterator is not None
        try:
            outcome = _Outcome(await self.iterator.__anext__())
            if self._device is not None:
                self.stream = self._device.current_stream()
        except StopAsyncIteration:
            outcome = _Outcome(is_end=True)
        except BaseException as error:
            if _is_cancellation_of_this_task(error):
                raise
            if self._scope.cancel_called or self._is_cancelled:
                return  # what its cleaning up raised has nobody to hear of it
            if isinstance(error, StopIteration):  # no end of ours
                reason = RuntimeError("StopIteration was raised by an asynchronous source")
                reason.__cause__ = error
                error = reason
            outcome = _Outcome(error=error)
        self._is_done = outcome.is_end or outcome.error is not None
        self._answer(outcome)

    async def _close_iterator(self) -> None:
        iterator = self.iterator
        if self._is_done or not (self.own or inspect.isasyncgen(iterator)):
            return
        close = getattr(iterator, "aclose", None)
        if close is not None:
            try:
                await close()
            except BaseException as error:
                if _is_cancellation_of_this_task(error):
                    raise
                if not (isinstance(error, BaseExceptionGroup) and error.split(GeneratorExit)[1] is None):
                    self.close_error = error  # for whoever waits for the end of the pass


def _is_cancellation_of_this_task(error: BaseException) -> bool:
    """Whether our scope or the loop cancels our task; a source may raise the same class by itself."""
    import asyncio

    import anyio

    if not isinstance(error, anyio.get_cancelled_exc_class()):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return True  # trio: nobody but the loop can raise it
    return task is None or task.cancelling() > 0


def start_async_source(loader: Any, kept: AsyncSource | None, device: Device | None = None) -> AsyncSource:
    """``aiter(loader)``, in the loop's thread, behind an :class:`AsyncSource` whose task runs.

    Args:
        loader: An asynchronous iterable.
        kept: The source of an earlier pass over the same loader, if that was the user's own iterator.
        device: See :class:`AsyncSource`.
    """
    iterator = aiter(loader)
    if iterator is loader and kept is not None:
        source = kept
    else:
        source = AsyncSource(iterator, own=iterator is not loader, device=device)
    source.start()
    return source
