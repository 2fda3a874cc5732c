"""A slow GPU behind a fast CPU: case V4, contracts C3 and C4.

Every step queues GPU work, then reads the batch on the same stream into a result that was allocated before, then drops
it; nothing is looked at before the end. A batch whose memory was given to a later one too early shows as a wrong sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from prefetchpipe import GPUPrefetcher
from tests.support import Source, leaves_of, spin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BATCHES = 60
ELEMENTS = 1 << 18


class Pair(NamedTuple):
    x: Any
    y: Any


NESTINGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "dict": lambda t: {"a": t, "b": t[:100].clone()},
    "nested dict": lambda t: {"a": {"b": {"c": t}}, "d": t.double()},
    "list": lambda t: [t, t.int()],
    "tuple": lambda t: (t, (t[:1000].clone(),)),
    "namedtuple": lambda t: Pair(t, {"y": [t.half()]}),
}


def double(batch: Any) -> Any:
    for leaf in leaves_of(batch):
        leaf.mul_(2)
    return batch


def race(
    nesting: str,
    *,
    seconds: float,
    count: int = BATCHES,
    keep: Callable[[Any], Any] = lambda batch: batch,
    **options: Any,
) -> int:
    """The number of wrong leaves."""
    make = NESTINGS[nesting]
    batches = [make(torch.full((ELEMENTS,), float(i + 1))) for i in range(count)]
    leaves = len(leaves_of(keep(batches[0])))
    sums = torch.full((count, leaves), float("nan"), dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    for index, batch in enumerate(GPUPrefetcher(batches, "cuda", **options)):
        rest = keep(batch)
        del batch
        spin(seconds)
        for column, leaf in enumerate(leaves_of(rest)):
            torch.sum(leaf, dim=tuple(range(leaf.dim())), dtype=torch.float64, out=sums[index, column])
        del rest, leaf
    torch.cuda.synchronize()
    factor = 2 if options.get("transform") else 1
    expected = [[factor * float(leaf.double().sum()) for leaf in leaves_of(keep(batch))] for batch in batches]
    return int((sums.cpu() != torch.tensor(expected, dtype=torch.float64)).sum())


@pytest.mark.parametrize("nesting", list(NESTINGS))
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("transform", [None, double], ids=["", "transform"])
def test_c4_v4_every_batch_is_right(fetch: str, nesting: str, depth: int, transform: Any) -> None:
    assert race(nesting, seconds=0.006, depth=depth, transform=transform, fetch=fetch) == 0


@pytest.mark.parametrize("nesting", ["tensor", "nested dict"])
@pytest.mark.parametrize("transform", [None, double], ids=["", "transform"])
def test_c4_v4_every_batch_is_right_behind_fifty_milliseconds_a_step(fetch: str, nesting: str, transform: Any) -> None:
    assert race(nesting, seconds=0.05, depth=2, transform=transform, fetch=fetch) == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_c4_v4_a_view_of_a_dropped_batch_is_read_late(fetch: str, depth: int) -> None:
    wrong = race(
        "dict", seconds=0.006, depth=depth, fetch=fetch, keep=lambda batch: batch["a"].view(512, -1)[100:200, ::3]
    )
    assert wrong == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_c4_v4_pinned_batches(fetch: str, depth: int) -> None:
    """They are copied from where they are, without a slot of ours in between."""
    batches = [torch.full((ELEMENTS,), float(i + 1)).pin_memory() for i in range(BATCHES)]
    sums = torch.full((BATCHES,), float("nan"), dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    for index, batch in enumerate(GPUPrefetcher(batches, "cuda", depth=depth, fetch=fetch)):
        spin(0.006)
        torch.sum(batch, dim=0, dtype=torch.float64, out=sums[index])
        del batch
    assert sums.tolist() == [float(i + 1) * ELEMENTS for i in range(BATCHES)]


@pytest.mark.parametrize("depth", [1, 3])
def test_c4_v4_memory_that_the_consumer_allocates_beside(fetch: str, depth: int) -> None:
    """The consumer's own temporaries must not get memory that a copy is still writing, nor the other way round."""
    source = Source(lambda index: torch.full((ELEMENTS,), float(index + 1)), BATCHES)
    sums = torch.full((BATCHES, 2), float("nan"), dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    for index, batch in enumerate(GPUPrefetcher(source, "cuda", depth=depth, fetch=fetch)):
        temporary = torch.full_like(batch, -float(index + 1))
        spin(0.006)
        torch.sum(batch, dim=0, dtype=torch.float64, out=sums[index, 0])
        del batch
        torch.sum(temporary, dim=0, dtype=torch.float64, out=sums[index, 1])
        del temporary
    expected = [[float(i + 1) * ELEMENTS, -float(i + 1) * ELEMENTS] for i in range(BATCHES)]
    assert sums.tolist() == expected


@pytest.mark.parametrize("leave", ["break", "close"])
def test_c4_v4_passes_that_are_broken_off(fetch: str, leave: str) -> None:
    source = Source(lambda index: torch.full((ELEMENTS,), float(index + 1)), BATCHES)
    sums = torch.full((20, 3), float("nan"), dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    for row in range(20):
        prefetcher = GPUPrefetcher(source, "cuda", depth=4, fetch=fetch)
        for column, batch in enumerate(itertools.islice(prefetcher, 3)):
            spin(0.003)
            torch.sum(batch, dim=0, dtype=torch.float64, out=sums[row, column])
            del batch
        if leave == "close":
            prefetcher.close()
        del prefetcher
    assert sums.tolist() == [[float(i + 1) * ELEMENTS for i in range(3)]] * 20
