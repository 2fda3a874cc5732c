"""What the passes of one prefetcher share: memory, counters, the loader's state, batches carried over."""

from __future__ import annotations

import copy
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Sampler

from prefetchpipe.counters import Counters
from prefetchpipe.device.base import Device
from prefetchpipe.memory.pinned import PinnedMemory
from prefetchpipe.options import Options, usable_cores
from prefetchpipe.pipeline.asyncsource import AsyncSource, SourceLeftError
from prefetchpipe.pipeline.leaving import Leaving
from prefetchpipe.pipeline.threadtrial import ThreadTrial
from prefetchpipe.pipeline.ticket import Ticket
from prefetchpipe.pipeline.timing import CopyTimer
from prefetchpipe.pipeline.transfer import Transfer
from prefetchpipe.pipeline.twins import Twins

if TYPE_CHECKING:
    from prefetchpipe.stats import Stats

__all__ = ["CapturedState", "Shared", "can_rewind", "start_source"]

_OWN_REFERENCES = 4
"""To a source that nobody else holds, where it is counted: the producer's, two variables, and the count's own."""


@dataclass(frozen=True, slots=True)
class CapturedState:
    """The loader's state at one moment, or the error that asking for it gave: raised when somebody wants it."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        """A copy of the state."""
        if self.error is not None:
            raise self.error
        return _copied(self.value)


class Shared:
    """Held by the passes and by the prefetcher; holds neither.

    Locks are reentrant: the collector may end one pass while another one is in here.
    """

    def __init__(self, loader: Any, device: Device, options: Options) -> None:
        self.loader = loader
        self.device = device
        self.options = options
        self.counters = Counters(options.depth)
        self.memory = PinnedMemory(device, options.max_pinned_bytes)
        self.twins = Twins(loader, device, options, self.memory, self.counters)
        self.timer = CopyTimer(device, self.counters)
        self.depth_warned = False
        self.thread_trial: ThreadTrial | None = None
        self.thread_pays: bool | None = None
        """Whether a thread that was to hide the loop's own work has done so; None: not tried."""
        self.thread_reason = ""
        self.newest: weakref.ref[Leaving] | None = None
        self.state: CapturedState | None = None
        self.has_state = callable(attribute(loader, "state_dict"))
        self._generators = _own_generators(loader)
        self._pid = os.getpid()
        self.lock = threading.RLock()  # guards what follows, and the end of each pass
        self._idle: list[Transfer] = []
        self._leased: dict[int, int] = {}
        self._generation = 0
        self._carried: tuple[Any, list[Ticket]] | None = None
        self.async_source: AsyncSource | None = None
        """Over the loader, where that is an asynchronous iterator itself."""

    def lease_transfer(self) -> Transfer:
        """A transfer for one pass, with the pinned ring of an earlier one where there is one."""
        with self.lock:
            transfer = self._idle.pop() if self._idle else None
        if transfer is None:
            transfer = Transfer(self.device, self.options, self.memory, self.counters, self.timer)
        with self.lock:
            self._leased[id(transfer)] = self._generation
        return transfer

    def return_transfer(self, transfer: Transfer) -> None:
        """One idle ring is kept for the next pass; the memory of others, and of closed passes, goes back."""
        with self.lock:
            if self._leased.pop(id(transfer), -1) == self._generation and not self._idle:
                self._idle.append(transfer)
                return
        transfer.close()

    def close(self) -> None:
        """Give back what idle passes hold; those under way give back theirs when they end."""
        if self._pid != os.getpid():
            # A forked child has copies of these objects, not the device; a thread that it has not may hold the lock.
            self.twins.close()  # its own, if it has started a pass
            return
        with self.lock:
            self._generation += 1
            idle, self._idle = self._idle, []
            self._carried = None
            source, self.async_source = self.async_source, None
        if source is not None:
            source.cancel()
        for transfer in idle:
            transfer.close()
        self.twins.close()

    # One-shot sources

    def carry(self, source: Any, tickets: list[Ticket]) -> bool:
        """Keep batches that were taken out of ``source`` and not delivered, if it may be iterated again.

        It may if somebody holds it: it is the loader itself, or the loader keeps it and hands it out again.

        Returns:
            Whether they are kept.
        """
        if isinstance(source, AsyncSource) and source.own:
            return False  # made for the pass that ends
        tickets = [ticket for ticket in tickets if not isinstance(ticket.error, SourceLeftError)]
        if sys.getrefcount(source) <= _OWN_REFERENCES:
            return False
        with self.lock:
            before = self._carried[1] if self._carried is not None and self._carried[0] is source else []
            self._carried = source, before + tickets
        return True

    def take_carried(self, source: Any) -> list[Ticket]:
        """What an earlier pass over the same source left; the next pass begins with it."""
        with self.lock:
            carried, self._carried = self._carried, None
        return carried[1] if carried is not None and carried[0] is source else []

    def start_source(self) -> tuple[Any, bool]:
        """``iter(loader)``, and whether that may have rewound it."""
        return start_source(self.loader, self._iterate)

    def _iterate(self, loader: Any) -> Any:  # noqa: ARG002 - its twin may stand in for it
        iterable = self.twins.iterable()
        source = iter(iterable)
        self.twins.bind(source, iterable)
        return source

    # Random generators of the loader's own

    @property
    def has_generators(self) -> bool:
        """Whether the user gave some to the DataLoader or its sampler."""
        return bool(self._generators)

    def capture_draws(self) -> list[torch.Tensor] | None:
        """The states of the generators that the user gave to the DataLoader or its sampler."""
        return [generator.get_state() for generator in self._generators] or None

    def restore_draws(self, producer: Leaving, taken: Any, sent: Any) -> None:
        """A pass is left: take back what was drawn for batches beyond the last one taken.

        Torch's sampler draws once more behind the last batch, so a later pass would go on elsewhere than after the
        plain loop. Not if anybody has drawn or seeded since.
        """
        if taken is None or sent is None or not self.is_newest(producer):
            return
        for generator, before, after in zip(self._generators, taken, sent, strict=True):
            if torch.equal(generator.get_state(), after):
                generator.set_state(before)

    # For stats() and state_dict()

    def note_path(self, path: str, reason: str) -> None:
        """For ``stats()``."""
        self.counters.path = path
        self.counters.path_reason = reason

    def snapshot(self, device_bytes: int) -> Stats:
        """For ``stats()``, in any thread.

        Args:
            device_bytes: What the passes have on the device and nobody has taken.
        """
        from prefetchpipe.stats import Stats, known_limits  # late: nobody waits for it at import

        counters, options, loader = self.counters, self.options, self.loader
        with self.device.beside_captures():
            self.timer.collect()
        times, warm = counters.steady.snapshot(), counters.warm_up.snapshot()
        with self.lock:
            carried = self._carried[1] if self._carried is not None else ()
        workers = loader.num_workers if isinstance(loader, DataLoader) else None
        return Stats(
            device=repr(self.device),
            loader=type(loader).__name__,
            num_workers=workers,
            persistent_workers=bool(workers and loader.persistent_workers),
            workers=(counters.workers or "plain") if workers else "none",
            workers_reason=counters.workers_reason,
            passes=counters.passes,
            batches=counters.batches,
            copied_bytes=counters.copied_bytes,
            staged_bytes=counters.staged_bytes,
            direct_bytes=counters.direct_bytes,
            pageable_bytes=counters.pageable_bytes,
            shared_bytes=counters.shared_bytes,
            largest_batch_bytes=counters.largest_batch_bytes,
            pinned_bytes=self.memory.held_bytes,
            pinned_allocations=self.memory.allocations,
            pinned_limit_bytes=options.max_pinned_bytes,
            device_bytes=device_bytes + sum(ticket.nbytes for ticket in carried),
            peak_device_bytes=counters.peak_device_bytes,
            start_seconds=counters.start_seconds,
            fetch_seconds=times.fetch_seconds + warm.fetch_seconds,
            send_seconds=times.send_seconds + warm.send_seconds,
            transform_seconds=times.transform_seconds + warm.transform_seconds,
            slot_wait_seconds=times.slot_wait_seconds + warm.slot_wait_seconds,
            device_wait_seconds=times.device_wait_seconds + warm.device_wait_seconds,
            stall_seconds=times.stall_seconds + warm.stall_seconds,
            handover_seconds=times.handover_seconds + warm.handover_seconds,
            next_seconds=times.next_seconds + warm.next_seconds,
            loop_seconds=times.loop_seconds + warm.loop_seconds,
            gil_probes=counters.gil_probes,
            gil_waits=counters.gil_waits,
            gil_wait_seconds=counters.gil_wait_seconds,
            timed_copies=counters.timed_copies,
            timed_bytes=counters.timed_bytes,
            timed_seconds=counters.timed_seconds,
            depth=counters.depth,
            depth_asked=options.depth,
            depth_reached=counters.depth_reached,
            copy_threads=options.copy_threads or usable_cores(),
            usable_cores=usable_cores(),
            path=counters.path,
            path_reason=counters.path_reason,
            limits=known_limits(self.device),
            steady=times,
        )

    def capture_state(self, producer: Leaving) -> CapturedState | None:
        """The loader's state now, for the batch just fetched (contract 11)."""
        if not self.has_state or not self.is_newest(producer):
            return None
        try:
            return CapturedState(_copied(self.twins.state_of(producer.source)))
        except Exception as error:  # noqa: BLE001 - the loop did not ask for it; who does will see it
            return CapturedState(error=error)

    def is_newest(self, producer: Leaving) -> bool:
        """Whether the loader's state is about this pass."""
        return self.newest is not None and self.newest() is producer


def start_source(loader: Any, iterate: Callable[[Any], Any] = iter) -> tuple[Any, bool]:
    """``iter(loader)``, and whether that may have rewound it.

    A loader whose own ``__iter__`` resets it and returns it cannot be told from one that just returns itself, except by
    what the call changes.
    """
    may_rewind = can_rewind(loader)
    before = _simple_attributes(loader) if may_rewind else None
    source = iterate(loader)
    return source, may_rewind and before != _simple_attributes(loader)


def can_rewind(loader: Any) -> bool:
    """Whether ``iter(loader)`` runs Python code of its class; that of a generator, say, gives the generator itself."""
    method = getattr(type(loader), "__iter__", None)
    return hasattr(method, "__code__") and method is not Iterator.__iter__


def attribute(owner: Any, name: str) -> Any:
    """``getattr`` with None for anything that goes wrong: looking must not break a loader that the plain loop takes."""
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001 - whatever a user's __getattr__ raises
        return None


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Of a DataLoader without or with workers: what its samplers draw from, if that is not a global generator.

    Frameworks put a sampler into one of their own, and that into another.
    """
    if not isinstance(loader, DataLoader):
        return []
    places: list[Any] = [loader]
    found = {}
    for place in places:  # grows
        generator = attribute(place, "generator")
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        inner = attribute(place, "__dict__")
        samplers = [value for value in inner.values() if isinstance(value, Sampler)] if isinstance(inner, dict) else []
        places += [sampler for sampler in samplers if not any(sampler is known for known in places)]
    return list(found.values())


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - a state that cannot be copied is handed on as the loader gave it
        return value


def _simple_attributes(loader: Any) -> list[tuple[str, object]]:
    values = attribute(loader, "__dict__")
    if not isinstance(values, dict):
        return [("", object())]  # no way to see: counts as changed
    return [
        (name, value if isinstance(value, (bool, int, float, str)) else id(value)) for name, value in values.items()
    ]
