"""``HostPrefetcher``: batches from the device, on the host."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from prefetchpipe.device import portable, resolve
from prefetchpipe.device.base import Device
from prefetchpipe.memory.landing import LandingSlots
from prefetchpipe.memory.pinned import PinnedMemory
from prefetchpipe.options import Options
from prefetchpipe.pipeline.asyncsource import AsyncSource
from prefetchpipe.pipeline.offloading import HostCounters, Offload
from prefetchpipe.pipeline.relay import Relay
from prefetchpipe.pipeline.shared import start_source
from prefetchpipe.prefetcher import GPUPrefetcher

__all__ = ["HostPrefetcher", "HostStats"]


@dataclass(frozen=True, slots=True)
class HostStats:
    """What a :class:`HostPrefetcher` has done so far, over all its passes."""

    device: str
    batches: int
    """Batches handed to the consumer."""
    copies: int
    """Copies over the link: one for each batch that has tensors on the device."""
    copied_bytes: int
    """Bytes of these copies."""
    lent_bytes: int
    """Bytes of these that the consumer was handed in the pinned memory where they had landed."""
    copied_out_bytes: int
    """Bytes of these that were copied once more, to ordinary memory: small leaves, and batches beyond the two that may
    be handed over at a time."""
    pinned_bytes: int
    """Page-locked bytes held now."""
    pinned_allocations: int
    """Page-locked allocations made so far; constant after warm-up."""
    fetch_seconds: float
    """Time spent in ``next`` of the source."""
    wait_seconds: float
    """Time spent waiting for copies."""


class _Shared:
    """What the passes of one prefetcher share. Held by them and by the prefetcher; holds neither."""

    def __init__(self, batches: Any, device: Device, options: Options, *, borrow: bool) -> None:
        self.batches = batches
        self.device = device
        self.options = options
        self.depth = options.depth
        self.borrow = borrow
        self.memory = PinnedMemory(device, options.max_pinned_bytes)
        self.counters = HostCounters()
        self.live: weakref.WeakSet[Offload] = weakref.WeakSet()
        self.one_shot: Offload | None = None
        """The pass over a source that is its own iterator; later passes go on where it stands."""
        self.async_source: AsyncSource | None = None
        """Over ``batches``, where that is an asynchronous iterator itself."""
        self.relays: weakref.WeakSet[Relay] = weakref.WeakSet()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the collector may end one pass while another one starts
        self._idle: LandingSlots | None = None
        self._generation = 0

    def start(self, source: Iterator[Any]) -> Offload:
        """A pass, with the slots of an earlier one where there are some."""
        with self._lock:
            slots, self._idle = self._idle, None
        if slots is None:
            slots = LandingSlots(self.device, self.memory, self.depth + 2)
        offload = Offload(
            source,
            self.device,
            depth=self.depth,
            borrow=self.borrow,
            slots=slots,
            counters=self.counters,
            done=partial(self._return_slots, self._generation),
        )
        self.live.add(offload)
        return offload

    def go_on(self, source: Iterator[Any], *, rewound: bool = False) -> Offload:
        """The pass over a source that is its own iterator, where an earlier one stopped."""
        older = self.one_shot
        if older is None or rewound or older.is_over:
            if older is not None:
                older.close()
            self.one_shot = older = self.start(source)
        return older

    def _return_slots(self, generation: int, slots: LandingSlots) -> None:
        """The slots of one pass are kept for the next one; those of closed passes are not."""
        with self._lock:
            if self._idle is None and generation == self._generation:
                self._idle = slots
                return
        slots.close()

    def close(self) -> None:
        """End every pass; give all memory back."""
        if self._pid != os.getpid():
            return  # a forked child has copies of these objects, not the device
        self._generation += 1
        live = list(self.live)  # held: nothing else may hold the pass over a one-shot source
        self.one_shot = None
        source, self.async_source = self.async_source, None
        for relay in list(self.relays):
            relay.leave()
        if source is not None:
            source.cancel()
        for offload in live:
            offload.close()
        with self._lock:
            slots, self._idle = self._idle, None
        if slots is not None:
            slots.close()


class _HostPass(Iterator[Any]):
    """The iterator of one pass."""

    def __init__(self, prefetcher: HostPrefetcher, offload: Offload, *, is_shared: bool) -> None:
        self._prefetcher = prefetcher  # `for out in HostPrefetcher(batches)` holds the iterator only
        self._offload = offload
        if not is_shared:
            weakref.finalize(self, offload.close).atexit = False

    def __next__(self) -> Any:
        return self._offload.take()

    def close(self) -> None:
        """End this pass; advancing it afterwards raises :class:`~prefetchpipe.errors.IteratorClosedError`."""
        self._offload.close()


class HostPrefetcher:
    """Iterate over batches that are on the device, and get them on the host.

    Each batch is gathered into device memory of this prefetcher, on the stream that is current when the source hands it
    out, and from there copied by one copy on a side stream into pinned memory, while the GPU goes on. The source is
    advanced in the thread that calls ``next``, ``depth`` batches ahead; only the oldest copy is waited for. So the
    source may free or overwrite its tensors as soon as it has handed them out.

    Order, count, containers and values are those of the source. Tensors arrive as CPU tensors, those on the host
    already as copies; NumPy arrays are copied and stay arrays; other values pass through. What cannot be packed (sparse
    or nested tensors, outputs that require grad) goes by its own ``.to("cpu")``, for which the host waits.

    Args:
        batches: Any iterable of batches, say a generator of a model's outputs; asynchronous ones under ``async for``.
        depth: Copies launched ahead of the batch handed out, at least 1.
        borrow: Hand out views of the pinned slots, valid until the next ``next``. By default a batch is the consumer's
            to keep: large tensors in the pinned memory where they landed, which comes back when they are dropped, for
            up to two batches at a time; everything else copied to ordinary memory.
        device: Where the tensors are. ``None``: that of ``batches`` if it is a
            :class:`~prefetchpipe.GPUPrefetcher`, otherwise as there.
        max_pinned_bytes: Upper bound for the page-locked host memory of this prefetcher, in bytes.

    Raises:
        TypeError: ``batches`` is not iterable, or an option has a wrong type.
        ValueError: An option has a value that is not allowed, or the device is not there.

    Example:
        >>> import torch
        >>> from prefetchpipe import GPUPrefetcher, HostPrefetcher
        >>> loader = GPUPrefetcher([torch.full((2,), float(i)) for i in range(3)], device="cpu")
        >>> [out.tolist() for out in HostPrefetcher((x * 2 for x in loader), device="cpu")]
        [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]
    """

    def __init__(
        self,
        batches: Any,
        depth: int = 2,
        *,
        borrow: bool = False,
        device: str | torch.device | Device | None = None,
        max_pinned_bytes: int | None = None,
    ) -> None:
        if not any(hasattr(type(batches), name) for name in ("__iter__", "__getitem__", "__aiter__")):
            raise TypeError(f"batches must be an iterable of batches, not {batches!r} (a {type(batches).__name__})")
        if not isinstance(borrow, bool):
            raise TypeError(f"borrow must be True or False, not {borrow!r} (a {type(borrow).__name__})")
        options = Options(depth=depth, max_pinned_bytes=max_pinned_bytes)
        if device is None and isinstance(batches, GPUPrefetcher):
            device = batches._shared.device  # noqa: SLF001 - the same package
        self._setup(batches, resolve(device), options, borrow=borrow)

    def _setup(self, batches: Any, device: Device, options: Options, *, borrow: bool) -> None:
        self._shared = _Shared(batches, device, options, borrow=borrow)
        weakref.finalize(self, self._shared.close).atexit = False

    def __iter__(self) -> Iterator[Any]:
        """Start a pass. ``iter(batches)`` is called here, in the calling thread; nothing is pulled yet."""
        batches = self._shared.batches
        if not hasattr(type(batches), "__iter__") and not hasattr(type(batches), "__getitem__"):
            raise TypeError(
                f"{type(batches).__name__!r} is an asynchronous iterable: use `async for` over this HostPrefetcher"
            )
        offload, is_shared = self._start_pass()
        return _HostPass(self, offload, is_shared=is_shared)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Start a pass in an event loop (asyncio or trio). The first ``__anext__`` calls ``iter`` or ``aiter``."""
        from prefetchpipe.offload_aio import AsyncHostPass

        return AsyncHostPass(self)

    def _start_pass(self) -> tuple[Offload, bool]:
        """``iter(batches)``, and whether that is an iterator which later passes go on with."""
        shared = self._shared
        source, rewound = start_source(shared.batches)
        if source is not shared.batches:
            return shared.start(source), False
        return shared.go_on(source, rewound=rewound), True

    def __len__(self) -> int:
        return len(self._shared.batches)

    def __bool__(self) -> bool:
        return bool(self._shared.batches)

    def close(self) -> None:
        """End every pass of this prefetcher and give its memory back. A later ``iter`` works."""
        self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def aclose(self) -> None:
        """As :meth:`close`, without holding the event loop."""
        from prefetchpipe.offload_aio import close_host_prefetcher

        await close_host_prefetcher(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def stats(self) -> HostStats:
        """What has been done so far, as a frozen snapshot; callable from any thread."""
        shared = self._shared
        counters = shared.counters
        return HostStats(
            device=repr(shared.device),
            batches=counters.batches,
            copies=counters.copies,
            copied_bytes=counters.copied_bytes,
            lent_bytes=counters.lent_bytes,
            copied_out_bytes=counters.copied_out_bytes,
            pinned_bytes=shared.memory.held_bytes,
            pinned_allocations=shared.memory.allocations,
            fetch_seconds=counters.fetch_seconds,
            wait_seconds=counters.wait_seconds,
        )

    def __repr__(self) -> str:
        shared = self._shared
        return f"HostPrefetcher({shared.batches!r}, depth={shared.depth}, device={shared.device!r})"

    # Copies carry the configuration; passes and memory stay behind

    def __getstate__(self) -> dict[str, Any]:
        shared = self._shared
        return {
            "batches": shared.batches,
            "device": portable(shared.device),
            "options": shared.options,
            "borrow": shared.borrow,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._setup(state["batches"], resolve(state["device"]), state["options"], borrow=state["borrow"])
