"""Which loader a pass iterates over: the user's own, or a copy of it whose workers write into shared memory.

The user's DataLoader is not changed. A shallow copy, its twin, gets a collate function of ours; samplers, generators
and data set are the user's own objects, the worker processes are the twin's.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from typing import Any

from torch.utils.data import DataLoader

from prefetchpipe.counters import Counters
from prefetchpipe.device.base import Device
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.memory.pinned import PinnedMemory
from prefetchpipe.options import Options
from prefetchpipe.pipeline import torchloader
from prefetchpipe.pipeline.collate import WorkerCollate
from prefetchpipe.pipeline.queues import direct_context
from prefetchpipe.pipeline.workers import SlotTable, receive

__all__ = ["Twins"]

_STATEFUL_MODULE = "torchdata.stateful_dataloader.stateful_dataloader"
_TABLE = "_prefetchpipe_slots"
"""Attribute of a twin, and of torch's iterator over it: the slots live as long as these do."""


class Twins:
    """Of one prefetcher.

    Args:
        loader: The user's loader.
        device: Where batches go.
        options: ``workers``, ``max_pinned_bytes``, ``checked``.
        memory: Page-locks what the workers write.
        counters: Say which way the workers' batches go.
    """

    def __init__(self, loader: Any, device: Device, options: Options, memory: PinnedMemory, counters: Counters) -> None:
        self._loader = loader
        self._device = device
        self._options = options
        self._memory = memory
        self._counters = counters
        self._lock = threading.RLock()  # two threads may start passes; the collector may end one in here
        self._twin: Any = None  # the newest one
        self._iterated: Any = None  # what the newest pass iterates over: a twin, or the user's own loader
        self._table: SlotTable | None = None
        self._has_warned = False

    def iterable(self) -> Any:
        """What the next pass iterates over."""
        why = self._refusal()
        if isinstance(self._loader, DataLoader) and self._loader.num_workers:
            self._counters.workers, self._counters.workers_reason = ("plain", why) if why else ("shared", _SHARED)
        if why:
            if self._options.workers == "shared" and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"workers='shared' is not possible: {why}; batches go the plain way", PrefetchWarning, stacklevel=4
                )
            self._iterated = self._loader
        else:
            self._iterated = self._next_twin()
        return self._iterated

    def _next_twin(self) -> Any:
        """The twin that the next pass iterates over."""
        loader = self._loader
        with self._lock:
            keeps = loader.persistent_workers or getattr(self._twin, "_initial_iter_for_state_dict", False)
            if getattr(loader, "next_iter_state", None) is not None:  # load_state_dict() was called
                if keeps:  # other workers belong to a pass that goes on as it was
                    self.close()
                twin = self._make()
                loader.next_iter_state = None  # as its own __iter__ would
                return twin
            return self._twin if self._twin is not None and keeps else self._make()

    def bind(self, source: Any, iterable: Any) -> None:
        """``source`` is the iterator over ``iterable``, which :meth:`iterable` gave; maybe not the newest by now."""
        if iterable is not self._loader:
            setattr(source, _TABLE, getattr(iterable, _TABLE))

    @staticmethod
    def packs(source: Any) -> bool:
        """Whether the workers behind ``source`` write into shared memory."""
        return getattr(source, _TABLE, None) is not None

    def is_broken(self, source: Any) -> bool:
        """Whether what the workers behind ``source`` send cannot be relied upon any more."""
        table = getattr(source, _TABLE, None)
        return table is not None and table.is_broken

    def state_owner(self) -> Any:
        """Whose ``state_dict()`` speaks of the batches."""
        loader = self._loader
        if not hasattr(loader, "next_iter_state"):
            return loader
        if self._iterated is not None and loader.next_iter_state is None:
            return self._iterated  # asking anybody else would start workers, and draw a seed for them
        return loader if self._refusal() else self._next_twin()

    def state_of(self, source: Any) -> Any:
        """The loader's state as the pass over ``source`` has it."""
        module = sys.modules.get(_STATEFUL_MODULE)
        if module is not None and type(self._loader).state_dict is module.StatefulDataLoader.state_dict:
            # What that would ask, unless a newer pass is just making its iterator: it would make one too, and draw.
            return source.state_dict()
        return self.state_owner().state_dict()

    def retire(self, source: Any) -> None:
        """The pass over ``source`` has ended, all copies of its batches too. Workers that persist keep their slots."""
        table = getattr(source, _TABLE, None)
        if table is None or getattr(source, "_persistent_workers", False):
            return
        table.close()
        if table is self._table:
            self._twin = self._table = self._iterated = None

    def shut_down(self, source: Any) -> None:
        """End the workers behind ``source``, after one of them died or its pass failed."""
        table = getattr(source, _TABLE, None)
        if table is not None:
            table.close()
        torchloader.shut_down(source, self._loader if table is None else self._twin)
        if table is not None and table is self._table:
            self._twin = self._table = self._iterated = None

    def close(self) -> None:
        """End workers that persist, and give their memory back."""
        twin, table = self._twin, self._table
        self._twin = self._table = self._iterated = None
        if table is not None:
            table.close()
        iterator = getattr(twin, "_iterator", None)
        if iterator is not None and table is not None and table.pid == os.getpid():
            torchloader.shut_down(iterator, twin)

    def _make(self) -> Any:
        options = self._options
        table = self._table = SlotTable(self._device, self._memory, poison=options.checked)
        twin = self._twin = _twin_of(self._loader, table, options)
        return twin

    def _refusal(self) -> str:
        if self._options.workers == "plain":
            return "workers='plain' was asked for"
        why = _refusal(self._loader)
        if not why and self._options.workers == "auto" and _persistent_workers_run(self._loader):
            # Others would draw another seed than the plain loop does.
            return "its persistent workers run already; workers='shared' starts others"
        return why


_SHARED = "worker processes pack their batches into shared memory"


def _twin_of(loader: DataLoader[Any], table: SlotTable, options: Options) -> DataLoader[Any]:
    limit = options.max_pinned_bytes
    twin: DataLoader[Any] = object.__new__(type(loader))
    twin.__dict__.update(loader.__dict__)
    ahead = loader.prefetch_factor or 2
    twin.__dict__.update(
        collate_fn=WorkerCollate(
            loader.collate_fn,
            table.token,
            receive,
            control=table.control,
            keep_arrays=options.keep_arrays,
            # Batches that a worker may have ready, and one or two being copied; see docs/workers.md.
            slots=ahead + (2 if loader.num_workers == 1 else 1),
            ahead=ahead,
            limit=None if limit is None else limit // loader.num_workers,
        ),
        **{_TABLE: table},
        pin_memory=False,  # torch's thread for that would copy what is in pinned memory already
        _iterator=None,
        _DataLoader__multiprocessing_context=direct_context(loader.multiprocessing_context),
    )
    return twin


def _refusal(loader: Any) -> str:
    """Why the workers of ``loader`` cannot write into shared memory; empty if they can."""
    if not isinstance(loader, DataLoader):
        return "the loader is not a torch DataLoader"
    if not loader.num_workers:
        return "the DataLoader has no worker processes"
    cls: Any = type(loader)
    if (cls.__iter__, cls._get_iterator) not in _known_protocols():
        return f"{cls.__name__} has an __iter__ of its own, which would see packed batches"
    if getattr(loader, "_initial_iter_for_state_dict", False):
        return "state_dict() has started the workers of this pass already"
    if not hasattr(os, "fork"):
        return "this platform has no shared memory of the kind it takes"
    return ""


def _persistent_workers_run(loader: DataLoader[Any]) -> bool:
    return loader.persistent_workers and getattr(loader, "_iterator", None) is not None


def _known_protocols() -> list[tuple[Any, Any]]:
    """Iteration by torch's own DataLoader, and by torchdata's where somebody has imported it."""
    known: list[Any] = [DataLoader]
    module = sys.modules.get(_STATEFUL_MODULE)
    if module is not None:
        known.append(module.StatefulDataLoader)
    return [(cls.__iter__, cls._get_iterator) for cls in known]
