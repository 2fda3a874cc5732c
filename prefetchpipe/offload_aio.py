"""``async for out in HostPrefetcher(batches)``."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator
from typing import Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread

from prefetchpipe.aio import off_loop, sole_error
from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.offload import HostPrefetcher
from prefetchpipe.pipeline.asyncsource import AsyncSource, start_async_source
from prefetchpipe.pipeline.relay import Relay
from prefetchpipe.pipeline.threadstate import ThreadState
from prefetchpipe.pipeline.waking import wait_ready

__all__ = ["AsyncHostPass", "close_host_prefetcher"]


class AsyncHostPass(AsyncIterator[Any]):
    """The iterator of one pass. When it goes, its thread ends.

    Safe to cancel: what was asked for stays asked for, and the next call takes it.
    """

    def __init__(self, prefetcher: HostPrefetcher) -> None:
        self._prefetcher = prefetcher
        self._shared = prefetcher._shared  # noqa: SLF001 - the same class in two files
        self._relay: Relay | None = None
        self._source: AsyncSource | None = None
        self._is_asked = False
        self._is_over = False
        self._is_closed = False
        self._turn = anyio.Lock()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        await anyio.lowlevel.checkpoint()
        async with self._turn:
            if self._is_closed:
                raise IteratorClosedError("this iterator was closed; aiter(prefetcher) starts a new pass")
            if self._is_over:
                raise StopAsyncIteration
            relay = self._relay
            if relay is None:
                await self._wait_for_older()
                relay = self._start()
            if not self._is_asked:
                self._is_asked = True
                relay.ask()
            while (ticket := relay.results.poll()) is None:
                await wait_ready(relay.results)
            # No await from here on: what was taken out of the queue reaches the caller.
            self._is_asked = False
            if not ticket.final:
                return ticket.batch
            self._is_over = True
            if ticket.error is None:
                raise StopAsyncIteration
            raise sole_error(ticket)

    async def _wait_for_older(self) -> None:
        """What a pass that was left puts back must not come after we start."""
        for relay in list(self._shared.relays):
            if relay.is_left:
                await anyio.to_thread.run_sync(relay.join, abandon_on_cancel=True)

    def _start(self) -> Relay:
        shared, device = self._shared, self._shared.device
        on_leave = None
        if hasattr(type(shared.batches), "__aiter__"):
            source = self._source = start_async_source(shared.batches, shared.async_source, device)
            if not source.own:
                shared.async_source = source
            offload = shared.start(source) if source.own else shared.go_on(source)
            offload.stream_of = lambda: source.stream
            is_shared, on_leave = not source.own, source.leave
        else:
            offload, is_shared = self._prefetcher._start_pass()  # noqa: SLF001 - as above
            offload.modes = ThreadState()
        relay = self._relay = Relay(offload, device, is_shared=is_shared, on_leave=on_leave)
        shared.relays.add(relay)
        weakref.finalize(self, relay.leave).atexit = False
        return relay

    async def aclose(self) -> None:
        """End this pass; advancing it afterwards raises :class:`~prefetchpipe.errors.IteratorClosedError`."""
        self._is_closed = True
        relay, source = self._relay, self._source
        if relay is not None:
            relay.leave()
            await off_loop(relay.join)
        if source is not None and source.own:
            await source.wait_ended()


async def close_host_prefetcher(prefetcher: HostPrefetcher) -> None:
    """See :meth:`prefetchpipe.HostPrefetcher.aclose`."""
    shared = prefetcher._shared  # noqa: SLF001 - as above
    relays, source = list(shared.relays), shared.async_source
    await off_loop(prefetcher.close)
    for relay in relays:
        await off_loop(relay.join)
    if source is not None:
        await source.wait_ended()
