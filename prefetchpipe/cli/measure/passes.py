"""One point of a sweep: how fast a loader's batches arrive on the device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.batch import find_tensors
from prefetchpipe.cli.measure.nvml import Usage, UsageSampler
from prefetchpipe.cli.measure.timing import synchronizer

__all__ = ["EmptyLoaderError", "Window", "measure_window"]


class EmptyLoaderError(ValueError):
    """The loader gave no batch, or none in a further pass."""


@dataclass(frozen=True, slots=True)
class Window:
    """What one timed window saw.

    Attributes:
        seconds: Wall time.
        batches: Batches taken.
        samples: Rows: the first dimension of each batch's first tensor.
        nbytes: Bytes of the tensors.
        wait_seconds: Of the wall time, how long the loop was inside ``next``.
        usage: Of the GPU.
        verdict: What the prefetcher says the bottleneck is; empty if it says nothing.
    """

    seconds: float
    batches: int
    samples: int
    nbytes: int
    wait_seconds: float
    usage: Usage
    verdict: str


def measure_window(
    loader: Any,
    device: torch.device,
    *,
    depth: int,
    warm: int,
    batches: int,
    step: Callable[[Any], Any] | None = None,
) -> Window:
    """Iterate as a training loop would; further passes are begun as needed, and count.

    Args:
        loader: Iterated through a prefetcher of its own, which is closed at the end.
        device: Where batches go.
        depth: Of the prefetcher.
        warm: Batches before the clock starts.
        batches: Batches on the clock, at least 1.
        step: Called with each batch.

    Raises:
        EmptyLoaderError: There was no batch.
        Exception: Whatever the loader or the step raises.
    """
    wait = synchronizer(device)
    if getattr(loader, "num_workers", 0):
        gc.collect()  # an iterator of an earlier window that is garbage would be inherited by forked workers
    with GPUPrefetcher(loader, device, depth=depth) as prefetcher, UsageSampler(device) as sampler:
        source = _endless(prefetcher)
        for _ in range(warm):
            _use(step, next(source))
        wait()
        before, start = prefetcher.stats(), time.perf_counter()
        samples, nbytes, waited = 0, 0, 0.0
        for _ in range(batches):
            asked = time.perf_counter()
            batch = next(source)
            waited += time.perf_counter() - asked
            rows, size = _extent(batch)
            samples += rows
            nbytes += size
            _use(step, batch)
            del batch
        wait()
        seconds, after = time.perf_counter() - start, prefetcher.stats()
        source.close()
    return Window(
        seconds=seconds,
        batches=batches,
        samples=samples,
        nbytes=nbytes,
        wait_seconds=waited,
        usage=sampler.usage(),
        verdict=after.since(before).verdict,
    )


def _endless(prefetcher: GPUPrefetcher) -> Any:
    def passes() -> Iterator[Any]:
        given = 0
        while True:
            before = given
            for batch in prefetcher:
                given += 1
                yield batch
                del batch
            if not given:
                raise EmptyLoaderError("the loader gave no batch in a whole pass")
            if given == before:
                raise EmptyLoaderError(
                    f"the loader gave {given} batch{'' if given == 1 else 'es'} and then none in a further pass; "
                    "allowed: a loader that can be iterated over again (no generator), or fewer --batches and --warm"
                )

    return passes()


def _use(step: Callable[[Any], Any] | None, batch: Any) -> None:
    if step is not None:
        step(batch)


def _extent(batch: Any) -> tuple[int, int]:
    tensors = [batch] if isinstance(batch, torch.Tensor) else find_tensors(batch)
    rows = next((len(tensor) for tensor in tensors if tensor.ndim), 1)
    return rows, sum(tensor.numel() * tensor.element_size() for tensor in tensors)
