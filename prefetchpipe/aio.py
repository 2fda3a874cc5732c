"""The asynchronous twin: the same core, awaited instead of waited for. asyncio and trio, through anyio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
from torch.utils.data import DataLoader

from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.pipeline import torchloader
from prefetchpipe.pipeline.asyncsource import AsyncSource, start_async_source
from prefetchpipe.pipeline.leaving import LEAVE_SECONDS
from prefetchpipe.pipeline.producer import Producer
from prefetchpipe.pipeline.ticket import Ticket
from prefetchpipe.prefetcher import GPUPrefetcher, _Pass

if TYPE_CHECKING:
    from typing import Self

__all__ = ["AsyncPass", "close_prefetcher", "off_loop", "sole_error"]

T = TypeVar("T")


async def off_loop(function: Callable[[], T]) -> T:
    """Once or twice a pass: what may block for a moment, in a thread; a cancellation waits for its end."""
    with anyio.CancelScope(shield=True) as scope:  # or a cancelled task would not even begin
        result = await anyio.to_thread.run_sync(function)
    assert not scope.cancelled_caught
    return result


def sole_error(ticket: Ticket) -> BaseException:
    """The error of a ticket, to be raised where a ``StopAsyncIteration`` would mean the end."""
    error, ticket.error = ticket.error, None
    assert error is not None
    if isinstance(error, StopAsyncIteration):  # no end of the loader's: that one never gets here
        reason = RuntimeError(f"StopAsyncIteration was raised outside of the loader: {error!r}")
        reason.__cause__ = error
        return reason
    return error


class AsyncPass(AsyncIterator[Any]):
    """The iterator of one pass under ``async for``. When it goes, its producer is stopped.

    Safe to cancel: a ticket is taken out of the queue behind the last ``await`` of ``__anext__``.
    """

    def __init__(self, prefetcher: GPUPrefetcher) -> None:
        self._prefetcher = prefetcher
        self._shared = prefetcher._shared  # noqa: SLF001 - the same class in two files
        self._inner: _Pass | None = None
        self._producer: Producer | None = None
        self._source: AsyncSource | None = None
        self._final: Ticket | None = None
        self._runs = False
        self._is_over = False
        self._is_closed = False
        self._starting = anyio.Lock()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        # Also the checkpoint of a batch that is ready: other tasks have their turn, and a cancellation is seen.
        await anyio.lowlevel.checkpoint()
        if not self._runs:
            await self._start()
        producer, inner = self._producer, self._inner
        if self._is_closed:
            raise IteratorClosedError("this iterator was closed; aiter(prefetcher) starts a new pass")
        if self._is_over or producer is None or inner is None:
            raise StopAsyncIteration
        device = self._shared.device
        stream = producer.transfer.consumer_stream = device.current_stream()
        inner._enter(stream)  # noqa: SLF001 - as above
        if self._final is None:
            ticket = await self._take(producer)
            stream = device.current_stream()
            done = producer.mark_done(stream)  # contract 4: everything about the batch before this one is behind it
            if not ticket.final:
                return inner._hand_out(producer, ticket, stream, done)  # noqa: SLF001 - as above
            self._final = ticket
        return await self._end(producer, inner, self._final)

    async def _take(self, producer: Producer) -> Ticket:
        if self._source is None and self._shared.options.fetch == "caller":
            return producer.take(self._shared.device.current_stream())
        return await producer.take_soon()

    async def _start(self) -> None:
        async with self._starting:
            if self._runs or self._is_closed:
                return
            if self._producer is None:
                await self._wait_for_older()
                self._source = self._start_source()
                producer = self._producer = self._prefetcher._start_pass(self._source)  # noqa: SLF001 - as above
                if self._source is not None:
                    producer.on_leave = self._source.leave
                static = self._prefetcher._static  # noqa: SLF001 - as above
                self._inner = _Pass(self._prefetcher, producer, static, leave=producer.detach_soon)
            producer = self._producer
            if producer.is_following:
                await producer.follow_soon()
            asked_for_caller = self._source is None and self._shared.options.fetch == "caller"
            if not asked_for_caller and not producer.start_thread(blocking=False):
                await off_loop(lambda: producer.start_thread(blocking=True))
            self._runs = True

    async def _wait_for_older(self) -> None:
        """Passes that were left give back in threads of their own; what they put back must not come after we start."""
        for older in list(self._prefetcher._passes):  # noqa: SLF001 - as above
            if older.is_stopping:
                with anyio.move_on_after(LEAVE_SECONDS):  # its loader may not come back
                    await older.gone_soon()
        loader = self._shared.loader
        if isinstance(loader, DataLoader) and loader.persistent_workers:
            await off_loop(lambda: torchloader.prepare(loader))

    def _start_source(self) -> AsyncSource | None:
        """Asynchronous iterables in this loop; all others as in the sync form."""
        shared = self._shared
        if not hasattr(type(shared.loader), "__aiter__"):
            return None
        source = start_async_source(shared.loader, shared.async_source)
        if not source.own:
            shared.async_source = source
        return source

    async def _end(self, producer: Producer, inner: _Pass, ticket: Ticket) -> Any:
        error = ticket.error
        # Joins the thread, may shut workers down: not in the loop. Cancelled here, the next call ends the pass.
        await off_loop(producer.finish if error is None else producer.fail)
        self._is_over = True
        self._final = ticket.error = None
        inner._producer = None  # noqa: SLF001 - as above
        if error is None:
            inner._note_state(producer, ticket)  # noqa: SLF001 - as above
            raise StopAsyncIteration
        ticket.error = error
        del error  # the traceback refers to this frame
        raise sole_error(ticket)

    async def aclose(self) -> None:
        """End this pass; advancing it afterwards raises :class:`~prefetchpipe.errors.IteratorClosedError`."""
        self._is_closed = True
        inner, producer = self._inner, self._producer
        if inner is None or producer is None:
            return
        if inner._finalizer.detach() is not None:  # noqa: SLF001 - as above
            await off_loop(producer.detach)
        await _wait_for(self._source)


async def _wait_for(source: AsyncSource | None) -> None:
    """For the task of a source that ends with its pass. Not shielded: the source may clean up for long."""
    if source is not None and source.own:
        await source.wait_ended()


async def close_prefetcher(prefetcher: GPUPrefetcher) -> None:
    """See :meth:`prefetchpipe.GPUPrefetcher.aclose`."""
    producers = list(prefetcher._passes)  # noqa: SLF001 - as above
    sources = [p.source for p in producers if isinstance(p.source, AsyncSource)]
    kept = prefetcher._shared.async_source  # noqa: SLF001 - as above
    await off_loop(prefetcher.close)
    if kept is not None:
        sources.append(kept)
    for source in sources:
        await source.wait_ended()
