"""The hot path: one batch to the device. How its streams, events and device memory go together is here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from prefetchpipe.batch.few import FewLeaves
from prefetchpipe.batch.layout import Layout, flat_bytes
from prefetchpipe.batch.move import move
from prefetchpipe.batch.plan import PlanCache
from prefetchpipe.batch.rows import copy_all
from prefetchpipe.batch.search import find_tensors
from prefetchpipe.batch.tree import WalkCache, flatten, unflatten
from prefetchpipe.counters import Counters
from prefetchpipe.device.base import Device, Event, Stream
from prefetchpipe.errors import CorruptBatchError, IteratorClosedError
from prefetchpipe.memory.pinned import PageableBlock, PinnedMemory
from prefetchpipe.memory.ring import Slot, SlotRing
from prefetchpipe.native import Copier
from prefetchpipe.native import is_available as has_native_copies
from prefetchpipe.options import Options, usable_cores
from prefetchpipe.pipeline.lent import LentSlots
from prefetchpipe.pipeline.shortway import SMALL_BYTES, ShortSender
from prefetchpipe.pipeline.staging import LARGE_BYTES, Packers, stage, stage_in_pieces
from prefetchpipe.pipeline.threadstate import ThreadState
from prefetchpipe.pipeline.ticket import Ticket
from prefetchpipe.pipeline.timing import CopyTimer, Probe
from prefetchpipe.pipeline.workers import WorkerBatch

__all__ = ["Transfer"]


_SLOTS = 3
"""At most: two for large batches (:mod:`prefetchpipe.memory.ring`)."""

_SHARED_WORK_BYTES = 128 << 10
"""From here on several threads are worth their start, once."""


class Transfer:
    """Sends the batches of one pass at a time; a prefetcher keeps it, with its pinned ring, for the next pass.

    Args:
        device: Where batches go.
        options: Transform, checks.
        memory: Where the slots of the ring come from.
        counters: Bytes are added here.
        timer: Measures some of the copies.

    Attributes:
        consumer_stream: The stream on which the consumer last took a batch.
        short: For batches that go the short way.
        lent: Slots of workers that are being copied from.
        packers: Threads for batches of many leaves, where the producer's thread has some.
        times: Where the seconds of the batch being sent are counted.
        number: Which batch of its pass that is, from 0.
    """

    def __init__(
        self, device: Device, options: Options, memory: PinnedMemory, counters: Counters, timer: CopyTimer
    ) -> None:
        self._device = device
        self._transform = options.transform
        self._checked = options.checked
        self._counters = counters
        self._timer = timer
        self._ring = (
            SlotRing(device, memory, _SLOTS, poison=options.checked, clock=counters.clock) if device.staged else None
        )
        self._copier: Copier | None = None
        self._threads = options.copy_threads or usable_cores()
        has_limit = options.max_pinned_bytes is not None
        self.short = (
            None
            if self._ring is None
            else ShortSender(device, self._ring, counters, timer, copier=self._copier_for, has_limit=has_limit)
        )
        self._plans = PlanCache(device)
        self._walk = WalkCache(keep_arrays=options.keep_arrays)
        self._events: deque[Event] = deque()
        self._held: deque[tuple[Event, Any]] = deque()
        self.lent = LentSlots(device)
        self._last_bytes = 0
        self.consumer_stream: Stream = None
        self.packers: Packers | None = None
        self.times = counters.warm_up
        self.number = 0

    def suits_consumer_stream(self) -> bool:
        """Whether the last batch may as well be copied on the consumer's own stream: small, and nothing else to do."""
        return self._last_bytes <= SMALL_BYTES and self._transform is None and not self._checked

    def is_behind(self) -> bool:
        """Whether fetching or sending would have to wait for the device."""
        return self.lent.would_wait() or (self._ring is not None and self._ring.would_wait())

    def send(self, batch: Any, modes: ThreadState, stream: Stream, *, caller: Stream, reusable_source: bool) -> Ticket:
        """Launch everything that brings ``batch`` to the device.

        Args:
            batch: What the loader gave.
            modes: Modes under which the transform runs.
            stream: Where the copies go, current in this thread: the copy stream; or the consumer's own for a tiny
                batch, whose copy is then ordered by that stream alone.
            caller: The consumer's stream if the loader just ran on it, else None.
            reusable_source: Whether the loader may write into this batch's memory again.

        Returns:
            A ticket. The bytes have left the loader's tensors (contract 5).

        Raises:
            torch.OutOfMemoryError: The device is full; nothing of the batch is kept, it can be sent again.
        """
        ticket = Ticket()
        leaves: list[Any] = []
        lent: WorkerBatch | None = None
        if type(batch) is WorkerBatch:
            spec = batch.spec
            leaves = self._send_from_worker(batch, ticket, stream, caller)
            lent = batch if batch.unpacked is None else None
        else:
            spec = flatten(batch, leaves, self._walk)
            if leaves:
                leaves = self._send_leaves(leaves, ticket, stream, caller, reusable_source=reusable_source)
        self._last_bytes = ticket.nbytes
        batch = unflatten(spec, leaves)
        del leaves, spec
        if self._transform is not None:
            started = self._counters.clock()
            try:
                batch = self._transformed(batch, modes)
            except torch.OutOfMemoryError:
                if lent is not None:
                    self.lent.take_back(lent)
                raise
            self.times.transform_seconds += self._counters.clock() - started
            ticket.uses = self._distinct(find_tensors(batch))
        ticket.batch = batch
        if stream is self._device.copy_stream and self._device.staged and (ticket.uses or self._transform is not None):
            ticket.ready = self._events.popleft() if self._events else self._device.new_event()
            self._device.record(ticket.ready, stream)  # contract 3: what `deliver` makes the consumer's stream wait for
            self._record_uses(ticket, self.consumer_stream)
        return ticket

    def deliver(self, ticket: Ticket, stream: Stream) -> Any:
        """Take a batch over for ``stream``, the consumer's current one. The host does not wait."""
        if ticket.ready is not None:
            self._device.wait(stream, ticket.ready)  # contract 3: ordered by an event, on the stream of this moment
            if stream is not ticket.used_on:
                self._record_uses(ticket, stream)
            if ticket.check is not None:
                self._device.synchronize(ticket.ready)
            self._events.append(ticket.ready)
        if ticket.check is not None:
            _verify(ticket.check)
        ticket.uses = ()
        batch, ticket.batch = ticket.batch, None
        return batch

    def seal(self, ticket: Ticket, stream: Stream) -> None:
        """A batch made on ``stream``, the consumer's, is not taken at once: what takes it may run on another stream."""
        if ticket.ready is None and not ticket.final and self._device.staged:
            if not ticket.uses:
                ticket.uses = self._distinct(find_tensors(ticket.batch))
            ticket.ready = self._device.new_event()
            self._device.record(ticket.ready, stream)  # contract 3, and by way of it contract 4, in `deliver`
            ticket.used_on = stream

    def verify(self, ticket: Ticket) -> None:
        """``checked=True`` where nobody may wait at delivery: wait for the copy now, and compare."""
        check, ticket.check, ready = ticket.check, None, ticket.ready
        if check is not None:
            if ready is not None:
                self._device.synchronize(ready)
            _verify(check)

    def _record_uses(self, ticket: Ticket, stream: Stream) -> None:
        """Contract 4: the memory is not recycled while ``stream`` may still read it.

        Done when sending, for the stream that the consumer used last: microseconds an allocation that its thread does
        not spend (docs/performance.md). Delivery to another stream does it again.
        """
        if stream is not None:
            for tensor in ticket.uses:
                self._device.record_use(tensor, stream)
            ticket.used_on = stream

    def close(self) -> None:
        """Wait for the copies under way and give the pinned memory back; in any thread."""
        with self._device.beside_captures(), self._device.on_copy_stream():
            self._close()

    def _close(self) -> None:
        self.lent.return_all()
        while self._held:
            event, _ = self._held.popleft()
            self._device.synchronize(event)  # contract 6: a pinned source outlives the copy out of it
        if self._copier is not None:
            copier, self._copier = self._copier, None
            copier.close()
        if self._ring is not None:
            self._ring.close()

    # One batch

    def _send_leaves(
        self, leaves: list[Any], ticket: Ticket, stream: Stream, caller: Stream, *, reusable_source: bool
    ) -> list[Any]:
        device = self._device
        plan = self._plans.get(leaves)
        out: list[Any] = list(leaves)
        uses: list[torch.Tensor] = []
        if plan.layout is not None:
            ticket.nbytes = plan.layout.nbytes
            packed = leaves if len(plan.packed) == len(leaves) else [leaves[i] for i in plan.packed]
            arrived, memory = self._send_packed(plan.layout, packed, stream)
            uses += memory
            for i, tensor in zip(plan.packed, arrived, strict=True):
                out[i] = tensor
        if plan.pinned:
            ticket.nbytes += self._send_pinned(plan.pinned, leaves, out, uses, stream, reusable_source=reusable_source)
        for i in plan.moved:
            out[i] = move(leaves[i], device.torch_device)
            uses += self._distinct(find_tensors(out[i]))
        if plan.resident:
            uses += (leaves[i] for i in plan.resident)
            self._order_after(caller)
        if self._checked:
            self._remember(ticket, [(out[i], leaves[i].clone()) for i in plan.packed + plan.pinned])
        ticket.uses = uses
        return out

    def _send_from_worker(
        self, batch: WorkerBatch, ticket: Ticket, stream: Stream, caller: Stream
    ) -> list[torch.Tensor]:
        """A batch that lies packed in a worker's slot."""
        if batch.unpacked is not None or (self._device.staged and not batch.slot.pin()):
            return self._send_leaves(batch.unpacked or batch.unpack(), ticket, stream, caller, reusable_source=True)
        device, layout, slot = self._device, batch.layout, batch.slot
        moved: list[Any] = []
        uses: Sequence[torch.Tensor] = ()
        if batch.others:
            moved = self._send_leaves(batch.others, ticket, stream, caller, reusable_source=True)
            uses = ticket.uses
        sent = batch.copied_leaves() if self._checked else []
        arrived, memory = layout.allocate(device.empty, device.alloc, in_slab=device.staged)
        event = self.lent.new_event()
        probe = self._timer.probe(self._counters.recorder) if device.staged else None
        if probe is not None:
            probe.begin(stream)
        if not slot.begin_copy():
            raise IteratorClosedError("this pass has ended: it was closed while a batch was on its way")
        pieces = layout.pieces(slot.views.tensor, in_slab=device.staged)
        try:
            for target, piece in zip(memory, pieces, strict=True):
                device.copy(target, piece, stream)
        finally:
            # Contract 6: the worker writes the slot again when this event has passed, also after half a copy.
            device.record(event, stream)
            self.lent.add(event, batch.take_slot())
        if probe is not None:
            probe.end(stream, layout.nbytes)
            self._launched(probe)
        if self._checked:
            self._remember(ticket, list(zip(arrived, sent, strict=True)))
        ticket.nbytes += layout.nbytes
        self._counters.copied_bytes += layout.nbytes
        self._counters.shared_bytes += layout.nbytes
        ticket.uses = [*uses, *memory] if device.staged else uses
        return batch.placed(arrived, moved)

    def _send_packed(
        self, layout: Layout | FewLeaves, leaves: list[torch.Tensor], stream: Stream
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Through a slot; straight into the final memory where that is the host's."""
        device = self._device
        counters = self._counters
        if self._ring is not None and layout.nbytes > LARGE_BYTES and isinstance(layout, Layout):
            return self._send_in_pieces(layout, leaves, stream)
        counters.copied_bytes += layout.nbytes
        if self._ring is None or not layout.nbytes:
            arrived, memory = layout.allocate(device.empty, device.alloc, in_slab=device.staged)
            copy_all(layout.targets(arrived, memory), layout.sources(leaves))
            return arrived, []
        slot = self._slot(layout.nbytes)
        if slot is None:
            counters.pageable_bytes += layout.nbytes
            return self._send_pageable(layout, leaves, stream)
        counters.staged_bytes += layout.nbytes
        probe = self._timer.probe(counters.recorder)
        try:
            sent = stage(
                device,
                layout,
                slot,
                leaves=leaves,
                stream=stream,
                copier=self._copier_for(layout.nbytes),
                packers=self.packers,
                probe=probe,
            )
        finally:
            # Contract 6: the slot is free when this event has passed, also after a copy that failed half-way.
            device.record(slot.event, stream)
        if probe is not None:
            self._launched(probe)
        return sent

    def _copier_for(self, nbytes: int) -> Copier | None:
        """What packs so many bytes; None: torch does."""
        if self._copier is None and nbytes >= _SHARED_WORK_BYTES and has_native_copies():
            self._copier = Copier(self._threads)
        return self._copier

    def _slot(self, nbytes: int) -> Slot | None:
        assert self._ring is not None
        slot = self._ring.acquire(nbytes)
        if self._ring.waited_seconds:
            self._note_wait(self._ring.waited_seconds, "wait for a slot")
            self._ring.waited_seconds = 0.0
        return slot

    def _send_in_pieces(
        self, layout: Layout, leaves: list[torch.Tensor], stream: Stream
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        device, counters = self._device, self._counters
        probe = self._timer.probe(counters.recorder)
        copy = device.copy if probe is None else probe.copying(device.copy)

        def send(target: torch.Tensor, pack: Callable[[torch.Tensor], None]) -> None:
            nbytes = target.numel()
            counters.copied_bytes += nbytes
            slot = self._slot(nbytes)
            is_pageable = slot is None
            if slot is None:
                slot = self._pageable_slot(nbytes)
                counters.pageable_bytes += nbytes
            else:
                counters.staged_bytes += nbytes
            pack(slot.tensor)
            try:
                (device.copy if is_pageable else copy)(target, slot.tensor[:nbytes], stream)
            finally:
                device.record(slot.event, stream)  # contract 6, as in `_send_packed`
                if is_pageable:
                    device.synchronize(slot.event)  # contract 6: this piece goes when the function returns

        sent = stage_in_pieces(device, layout, leaves, send, copier=self._copier_for(layout.nbytes))
        if probe is not None and probe.all_bytes:
            self._launched(probe)
        return sent

    def _note_wait(self, seconds: float, what: str) -> None:
        self.times.slot_wait_seconds += seconds
        if self._counters.recorder is not None:
            now = self._counters.clock()
            self._counters.recorder.add("packing", what, now - seconds, now, self.number)

    def _launched(self, probe: Probe) -> None:
        recorder = self._counters.recorder
        if recorder is None or not recorder.add_copy(probe, self.number):
            self._timer.launched(probe)

    def _pageable_slot(self, nbytes: int) -> Slot:
        slot = Slot(self._device.new_event())
        slot.replace(PageableBlock(nbytes))
        return slot

    def _send_pageable(
        self, layout: Layout | FewLeaves, leaves: list[torch.Tensor], stream: Stream
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        slot = self._pageable_slot(layout.nbytes)
        try:
            return stage(self._device, layout, slot, leaves=leaves, stream=stream)
        finally:
            self._device.record(slot.event, stream)
            self._device.synchronize(slot.event)  # contract 6: this memory goes when the function returns

    def _send_pinned(
        self,
        which: list[int],
        leaves: list[Any],
        out: list[Any],
        uses: list[torch.Tensor],
        stream: Stream,
        *,
        reusable_source: bool,
    ) -> int:
        device = self._device
        sent = 0
        probe = self._timer.probe(self._counters.recorder)
        if probe is not None:
            probe.begin(stream)
        for i in which:
            leaf, flat = leaves[i], flat_bytes(leaves[i])
            out[i] = device.empty(leaf.shape, leaf.stride(), leaf.dtype)
            device.copy(out[i], flat, stream)
            uses.append(out[i])
            sent += flat.numel()
        self._counters.copied_bytes += sent
        self._counters.direct_bytes += sent
        if probe is not None:
            probe.end(stream, sent)
            self._launched(probe)
        event = device.new_event()
        device.record(event, stream)
        if reusable_source:
            # Contract 5: the loader may fill this memory again at its next batch, a newer pass when it begins, and the
            # loop, where it is its own.
            started = self._counters.clock()
            device.synchronize(event)
            self._note_wait(self._counters.clock() - started, "wait for the copy out of the loader's memory")
            return sent
        self._held.append((event, [leaves[i] for i in which]))  # contract 6: the source outlives the copy out of it
        while len(self._held) > 1 and device.query(self._held[0][0]):
            self._held.popleft()
        return sent

    def _order_after(self, caller: Stream) -> None:
        """A leaf that the loader made on the consumer's stream: the transform must not read it earlier."""
        if caller is not None and self._transform is not None:
            event = self._device.new_event()
            self._device.record(event, caller)
            self._device.wait(self._device.copy_stream, event)

    def _transformed(self, batch: Any, modes: ThreadState) -> Any:
        assert self._transform is not None
        self._device.before_transform()
        try:
            with modes.user_code():
                result = self._transform(batch)
        except StopIteration as stop:
            raise RuntimeError("transform raised StopIteration") from stop
        if result is None and batch is not None:
            raise TypeError("transform returned None; it must return the batch (it may return the one it was given)")
        return result

    def _distinct(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One tensor per allocation on the device."""
        found: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            with suppress(RuntimeError, NotImplementedError, TypeError):  # a wrapper without memory of its own
                if self._device.is_resident(tensor):
                    found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return list(found.values())

    def _remember(self, ticket: Ticket, check: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """``checked=True``: what was sent, to be compared on arrival; before the transform if there is one."""
        if self._transform is None:
            ticket.check = [*(ticket.check or ()), *check]
            return
        event = self._device.new_event()
        self._device.record(event, self._device.copy_stream)
        self._device.synchronize(event)
        _verify(check)


def _verify(check: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for number, (arrived, sent) in enumerate(check):
        here = arrived.cpu()
        is_like = here.dtype == sent.dtype and here.shape == sent.shape
        if not (is_like and torch.equal(flat_bytes(here.contiguous()), flat_bytes(sent.contiguous()))):
            raise CorruptBatchError(
                f"leaf {number} ({sent.dtype}, shape {tuple(sent.shape)}) is not on the device what the loader gave"
            )
