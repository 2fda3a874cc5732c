"""Both sides of the worker path in one process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.utils.data import default_collate

from prefetchpipe.memory.pinned import PinnedMemory
from prefetchpipe.pipeline.collate import BUSY, STATE, WorkerCollate
from prefetchpipe.pipeline.workers import SlotTable, receive


class Workers:
    """A loader whose batches come packed, as from a worker process with `prefetch_factor=2`."""

    def __init__(
        self,
        device: Any,
        samples: Sequence[Any],
        *,
        slots: int = 3,
        ahead: int = 2,
        limit: int | None = None,
        inner: Any = default_collate,
        whole: bool = False,
        poison: bool = False,
        pinned_limit: int | None = None,
    ) -> None:
        self.memory = PinnedMemory(device, pinned_limit)
        self.table = SlotTable(device, self.memory, poison=poison)
        self.samples = samples
        self.whole = whole  # each of `samples` is all samples of a batch
        options = {"control": self.table.control, "slots": slots, "ahead": ahead, "limit": limit}
        self.collate = WorkerCollate(inner, self.table.token, receive, **options)
        self.ways: list[str] = []

    def message(self, sample: Any) -> bytes:
        """One batch as it crosses the queue."""
        sent = self.collate(sample if self.whole else [sample])
        self.ways.append("packed" if type(sent).__name__ == "_Sent" else "plain")
        return bytes(ForkingPickler.dumps(sent))

    def __iter__(self) -> Iterator[Any]:
        messages = (self.message(sample) for sample in self.samples)
        ready = [next(messages)]  # the worker makes its next batch while the last one is on its way
        for message in messages:
            yield pickle.loads(ready.pop())
            ready.append(message)
        yield pickle.loads(ready.pop())

    @property
    def worker_slots(self) -> Any:
        packer = self.collate._packer
        assert packer is not None
        return packer._slots

    def busy(self) -> int:
        return sum(slot.segment is not None and slot.segment.flags[STATE] == BUSY for slot in self.worker_slots)
