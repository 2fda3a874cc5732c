"""The way back: batches from the device to the host, launched ahead and waited for one at a time."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from time import perf_counter
from typing import Any

import torch

from prefetchpipe.batch.layout import OWN_BLOCK_BYTES, Layout, is_packable, is_plain
from prefetchpipe.batch.move import move
from prefetchpipe.batch.rows import copy_all
from prefetchpipe.batch.tree import WalkCache, flatten, unflatten
from prefetchpipe.device.base import Device, Stream
from prefetchpipe.device.cpu import cpu_device
from prefetchpipe.errors import IteratorClosedError, PrefetchWarning
from prefetchpipe.memory.landing import LandingSlot, LandingSlots
from prefetchpipe.pipeline.asyncsource import AsyncSource, SourceLeftError, SourceWaitsError
from prefetchpipe.pipeline.threadstate import ThreadState
from prefetchpipe.pipeline.ticket import failed_ticket

__all__ = ["HostCounters", "Offload"]

_CPU = torch.device("cpu")
_LAYOUTS = 128
_LEAVE_SECONDS = 0.5
_PATIENCE_SECONDS = 2e-3
"""A batch that is under way is not held back for longer by an asynchronous source that waits for its next one."""
_LENT = 2
"""Slots that the consumer may hold: the batch in use, and the one before it, which a loop variable still names."""

_NOTHING = object()


class HostCounters:
    """Running totals over all passes of one prefetcher."""

    __slots__ = ("batches", "copied_bytes", "copied_out_bytes", "copies", "fetch_seconds", "lent_bytes", "wait_seconds")

    def __init__(self) -> None:
        self.batches = 0
        self.copies = 0
        self.copied_bytes = 0
        self.lent_bytes = 0
        self.copied_out_bytes = 0
        self.fetch_seconds = 0.0
        self.wait_seconds = 0.0


class _Job:
    """A batch under way: its structure, the leaves that are there already, and where the others land."""

    __slots__ = ("layout", "leaves", "lent", "places", "slot", "spec")

    def __init__(self) -> None:
        self.spec: Any = None
        self.leaves: list[Any] = []
        self.places: list[int] = []
        self.layout: Layout | None = None
        self.slot: LandingSlot | None = None
        self.lent: torch.Tensor | None = None
        """The bytes of the slot, once they are the consumer's."""


class Offload:
    """One pass over device batches. Has no thread: everything happens inside :meth:`take`, in whoever calls it.

    Args:
        source: Iterator over batches.
        device: Where their tensors are; those elsewhere go by their own ``.to``.
        depth: Copies launched ahead of the batch handed out.
        borrow: Hand out views of the slots, valid until the next batch is taken.
        slots: Where copies land.
        counters: For ``stats()``.
        done: Called once with the slots, when the pass has ended and nothing of it is under way.
    """

    def __init__(
        self,
        source: Iterator[Any],
        device: Device,
        *,
        depth: int,
        borrow: bool,
        slots: LandingSlots,
        counters: HostCounters,
        done: Callable[[LandingSlots], None],
    ) -> None:
        self.source: Iterator[Any] | None = source
        self.modes: ThreadState | None = None
        """Where the source runs in a thread of ours: the modes of the consumer's."""
        self.stream_of: Callable[[], Stream] | None = None
        """The stream on which the last batch was made, where that was another thread's."""
        self._given_back: deque[Any] = deque()
        self.slots = slots
        self._done: Callable[[LandingSlots], None] | None = done
        self._device = device
        self._depth = depth
        self._borrow = borrow
        self._counters = counters
        self._walk = WalkCache(keep_arrays=True)
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._pending: deque[_Job] = deque()
        self._pulled: Any = _NOTHING
        self._error: BaseException | None = None
        self._borrowed: LandingSlot | None = None
        self._shown: weakref.ref[Any] | None = None
        """Goes with the last view of the borrowed slot."""
        self._in_turn = False  # no slabs: the device is full
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held by whoever takes a batch; the holder's thread is in _holder
        self._holder = 0
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        left = self._pending or self._given_back or self._error is not None
        return self._is_closed or (self.source is None and not left)

    def take(self) -> Any:
        """The next batch, on the host.

        Raises:
            StopIteration: The source has ended, or has raised before.
            IteratorClosedError: The pass was closed.
            Exception: Whatever the source raised, after all batches before it (contract 7).
        """
        if self._holder == threading.get_ident():
            raise ValueError("the source advances the iterator that is waiting for it")
        with self._lock:
            self._holder = threading.get_ident()
            try:
                if self._is_closed or self._pid != os.getpid():
                    raise IteratorClosedError("this pass was closed; iter(prefetcher) starts a new one")
                self._give_back_borrowed()
                if self._given_back:
                    return self._given_back.popleft()
                # Without a free slot the oldest batch goes first: the consumer keeps more of them than it may.
                while self.source is not None and self._pulls_next() and self._pull():
                    self._give_back_borrowed()
                return self._deliver()
            finally:
                if self._is_closed:
                    self._give_back()
                self._holder = 0

    def put_back(self, batch: Any) -> None:
        """A batch that was taken for somebody who has left: the next one to be taken."""
        self._given_back.append(batch)

    def _pulls_next(self) -> bool:
        ahead = len(self._pending)
        return ahead <= self._depth and (not ahead or self.slots.has_free())  # contract 8

    # Launching

    def _pull(self) -> bool:
        """Launch the copies of one more batch. Errors wait until the batches before them are delivered.

        Returns:
            Whether there is a point in pulling on: the source does not wait for something.
        """
        try:
            if self._pulled is _NOTHING:
                assert self.source is not None
                if isinstance(self.source, AsyncSource):
                    self.source.patience = _PATIENCE_SECONDS if self._pending else None
                started = perf_counter()
                try:
                    with nullcontext() if self.modes is None else self.modes.user_code():
                        self._pulled = next(self.source)
                except StopIteration:
                    self.source = None
                    return False
                finally:
                    self._counters.fetch_seconds += perf_counter() - started
            with nullcontext() if self.stream_of is None else self._device.on_stream(self.stream_of()):
                self._pending.append(self._launch(self._pulled))
            self._pulled = _NOTHING
        except SourceWaitsError:
            return False
        except (KeyboardInterrupt, SourceLeftError):
            raise  # at once; what is under way stays for the next call
        except BaseException as error:  # noqa: BLE001 - SystemExit and GeneratorExit are the consumer's too
            self._pulled = _NOTHING
            self.source = None
            self._error = failed_ticket(error).error
        return True

    def _launch(self, batch: Any) -> _Job:
        job = _Job()
        job.spec = flatten(batch, job.leaves, self._walk)
        places = [] if self._in_turn else [i for i, leaf in enumerate(job.leaves) if self._is_packable(leaf)]
        packed = [job.leaves[i] for i in places]
        layout = self._layout_of(packed) if packed else None
        if layout is not None and layout.nbytes:
            # Slabs and slots serve passes in and out of inference mode.
            with self._device.beside_captures(), torch.inference_mode(False), torch.no_grad():
                slot = self._send_back(layout, packed)
            if slot is not None:
                job.slot, job.layout, job.places = slot, layout, places
                for i in places:
                    job.leaves[i] = None
        try:
            self._move_others(job)
        except BaseException:
            if job.slot is not None:
                self._retire(job.slot)
            raise
        return job

    def _is_resident(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and self._device.is_resident(leaf)

    def _is_packable(self, leaf: Any) -> bool:
        return type(leaf) is torch.Tensor and self._device.is_resident(leaf) and is_plain(leaf)

    def _layout_of(self, leaves: Sequence[torch.Tensor]) -> Layout:
        storages = [leaf.untyped_storage() for leaf in leaves]
        key: list[object] = []
        for leaf in leaves:
            key += (leaf.dtype, leaf.shape, leaf.stride())
        if len({storage.data_ptr() for storage in storages}) < len(leaves):  # who shares with whom, and where
            first: dict[int, int] = {}
            for i, (leaf, storage) in enumerate(zip(leaves, storages, strict=True)):
                key.append((first.setdefault(storage.data_ptr(), i), leaf.storage_offset(), storage.nbytes()))
        layout = self._layouts.get(tuple(key))
        if layout is None:
            layout = Layout(leaves)
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            self._layouts[tuple(key)] = layout
        return layout

    def _send_back(self, layout: Layout, leaves: Sequence[torch.Tensor]) -> LandingSlot | None:
        """Queue the copies; None if the device has no memory for them.

        The values go to a slab of ours first, on the stream that made them: behind that, the producer may free or
        overwrite its tensors at once, and its stream never waits for the link (contract 5, the other way round).
        """
        device, stream = self._device, self._device.current_stream()
        slot = self.slots.acquire(layout.nbytes)
        try:
            assert slot.slab is not None
            views, slab = slot.slab.views(layout, device)
            device.fill(views, layout.sources(leaves))
            device.record(slot.produced, stream)
            device.wait(device.d2h_stream, slot.produced)  # contract 3: the copy reads what the stream has written
            try:
                device.copy_to_host(slot.tensor[: layout.nbytes], slab[: layout.nbytes], device.d2h_stream)
            finally:
                device.record(slot.landed, device.d2h_stream)  # contract 6, also for a copy that failed half-way
        except torch.OutOfMemoryError:
            slot.slab = None
            self.slots.release(slot)
            self.slots.drop_slabs()
            self._go_in_turn()
            return None
        except BaseException:
            self._retire(slot)
            raise
        self._counters.copies += 1
        self._counters.copied_bytes += layout.nbytes
        return slot

    def _go_in_turn(self) -> None:
        self._in_turn = True
        warnings.warn(
            "device memory is full: batches are copied back one after the other, and the device waits meanwhile",
            PrefetchWarning,
            stacklevel=2,
        )

    def _move_others(self, job: _Job) -> None:
        """What cannot be packed, by its own ``.to``; what is on the host already is copied (contract 2)."""
        others = sorted(set(range(len(job.leaves))).difference(job.places))
        if self._device.host_memory and any(self._is_resident(job.leaves[i]) for i in others):
            # A GPU's ``.to`` waits for the current stream by itself; host memory that stands for a device's does not.
            event = self._device.new_event()
            self._device.record(event, self._device.current_stream())
            self._device.synchronize(event)
        host = [i for i in others if is_packable(job.leaves[i])]
        if host:
            sources = [job.leaves[i] for i in host]
            layout, cpu = self._layout_of(sources), cpu_device()
            with torch.inference_mode(False), torch.no_grad():
                arrived, memory = layout.allocate(cpu.empty, cpu.alloc)
                copy_all(layout.targets(arrived, memory), layout.sources(sources))
            for i, tensor in zip(host, arrived, strict=True):
                job.leaves[i] = tensor
        for i in set(others).difference(host):
            job.leaves[i] = move(job.leaves[i], _CPU)

    # Delivering

    def _deliver(self) -> Any:
        if not self._pending:
            error = self._error
            self._give_back()
            if error is None:
                raise StopIteration
            context = error.__context__
            try:
                raise error
            except BaseException:
                if context is not None:
                    # `raise` put what the consumer is just handling in the place of the source's own context.
                    with suppress(AttributeError, TypeError):
                        error.__context__ = context
                raise
            finally:
                del error  # the traceback refers to this frame
        job = self._pending[0]
        leaves = job.leaves
        if job.slot is not None:
            started = perf_counter()
            self._device.synchronize(job.slot.landed)  # contract 3: the host reads after the copy
            self._counters.wait_seconds += perf_counter() - started
            leaves = list(leaves)
            with torch.inference_mode(False), torch.no_grad():
                for i, tensor in zip(job.places, self._unpack(job), strict=True):
                    leaves[i] = tensor
        batch = unflatten(job.spec, leaves)
        self._hand_over(job)
        self._counters.batches += 1
        return batch

    def _unpack(self, job: _Job) -> list[torch.Tensor]:
        """The leaves of a batch that has landed: taken along, copied out, or borrowed."""
        layout, slot = job.layout, job.slot
        assert layout is not None
        assert slot is not None
        has_large = any(block.nbytes >= OWN_BLOCK_BYTES for block in layout.blocks)
        if not self._borrow and job.lent is None and has_large and self.slots.lent < _LENT:
            job.lent = self.slots.lend(slot)
        is_lent = job.lent is not None
        whole = slot.tensor if job.lent is None else job.lent
        if self._borrow:
            whole, self._shown = self.slots.show(slot)
        memory = []
        for block in layout.blocks:
            piece = whole[block.slot_offset : block.slot_offset + block.nbytes]
            # A small leaf kept for later must not keep the slot, nor the large ones beside it.
            if not self._borrow and not (is_lent and block.nbytes >= OWN_BLOCK_BYTES):
                piece = piece.clone()
                self._counters.copied_out_bytes += block.nbytes
            elif is_lent:
                self._counters.lent_bytes += block.nbytes
            memory.append(piece)
        return [_view(memory[leaf.block], leaf.offset, leaf.dtype, leaf.shape, leaf.stride) for leaf in layout.leaves]

    def _hand_over(self, job: _Job) -> None:
        """The batch is made; where it lies is free, borrowed, or the consumer's."""
        self._pending.popleft()
        slot, job.slot = job.slot, None
        if slot is None:
            return
        self.slots.landed(slot)
        if self._borrow:
            self._borrowed = slot
        elif job.lent is None:
            self.slots.release(slot)
        job.lent = None

    def _give_back_borrowed(self) -> None:
        """The next batch is there. Until then this one may be the last, be it that an error follows: its views stay."""
        if self._borrowed is not None and (self._pending or self._given_back):
            slot, self._borrowed = self._borrowed, None
            self.slots.release(slot)

    def _leave_borrowed(self) -> None:
        """There is no next batch: the views of this one last for as long as somebody has them."""
        slot, self._borrowed = self._borrowed, None
        if slot is not None:
            assert self._shown is not None
            self.slots.release_after(self._shown, slot)

    # The end

    def close(self) -> None:
        """End the pass and give its slots back; in any thread, also from the collector."""
        if os.getpid() != self._pid:
            return  # a forked child holds a copy of this object, not of the device
        self._is_closed = True
        if self._holder == threading.get_ident() or not self._lock.acquire(timeout=_LEAVE_SECONDS):
            return  # whoever is inside the source gives back when it returns
        try:
            self._give_back()
        finally:
            self._lock.release()

    def _give_back(self) -> None:
        self.source, self._error, self._pulled = None, None, _NOTHING
        self._leave_borrowed()
        self._given_back.clear()
        while self._pending:
            job = self._pending.popleft()
            if job.slot is not None and job.lent is None:
                self._retire(job.slot)
            job.slot = job.lent = None
        done, self._done = self._done, None
        if done is not None:
            done(self.slots)

    def _retire(self, slot: LandingSlot) -> None:
        with suppress(Exception):  # a device that failed has nothing under way any more
            self._device.synchronize(slot.landed)  # contract 6: memory outlives the copies into it and out of it
        self.slots.landed(slot)
        self.slots.release(slot)


def _view(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    start = (memory.storage_offset() + offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory.untyped_storage(), start, shape, stride)
