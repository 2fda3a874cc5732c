"""``GPUPrefetcher``: life cycle and iterator."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

import torch

from prefetchpipe import ranges
from prefetchpipe.device import portable, resolve
from prefetchpipe.device.base import Device, Event, Stream
from prefetchpipe.errors import IteratorClosedError, PrefetchWarning
from prefetchpipe.options import Fetch, Options, Workers
from prefetchpipe.pipeline import torchloader
from prefetchpipe.pipeline.datasets import in_memory_source
from prefetchpipe.pipeline.flagged import refuse_flagged
from prefetchpipe.pipeline.leaving import exiting
from prefetchpipe.pipeline.producer import Producer
from prefetchpipe.pipeline.ranged import RangedProducer
from prefetchpipe.pipeline.shared import Shared, can_rewind
from prefetchpipe.pipeline.shortway import NOT_SHORT
from prefetchpipe.pipeline.static import StaticBatches
from prefetchpipe.pipeline.ticket import Ticket
from prefetchpipe.ranks import check_sampler

if TYPE_CHECKING:
    from prefetchpipe.stats import Stats

__all__ = ["GPUPrefetcher"]

_CLOSE_SECONDS = 5.0

_live: weakref.WeakSet[Producer] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """Interpreter exit: before torch's and multiprocessing's own hooks, which were registered earlier."""
    exiting.set()
    for producer in list(_live):
        producer.stop(why="the interpreter exits")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_live.clear)  # the child has no producers, only copies of these objects


class _Pass(Iterator[Any]):
    """The iterator of one pass. When it goes, its producer is stopped."""

    def __init__(
        self,
        prefetcher: GPUPrefetcher,
        producer: Producer,
        static: StaticBatches | None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self._prefetcher = prefetcher  # `for batch in GPUPrefetcher(loader)` holds the iterator only
        self._shared = prefetcher._shared  # noqa: SLF001 - the other half of this class
        self._device = self._shared.device
        self._producer: Producer | None = producer
        self._static = static
        self._short = producer.short
        self._is_closed = False
        self._number = 0
        self._entered = 0.0
        self._left = 0.0
        self._finalizer = weakref.finalize(self, leave or producer.detach)
        self._finalizer.atexit = False

    def __next__(self) -> Any:
        """The next batch, ordered on the stream that is current now.

        Where it is packed and its copies are launched: ``stage`` (pipeline/staging.py), called by ``Transfer.send``
        (pipeline/transfer.py); or ``ShortSender.send`` (pipeline/shortway.py), by ``device.copy`` and for small batches
        ``device.copy_small``. Who calls them when, is ``Producer``'s part.
        """
        producer = self._producer
        if producer is None:
            raise StopIteration
        if self._is_closed:
            raise IteratorClosedError("this iterator was closed; iter(prefetcher) starts a new pass")
        stream = self._device.current_stream()
        if self._short is not None and self._short.is_on:
            batch = self._next_short(producer, stream)
            if batch is not NOT_SHORT:
                return batch
        self._enter(stream)
        done = producer.mark_done(stream)  # contract 8: all about the batch before this one is behind it
        producer.transfer.consumer_stream = stream
        ticket = producer.take(stream)
        if ticket.final:
            self._end(producer, ticket)
        return self._hand_out(producer, ticket, stream, done)

    def _next_short(self, producer: Producer, stream: Stream) -> Any:
        counters = self._shared.counters
        if counters.recorder is not None:
            return NOT_SHORT  # a trace shows the usual way
        entered = counters.clock()
        batch = producer.take_short(stream)
        if batch is not NOT_SHORT:
            self._left = counters.took(self._number, entered, self._left)
            self._number += 1
            producer.stepped(self._left)
        return batch

    def _enter(self, stream: Stream) -> None:
        """The loop asks for a batch: for the statistics."""
        counters = self._shared.counters
        self._entered = counters.clock()
        if counters.recorder is not None:
            counters.recorder.loop_ends(self._entered, stream)

    def _hand_out(self, producer: Producer, ticket: Ticket, stream: Stream, done: Event) -> Any:
        counters = self._shared.counters
        try:
            batch = producer.transfer.deliver(ticket, stream)
            if self._static is not None:
                batch = self._static.fill(batch)
        except BaseException:
            self._producer = None  # contract 7: an error ends the pass, wherever it is met
            producer.stop(why="an error ended it")
            raise
        self._note_state(producer, ticket)
        producer.allow(done, ticket)
        self._left = counters.took(self._number, self._entered, self._left)
        if counters.recorder is not None:
            counters.recorder.loop_begins(self._left, stream, self._number)
        self._number += 1
        if self._short is not None:
            if self._short.is_over:
                self._short = None
            elif not producer.is_threaded:
                self._short.after_usual()
        producer.stepped(self._left)
        return batch

    def _note_state(self, producer: Producer, ticket: Ticket) -> None:
        if self._shared.has_state and self._shared.is_newest(producer):
            self._shared.state = ticket.state

    def _end(self, producer: Producer, ticket: Ticket) -> None:
        self._producer = None
        error, ticket.error = ticket.error, None
        if error is None:
            producer.finish()
            self._note_state(producer, ticket)
            raise StopIteration
        context = error.__context__
        try:
            producer.fail()
            raise error
        except BaseException as raised:
            if raised is error and context is not None:
                # `raise` put what the consumer is just handling in the place of the loader's own context.
                with suppress(AttributeError, TypeError):
                    error.__context__ = context
            raise
        finally:
            del error  # the traceback refers to this frame

    def close(self) -> None:
        """End this pass; advancing it afterwards raises :class:`~prefetchpipe.errors.IteratorClosedError`."""
        self._is_closed = True
        self._finalizer()


class GPUPrefetcher:
    """Iterate over the batches of ``loader``, already on the device.

    Order, count, values and types of the batches are those of ``for batch in loader``. A yielded batch belongs to the
    consumer; work on the stream that is current at ``next`` is ordered after its copy. Every ``iter`` starts an
    independent pass.

    Args:
        loader: Any iterable of batches; a batch is any nesting of containers with tensors and NumPy arrays.
        device: ``None`` (the current CUDA device of the calling thread, the CPU without one), ``"cpu"``, ``"cuda"``,
            ``"cuda:1"``, a :class:`torch.device`, or a :class:`prefetchpipe.testing.SimulatedDevice`.
        depth: Batches copied ahead of the one in use, at least 1.
        transform: Called with each batch on the device, on the copy stream; returns the batch to hand out.
        fetch: Who calls ``next(loader)``: a ``"thread"``, the ``"caller"`` of ``next``, or ``"auto"``: the thread,
            unless the loader draws from this process's global random generators or batches are tiny.
        workers: Whether the worker processes of a DataLoader write into pinned shared memory: ``"auto"`` (wherever
            they can), ``"shared"`` (as that, with a warning where they cannot) or ``"plain"`` (never).
        copy_threads: Threads used for packing; None: the cores that this process may use, divided among the training
            processes that its launcher started on this host.
        max_pinned_bytes: Upper bound for the page-locked host memory of this prefetcher, in bytes.
        static: Batches live at fixed device addresses (for CUDA graphs) and are valid until the next ``next``.
        checked: Poison released memory and verify every batch on arrival. Slow; proves that a bug is not here.

    Raises:
        TypeError: ``loader`` is not iterable or was prepared by Accelerate, or an option has a wrong type.
        ValueError: An option has a value that is not allowed, or the device is not there.

    Example:
        >>> import torch
        >>> from prefetchpipe import GPUPrefetcher
        >>> loader = [{"x": torch.ones(2), "id": i} for i in range(3)]
        >>> [batch["id"] for batch in GPUPrefetcher(loader, device="cpu")]
        [0, 1, 2]
    """

    def __init__(
        self,
        loader: Any,
        device: str | torch.device | Device | None = None,
        *,
        depth: int = 2,
        transform: Callable[[Any], Any] | None = None,
        fetch: Fetch = "auto",
        workers: Workers = "auto",
        copy_threads: int | None = None,
        max_pinned_bytes: int | None = None,
        static: bool = False,
        checked: bool = False,
    ) -> None:
        if not any(hasattr(type(loader), name) for name in ("__iter__", "__getitem__", "__aiter__")):
            # Ray's DataIterator has none of them.
            hint = "; pass what its iter_batches() gives" if hasattr(loader, "iter_batches") else ""
            raise TypeError(f"loader must be an iterable of batches, not {loader!r} (a {type(loader).__name__}){hint}")
        refuse_flagged(loader)
        options = Options(depth, transform, fetch, workers, copy_threads, max_pinned_bytes, static, checked)
        self._setup(loader, resolve(device), options)
        check_sampler(loader)

    def _setup(self, loader: Any, device: Device, options: Options) -> None:
        self._shared = Shared(loader, device, options)
        self._passes: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._static = StaticBatches(device) if options.static else None
        weakref.finalize(self, self._shared.close).atexit = False

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        """Start a pass. ``iter(loader)`` is called here, in the calling thread; nothing is pulled yet."""
        loader = self._shared.loader
        if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
            raise TypeError(
                f"{type(loader).__name__!r} is an asynchronous iterable: use `async for` over this GPUPrefetcher"
            )
        return _Pass(self, self._start_pass(), self._static)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Start a pass in an event loop (asyncio or trio). The first ``__anext__`` calls ``iter`` or ``aiter``."""
        from prefetchpipe.aio import AsyncPass

        return AsyncPass(self)

    def _start_pass(self, source: Any = None) -> Producer:
        shared = self._shared
        kind = RangedProducer if ranges.are_on() else Producer
        older = [producer for producer in self._passes if producer.is_ours]  # a forked child waits for none of these
        for producer in older:
            if producer.has_dead_worker():
                producer.stop(why="a worker process of its loader died")
        torchloader.prepare(shared.loader)
        if shared.has_generators:
            for producer in older:
                producer.hold_back()
        started = shared.counters.clock()
        source, rewound = self._start_source(older) if source is None else (source, False)
        shared.counters.start_seconds += shared.counters.clock() - started
        same = [p for p in older if p.source is source and not torchloader.has_workers(source)]
        if same and same[-1].attach():
            return same[-1]  # one iterator: all passes over it share what it gives
        producer = kind(shared, source)
        if same and not rewound:
            producer.follow(same[-1])
        else:
            producer.adopt(shared.take_carried(source))
        torchloader.claim(shared.loader, producer)
        shared.newest = weakref.ref(producer)
        shared.counters.passes += 1
        shared.state = None
        self._passes.add(producer)
        _live.add(producer)
        producer.attach()
        return producer

    def _start_source(self, older: list[Producer]) -> tuple[Any, bool]:
        """``iter(loader)``, and whether that rewound it: passes over the same object are over then."""
        shared = self._shared
        own = [producer for producer in older if producer.source is shared.loader]
        with ExitStack() as stack:
            for producer in own if can_rewind(shared.loader) else ():
                stack.enter_context(producer.held())  # its thread must not be inside a loader that rewinds itself
            source, rewound = shared.start_source()
            if rewound:
                for producer in own:
                    producer.leave("the loader was rewound by a newer pass")
        if rewound:
            for producer in own:
                producer.stop()
            shared.take_carried(source)
        return in_memory_source(shared.loader, source), rewound

    def __len__(self) -> int:
        return len(self._shared.loader)

    def __bool__(self) -> bool:
        return bool(self._shared.loader)

    def close(self) -> None:
        """End every pass of this prefetcher and give its memory back. A later ``iter`` works."""
        passes = list(self._passes)
        late = [producer for producer in passes if not producer.stop(why="close() was called", seconds=_CLOSE_SECONDS)]
        self._passes.clear()
        self._shared.close()
        if late:
            warnings.warn(
                f"{len(late)} producer thread(s) are still inside next(loader) after {_CLOSE_SECONDS:.0f} s; "
                "they end when the loader comes back",
                PrefetchWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def aclose(self) -> None:
        """As :meth:`close`, without holding the event loop."""
        from prefetchpipe.aio import close_prefetcher

        await close_prefetcher(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Reading through to the loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_shared", "_passes", "_static"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._shared.loader, name)
        if name == "state_dict" and callable(value):
            return self._state_dict
        if name == "load_state_dict" and callable(value):
            return self._load_state_dict
        return value

    def _state_dict(self) -> Any:
        """The loader's state right after the batch last yielded; prefetched batches do not count (contract 11)."""
        state = self._shared.state
        return self._shared.twins.state_owner().state_dict() if state is None else state.get()

    def _load_state_dict(self, state: Any) -> Any:
        self._shared.state = None
        return self._shared.loader.load_state_dict(state)

    def stats(self) -> Stats:
        """What has been done so far, as a frozen snapshot; callable from any thread."""
        return self._shared.snapshot(sum(producer.bytes_ahead for producer in list(self._passes)))

    def __repr__(self) -> str:
        shared = self._shared
        return f"GPUPrefetcher({shared.loader!r}, device={shared.device!r}, depth={shared.options.depth})"

    # Copies carry the configuration; passes, memory and threads stay behind

    def __getstate__(self) -> dict[str, Any]:
        shared = self._shared
        own = {key: value for key, value in vars(self).items() if key not in ("_shared", "_passes", "_static")}
        return {"loader": shared.loader, "device": portable(shared.device), "options": shared.options, "own": own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._setup(state["loader"], resolve(state["device"]), state["options"])
        vars(self).update(state["own"])
