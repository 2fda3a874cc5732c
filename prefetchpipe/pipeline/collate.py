"""The worker's side of the worker path: a collate function that packs its batch into shared memory.

Runs in the worker processes of a DataLoader. What crosses the queue to the parent is a description of some
hundred bytes, which :mod:`prefetchpipe.pipeline.workers` reads there.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from time import monotonic, sleep
from typing import Any, NamedTuple

from torch.utils.data import default_collate, get_worker_info

from prefetchpipe.batch.few import FewLeaves
from prefetchpipe.batch.job import pack_alone
from prefetchpipe.batch.layout import Layout
from prefetchpipe.batch.plan import Plan, PlanCache
from prefetchpipe.batch.tree import WalkCache, flatten
from prefetchpipe.device.cpu import cpu_device
from prefetchpipe.memory.ring import Slot
from prefetchpipe.memory.shared import Segment
from prefetchpipe.pipeline.datasets import collate

__all__ = ["BUSY", "FREE", "STATE", "STOP", "Message", "WorkerCollate"]

STATE = 0
"""The flag of a slot: the worker makes it busy, the parent makes it free (contract 6)."""
FREE, BUSY = 0, 1
STOP = 0
"""The flag of the control segment: not 0 once the parent takes no more batches."""

_PAGE = 4096
_FIRST_WAIT_SECONDS = 50e-6
_LONGEST_WAIT_SECONDS = 2e-3
_PATIENCE_SECONDS = 5.0
"""After this long without a free slot a batch goes torch's way: whatever holds the slots, nothing hangs."""
_KNOWN_PLANS = 128

Receive = Callable[..., Any]


class WorkerCollate:
    """Takes the place of ``collate_fn`` in a copy of the user's DataLoader.

    Args:
        inner: The user's collate function.
        token: Names the parent's side.
        receive: Called in the parent with what was sent; a module-level function.
        control: Its flag says when the parent has stopped.
        slots: Most slots a worker may have.
        ahead: Of these, how many it may need for batches that it has ready.
        limit: Most bytes of slots a worker may have; None: no limit.
        keep_arrays: NumPy arrays in a batch stay arrays, as in :class:`prefetchpipe.batch.tree.WalkCache`.
        anonymous: See :meth:`prefetchpipe.memory.shared.Segment.create`.
    """

    def __init__(
        self,
        inner: Callable[[Any], Any],
        token: str,
        receive: Receive,
        *,
        control: Segment,
        slots: int,
        ahead: int,
        limit: int | None,
        keep_arrays: bool = False,
        anonymous: bool = True,
    ) -> None:
        self.inner = inner
        self.token = token
        self.receive = receive
        self.control = control
        self.slots = slots
        self.ahead = ahead
        self.limit = limit
        self.keep_arrays = keep_arrays
        self.anonymous = anonymous
        self._packer: _Packer | None = None

    def __call__(self, samples: Any) -> Any:
        """The batch, packed; as the user's function gave it where it cannot be."""
        packer = self._packer
        if packer is None:  # never in the parent: a collate function runs in the workers
            packer = self._packer = _Packer(self)
        return packer.pack(samples)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packer": None}


class Message(NamedTuple):
    """A packed batch as it crosses the queue."""

    token: str
    """Names the parent's side."""
    worker: int
    slot: int
    handle: Any
    """Opens the segment; None if the parent has it."""
    dropped: tuple[int, ...]
    """Slots whose segments the worker has let go."""
    kept: int
    """Most slots that the parent may keep for copies under way while it waits for this worker."""
    plan: int
    """Names the batch's plan: the layout, and which leaves it holds."""
    is_first: bool
    """Plans named before are to be forgotten."""
    definition: bytes | None
    """Pickled: the plan, where the parent does not know it."""
    payload: bytes
    """Pickled: the structure, and the leaves that were not packed."""


class _Sent:
    """A packed batch on its way: its pickled form is a call of ``receive`` in the parent."""

    __slots__ = ("_message", "_receive")

    def __init__(self, receive: Receive, message: Message) -> None:
        self._receive = receive
        self._message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return self._receive, (self._message,)


class _Pickled:
    """A batch on torch's way that is pickled already."""

    __slots__ = ("_payload",)

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._payload,)


class _WorkerSlot:
    """A slot of this worker's: a segment that is replaced by a larger one when a batch does not fit."""

    __slots__ = ("announced", "number", "segment", "serial", "views")

    def __init__(self, number: int) -> None:
        self.number = number
        self.serial = 0
        self.announced = 0
        self.segment: Segment | None = None
        self.views = Slot(None)

    @property
    def nbytes(self) -> int:
        return self.views.nbytes

    def is_free(self) -> bool:
        """Whether the parent has given it back: its copies have passed (contract 6)."""
        return self.segment is None or self.segment.flags[STATE] == FREE

    def is_dropped(self) -> bool:
        """Whether the parent has a segment of it that is no more; says so once."""
        if self.segment is not None or self.announced == self.serial or not self.announced:
            return False
        self.announced = self.serial
        return True

    def replace(self, segment: Segment | None) -> None:
        self.segment = segment
        self.serial += 1
        self.views.replace(segment)


class _Packer:
    """The state of one worker process."""

    def __init__(self, options: WorkerCollate) -> None:
        info = get_worker_info()
        self._worker = -1 if info is None else info.id
        self._parent = os.getppid()
        self._options = options
        self._stacks = options.inner is default_collate
        self._plans = PlanCache(cpu_device())
        self._walk = WalkCache(keep_arrays=options.keep_arrays)
        self._slots: list[_WorkerSlot] = []
        self._largest = 0
        self._promised = 0
        self._known: dict[int, tuple[int, Plan]] = {}
        self._plan_count = 0

    def pack(self, samples: Any) -> Any:
        """See :meth:`WorkerCollate.__call__`."""
        options = self._options
        batch = collate(samples, worth=1) if self._stacks else options.inner(samples)
        leaves: list[Any] = []
        spec = flatten(batch, leaves, self._walk)
        plan = self._plans.get(leaves)
        if plan.layout is None or not plan.layout.nbytes:
            return _Pickled(_pickled(batch))
        sent = self._sent(plan, spec, leaves) if self._fits(plan.layout.nbytes) else None
        return _Pickled(_pickled(self._plain(batch, samples))) if sent is None else sent

    def _plain(self, batch: Any, samples: Any) -> Any:
        return default_collate(samples) if self._stacks else batch

    def _sent(self, plan: Plan, spec: Any, leaves: list[Any]) -> _Sent | None:
        """The batch in a slot; None where it cannot be."""
        layout = plan.layout
        assert layout is not None
        try:
            payload = _pickled((spec, [leaves[i] for i in plan.moved]))
        except Exception:  # noqa: BLE001 - what pickling raises is anybody's, and torch's way says it again
            return None
        slot = self._acquire(layout.nbytes)
        if slot is None:
            return None
        self._fill(slot, layout, [leaves[i] for i in plan.packed])
        return _Sent(self._options.receive, self._message(slot, plan, len(leaves), payload))

    def _message(self, slot: _WorkerSlot, plan: Plan, count: int, payload: bytes) -> Message:
        """Last of all: what it says counts as known to the parent from here on."""
        assert slot.segment is not None
        number, definition, is_first = self._definition(plan, count)
        handle = slot.segment.handle if slot.announced != slot.serial else None
        slot.announced = slot.serial
        dropped = tuple(other.number for other in self._slots if other.is_dropped())
        return Message(
            token=self._options.token,
            worker=self._worker,
            slot=slot.number,
            handle=handle,
            dropped=dropped,
            kept=self._promise(),
            plan=number,
            is_first=is_first,
            definition=definition,
            payload=payload,
        )

    def _definition(self, plan: Plan, count: int) -> tuple[int, bytes | None, bool]:
        """The number under which the parent knows ``plan``, and the plan itself where it does not yet."""
        known = self._known.get(id(plan))
        if known is not None:
            return known[0], None, False
        is_first = len(self._known) >= _KNOWN_PLANS or not self._known
        if is_first:  # the parent forgets them with this message too
            self._known.clear()
        self._plan_count += 1
        self._known[id(plan)] = self._plan_count, plan
        return self._plan_count, _pickled((plan.layout, plan.packed, plan.moved, count)), is_first

    def _fill(self, slot: _WorkerSlot, layout: Layout | FewLeaves, packed: list[Any]) -> None:
        assert slot.segment is not None
        slot.segment.flags[STATE] = BUSY
        try:
            pack_alone(slot.views, layout, packed)
        except BaseException:
            slot.segment.flags[STATE] = FREE
            raise

    # Slots

    def _fits(self, nbytes: int) -> bool:
        limit = self._options.limit
        return limit is None or nbytes <= limit

    def _promise(self) -> int:
        """How many slots the parent may keep: whatever that is, one more is left for a batch of the largest size."""
        options = self._options
        self._promised = self._largest
        slots = options.slots
        if options.limit is not None:
            slots = min(slots, options.limit // self._rounded(self._largest))
        return min(1, slots - 1) if slots <= options.ahead else slots - options.ahead

    def _acquire(self, nbytes: int) -> _WorkerSlot | None:
        """A free slot of at least ``nbytes``; None where there is none to be had."""
        self._largest = max(self._largest, nbytes)
        deadline = 0.0
        pause = _FIRST_WAIT_SECONDS
        while True:
            slot = self._free_slot(nbytes)
            if slot is not None:
                return slot if slot.nbytes >= nbytes or self._grow(slot) else None
            if self._is_over() or not self._will_be_free(nbytes):
                return None
            now = monotonic()
            deadline = deadline or now + _PATIENCE_SECONDS
            if now > deadline:
                return None
            sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_SECONDS)

    def _free_slot(self, nbytes: int) -> _WorkerSlot | None:
        free = [slot for slot in self._slots if slot.is_free()]
        for slot in free:
            if slot.nbytes >= nbytes:
                return slot
        if len(self._slots) < self._options.slots and self._room(None):
            self._slots.append(_WorkerSlot(len(self._slots)))
            return self._slots[-1]
        for slot in free:
            if self._room(slot):
                return slot
        # Within the limit one large slot may have to take the place of several small ones.
        held = sum(slot.nbytes for slot in self._slots if slot not in free)
        if free and self._options.limit is not None and held + self._rounded(self._largest) <= self._options.limit:
            for slot in free[1:]:
                slot.replace(None)
            return free[0]
        return None

    def _will_be_free(self, nbytes: int) -> bool:
        """Whether the parent gives a slot back while it waits for this batch: what it keeps was promised for a size."""
        return self._options.limit is None or nbytes <= self._promised

    def _room(self, instead: _WorkerSlot | None) -> bool:
        """Whether the limit allows a slot of the largest size, in the place of ``instead``."""
        limit = self._options.limit
        if limit is None:
            return True
        others = sum(slot.nbytes for slot in self._slots if slot is not instead)
        return others + self._rounded(self._largest) <= limit

    def _rounded(self, nbytes: int) -> int:
        limit = self._options.limit
        whole = -(-nbytes // _PAGE) * _PAGE
        return whole if limit is None else min(whole, limit)

    def _grow(self, slot: _WorkerSlot) -> bool:
        """To the largest batch of this worker so far, exactly: slots of one size serve all its batches."""
        slot.replace(None)  # the old memory goes first
        try:
            segment = Segment.create(self._rounded(self._largest), anonymous=self._options.anonymous)
        except (OSError, RuntimeError, ValueError):
            return False
        slot.replace(segment)
        return True

    def _is_over(self) -> bool:
        """Nobody will give a slot back: the parent has stopped, or is gone."""
        return self._options.control.flags[STOP] != 0 or os.getppid() != self._parent


def _pickled(value: Any) -> bytes:
    buffer = BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
