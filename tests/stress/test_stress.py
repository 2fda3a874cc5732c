"""Consumer threads and prefetchers that share a device: random sizes, delays, early ends, errors, new passes.

Seeded, except for what the threads do to each other. No wait of a loader or a loop takes longer than a millisecond.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.testing import SimulatedDevice
from tests.support import Surroundings, Thread, is_simulated, kernel, leaves_of, new_stream, settle, use_stream

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning"),
]

CONSUMERS = 4
PASSES = 14
MOST_BYTES = 2 << 20
DELAY = 0.001


class RowError(Exception):
    """What a loader of this file raises."""


class Rows:
    """A loader of batches that hold nothing but their own number; every pass differs in length, sizes and end."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.passes = itertools.count()
        self.never = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        return self.rows(random.Random(f"{self.seed} {next(self.passes)}"))

    def rows(self, chance: random.Random) -> Iterator[Any]:
        buffer = torch.empty(chance.randrange(1, 1000))
        count = chance.randrange(20)
        for index in range(count):
            if chance.random() < 0.2:
                self.never.wait(chance.random() * DELAY)
            yield self.batch(chance, index, buffer)
            buffer.fill_(-1)
        if chance.random() < 0.3:
            raise RowError(count)

    def batch(self, chance: random.Random, index: int, buffer: torch.Tensor) -> Any:
        size = chance.choice([0, 1, int(2 ** chance.uniform(2, 21)), MOST_BYTES]) // 4
        x = torch.full((size,), float(index))
        way = chance.random()
        if way < 0.3:
            return x
        if way < 0.6:
            return {"x": x, "again": buffer.fill_(index), "view": x[size // 3 :]}
        if way < 0.9:
            return [x, (torch.full((3, 5), index).t(), index), torch.full((), index, dtype=torch.bfloat16)]
        return {"many": [torch.full((32_000,), float(index)) for _ in range(12)]}  # packed by several threads


class Consumer:
    """One thread's loop over the prefetchers that it shares with the others."""

    def __init__(self, device: Any, prefetchers: list[GPUPrefetcher], seed: int) -> None:
        self.device = device
        self.prefetchers = prefetchers
        self.chance = random.Random(seed)
        self.never = threading.Event()
        self.wrong: list[Any] = []
        self.read = 0
        self.expected_reads = 0
        self.kept: list[tuple[int, torch.Tensor]] = []

    def run(self) -> None:
        stream = new_stream(self.device) if is_simulated(self.device) else None
        for _ in range(PASSES):
            prefetcher = self.chance.choice(self.prefetchers)
            if stream is None:
                self.one_pass(prefetcher)
                continue
            with use_stream(self.device, stream):
                self.one_pass(prefetcher)

    def one_pass(self, prefetcher: GPUPrefetcher) -> None:
        chance = self.chance
        iterator = iter(prefetcher)
        most = chance.choice([0, 1, 3, 7, 99])
        ways = ["break", "close", "close all"] if chance.random() < 0.3 else ["break"]
        index = -1
        try:
            for index, batch in enumerate(itertools.islice(iterator, most)):
                self.use(index, batch)
                if chance.random() < 0.1:
                    self.never.wait(chance.random() * DELAY)
                del batch
        except RowError as error:
            if error.args != (index + 1,):
                self.wrong.append((index, error.args))
        except IteratorClosedError:
            pass  # another thread has closed this prefetcher
        way = chance.choice(ways)
        if way == "close":
            iterator.close()
        elif way == "close all":
            prefetcher.close()

    def use(self, index: int, batch: Any) -> None:
        leaves = leaves_of(batch)
        assert leaves
        self.expected_reads += 1
        kernel(self.device, lambda: None, seconds=self.chance.choice([0.0, 1e-6, 1e-4, 1e-2]))
        kernel(self.device, lambda *views: self.look(index, *views), *leaves)
        if self.chance.random() < 0.1:
            self.kept.append((index, leaves[0][: self.chance.randrange(50)]))

    def look(self, index: int, *views: torch.Tensor) -> None:
        self.read += 1
        self.wrong += [(index, view) for view in views if not bool((view == index).all())]

    def check(self) -> None:
        assert self.read == self.expected_reads > 0
        assert self.wrong == []
        assert [(index, view) for index, view in self.kept if not bool((view == index).all())] == []
        self.kept.clear()


def options(chance: random.Random) -> dict[str, Any]:
    return {
        "depth": chance.randrange(1, 5),
        "fetch": chance.choice(["thread", "thread", "auto", "caller"]),
        "copy_threads": chance.choice([None, 4]),
        "max_pinned_bytes": chance.choice([None, None, 0, 3 * MOST_BYTES]),
        "checked": chance.random() < 0.2,
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_many_consumers_of_several_prefetchers_see_right_values_and_leave_nothing(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    device: Any = SimulatedDevice(seed=seed, bandwidth=chance.choice([1e8, 1e9, 25e9])) if kind == "sim" else "cpu"
    before = Surroundings(device)
    prefetchers = [GPUPrefetcher(Rows(number), device, **options(chance)) for number in range(3)]
    consumers = [Consumer(device, prefetchers, 100 * seed + number) for number in range(CONSUMERS)]
    threads = [Thread(consumer.run) for consumer in consumers]
    for thread in threads:
        thread.result(60)
    settle(device)
    for consumer in consumers:
        consumer.check()
    for prefetcher in prefetchers:
        prefetcher.close()
        assert prefetcher.stats().pinned_bytes == 0
    if kind == "sim":
        assert device.pinned_bytes == 0
    # A traceback that went round in a circle may hold a batch.
    del threads, thread, consumer, consumers, prefetchers, prefetcher
    gc.collect()
    before.assert_restored()
    if kind == "sim":
        assert device.allocated_bytes == 0
