"""The short way of a batch that the caller fetches: a flat container of few plain tensors (contract 16).

What such a batch costs is mostly Python, not bytes. So nothing is planned, no ticket is made and nothing is handed
over: its leaves are packed, copied and handed out in one go. Small ones are copied on the consumer's own stream, where
nothing has to be ordered; the others on the copy stream, as everywhere else.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from prefetchpipe.batch.few import FewLeaves
from prefetchpipe.batch.layout import ALIGNMENT, PACKABLE_DTYPES
from prefetchpipe.batch.rows import copy_all
from prefetchpipe.counters import Counters
from prefetchpipe.device.base import Device, Event, Stream
from prefetchpipe.memory.ring import Slot, SlotRing
from prefetchpipe.native import Copier
from prefetchpipe.pipeline.staging import LARGE_BYTES
from prefetchpipe.pipeline.timing import CopyTimer

if TYPE_CHECKING:
    from prefetchpipe.pipeline.shared import Shared

__all__ = ["NOT_SHORT", "SMALL_BYTES", "ShortSender", "ShortWay"]

NOT_SHORT: Any = object()
"""In the place of a batch: it has to go the usual way."""

SMALL_BYTES = 256 << 10
"""A copy of this takes 5 us on the wire (by arithmetic, at 55 GB/s): less than ordering it across two streams costs
the host."""

_MARK_EVERY = 8
_MARKS = 3
"""The host is at most one more than so many times eight small batches ahead of the device. With a bound of four batches
it waits at every one, and to be woken takes longer than the batch (docs/performance.md, part O)."""

_SLACK_SECONDS = 50e-6
"""A batch: so long does the host wait for the device, as a mean, before small batches go over the copy stream too."""

_SETTLED_BATCHES = 6
"""Of a pass, which go the usual way: they show whether the loader draws random numbers, and whether a thread pays."""

_PINNED_CHECK = 8
"""Every so many batches it is asked whether they are pinned: to be copied from where they are, the usual way."""

_MOST_LEAVES = 8

_AS_THEY_ARE = frozenset((int, float, str, bool, type(None)))

_look = attrgetter("is_cpu", "layout", "requires_grad", "is_nested")
"""In C: a batch that has just been copied has left the processor's caches to pixels, so each step counts twice."""
_PLAIN = (True, torch.strided, False, False)


class ShortWay:
    """Whether batches of one pass go the short way.

    Attributes:
        is_on: The next one does.
        is_over: None of this pass does any more.
    """

    __slots__ = ("_batches", "is_on", "is_over")

    def __init__(self) -> None:
        self._batches = 0
        self.is_on = self.is_over = False

    @classmethod
    def for_pass(cls, shared: Shared, *, suits: bool) -> ShortWay | None:
        """None where it cannot be: whatever wants more of a batch than its bytes."""
        options = shared.options
        if not (suits and options.fetch != "thread" and shared.device.staged):
            return None
        if options.transform is not None or options.checked or options.static or shared.has_state:
            return None
        return None if shared.has_generators else cls()

    def after_usual(self) -> None:
        """A batch was handed out that the caller fetched the usual way."""
        self._batches += 1
        self.is_on = self._batches >= _SETTLED_BATCHES

    def give_up(self) -> None:
        """The usual way from here on."""
        self.is_on = False
        self.is_over = True


class ShortSender:
    """Brings batches to the device, for the passes that one :class:`~prefetchpipe.pipeline.transfer.Transfer` serves.

    Args:
        device: Where batches go.
        ring: Slots for all but small batches.
        counters: Bytes are added here.
        timer: Measures some of the copies.
        copier: What packs so many bytes; None: torch does.
        has_limit: Page-locked memory is limited, so all of it has to be counted.

    Attributes:
        waited_seconds: Of the last :meth:`send`, for the device.
    """

    def __init__(
        self,
        device: Device,
        ring: SlotRing,
        counters: Counters,
        timer: CopyTimer,
        *,
        copier: Callable[[int], Copier | None],
        has_limit: bool,
    ) -> None:
        self._device = device
        self._copier = copier
        self._ring = ring
        self._counters = counters
        self._timer = timer
        self._most_small = self._most_bytes = -1 if has_limit else SMALL_BYTES
        self._waited = 0.0
        self._batches = 0
        self._small_batches = 0
        self._marks: deque[Event] = deque()
        self.waited_seconds = 0.0

    def nbytes_of(self, batch: Any) -> tuple[int, list[torch.Tensor]]:
        """Bytes of a slot for ``batch``, and its tensors; -1 bytes if it cannot go this way."""
        leaves = _leaves_of(batch)
        try:
            nbytes, largest, tensors = (0, None, []) if len(leaves) > _MOST_LEAVES else self._extent_of(leaves)
        except RuntimeError:  # a tensor without memory: the zeros of forward-mode differentiation
            return -1, []
        if largest is None or nbytes > LARGE_BYTES:
            return -1, []
        if self._batches % _PINNED_CHECK == 0 and self._device.is_pinned(largest):
            return -1, []
        self._batches += 1
        return nbytes, tensors

    def _extent_of(self, leaves: Any) -> tuple[int, torch.Tensor | None, list[torch.Tensor]]:
        """Bytes of a slot for ``leaves``, the largest, and the tensors; no largest if they cannot go this way."""
        device = self._device
        largest, most, nbytes = None, 0, 0
        tensors: list[torch.Tensor] = []
        storages: list[int] = []
        for leaf in leaves:
            if type(leaf) is torch.Tensor:
                flags, own = _look(leaf), leaf.nbytes
                if flags != _PLAIN or not own or leaf.dtype not in PACKABLE_DTYPES or not _is_as_it_lies(leaf):
                    return 0, None, tensors
                if device.host_memory and device.is_resident(leaf):
                    return 0, None, tensors
                nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT + own
                tensors.append(leaf)
                storages.append(leaf.untyped_storage().data_ptr())
                if own > most:
                    largest, most = leaf, own
            elif type(leaf) not in _AS_THEY_ARE:
                return 0, None, tensors
        # Contract 12: leaves that share memory go on sharing it.
        return nbytes, (largest if len(set(storages)) == len(storages) else None), tensors

    def send(self, batch: Any, nbytes: int, tensors: list[torch.Tensor], stream: Stream) -> Any:
        """The batch on the device, for ``stream``, the consumer's current one.

        All bytes have left its leaves when it returns (contract 5).

        Args:
            batch: For which :meth:`nbytes_of` holds.
            nbytes: What that gave.
            tensors: The same.
            stream: What is queued there from now on sees the batch.

        Returns:
            ``NOT_SHORT`` if page-locked memory was refused.
        """
        leaves: Any = _leaves_of(batch)
        device, counters = self._device, self._counters
        self.waited_seconds = 0.0
        if self._is_small(nbytes, stream):
            try:
                arrived = [device.copy_small(leaf) for leaf in tensors]
            except (RuntimeError, MemoryError):  # contract 15: the usual way does with less memory, or raises again
                return NOT_SHORT
        else:
            slot = self._ring.acquire(nbytes)
            if self._ring.waited_seconds:
                counters.steady.slot_wait_seconds += self._ring.waited_seconds
                self._ring.waited_seconds = 0.0
            if slot is None:
                return NOT_SHORT
            with device.on_copy_stream():
                arrived, memory = self._copied(tensors, slot, device.copy_stream)
            device.wait(stream, slot.event)  # contract 3
            for tensor in memory:
                device.record_use(tensor, stream)  # contract 4: it is of the copy stream's pool
        counters.copied_bytes += nbytes
        counters.staged_bytes += nbytes
        out: list[Any] = arrived
        if len(out) < len(leaves):
            rest = iter(arrived)
            out = [next(rest) if type(leaf) is torch.Tensor else leaf for leaf in leaves]
        kind = type(batch)
        if kind is list:
            return out
        if kind is tuple:
            return tuple(out)
        return dict(zip(batch, out, strict=True)) if kind is dict else out[0]

    def _is_small(self, nbytes: int, stream: Stream) -> bool:
        """Whether a batch is copied on the consumer's stream; and what is done every so many of these."""
        is_small = nbytes <= self._most_small
        if nbytes <= self._most_bytes:
            self._small_batches += 1
            if self._small_batches % _MARK_EVERY == 0:
                self._choose(is_small=is_small)
                if is_small:
                    self._bound(stream)
        return is_small

    def is_marked(self, nbytes: int) -> bool:
        """Whether the consumer's stream is marked before a batch of so many bytes (contract 8): not a small one."""
        return nbytes > self._most_small

    def _choose(self, *, is_small: bool) -> None:
        """How the small batches after this one go.

        On the consumer's own stream a copy takes time from its kernels. Where the host waits for those anyway, it has
        the time for the copy stream (contract 16).
        """
        waited = self._counters.steady.device_wait_seconds
        slack = waited - self._waited
        self._waited = waited
        is_behind = slack > (_SLACK_SECONDS * _MARK_EVERY if is_small else 0.0)
        self._most_small = -1 if is_behind else self._most_bytes

    def _bound(self, stream: Stream) -> None:
        """Contract 14: page-locked memory of small batches is not free again before the device has come to them."""
        device, marks = self._device, self._marks
        event = marks.popleft() if len(marks) >= _MARKS else device.new_event()
        if not device.query(event):  # a new one has passed
            started = self._counters.clock()
            device.synchronize(event)
            self.waited_seconds = self._counters.clock() - started
        device.record(event, stream)
        marks.append(event)

    def _copied(
        self, leaves: list[torch.Tensor], slot: Slot, stream: Stream
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The leaves on the device, and one tensor for each piece of its memory."""
        device, buffer, layout = self._device, slot.tensor, FewLeaves(leaves)
        copier = self._copier(layout.nbytes)
        if copier is None:
            arrived, memory = layout.allocate(device.empty, device.alloc)
            copy_all(layout.slot_views(buffer), layout.sources(leaves))
        else:
            addresses, offsets, sizes = layout.addresses(leaves)
            try:
                copier.start(buffer.data_ptr(), array("Q", addresses), offsets, sizes)
                arrived, memory = layout.allocate(device.empty, device.alloc)
            finally:
                copier.finish()  # contract 5; also if the device is full: the slot is being written
        probe = self._timer.probe(None)
        if probe is not None:
            probe.begin(stream)
        try:
            for target, piece in zip(memory, layout.pieces(buffer), strict=True):
                device.copy(target, piece, stream)
        finally:
            device.record(slot.event, stream)  # contract 6: also after a copy that failed half-way
        if probe is not None:
            probe.end(stream, layout.nbytes)
            self._timer.launched(probe)
        return arrived, memory


def _is_as_it_lies(leaf: torch.Tensor) -> bool:
    """Whether the values of a strided tensor are its bytes, in order."""
    return leaf.is_contiguous() and not leaf.is_neg() and not (leaf.is_complex() and leaf.is_conj())


def _leaves_of(batch: Any) -> Any:
    """Of a flat container; none for another kind."""
    kind = type(batch)
    if kind is tuple or kind is list:
        return batch
    if kind is dict:
        return batch.values()
    return (batch,) if kind is torch.Tensor else ()
