"""The CPU backend: what a pass over ready batches with trivial work costs more than the plain loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.measure import interleaved
from benchmarks.rows.base import Context
from benchmarks.rows.ready import tiny_batch
from benchmarks.schema import RowResult, Value
from benchmarks.sources import CyclingBatches

__all__ = ["ROWS"]

_TARGET_US = 60.0


class CpuPass:
    """Whole passes, their start included."""

    name = "cpu-pass"
    group = "measure"
    rank = 1
    title = "CPU backend: a pass over ready batches with trivial work, against the plain loop"

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        from prefetchpipe import GPUPrefetcher

        result = RowResult(self.name, self.title)
        count = 2000
        batches = CyclingBatches([tiny_batch(seed, small=False) for seed in range(8)], count)
        small = CyclingBatches([torch.zeros(8) for _ in range(8)], count)
        for label, source in (("two [200, 100] float32", batches), ("one [8] float32", small)):
            with GPUPrefetcher(source, "cpu") as prefetcher:
                ways: dict[str, Iterable[Any]] = {"plain": source, "prefetchpipe": prefetcher}
                for way in ways.values():
                    _pass_us(way, count)
                taken = interleaved(
                    {name: lambda way=way: _pass_us(way, count) for name, way in ways.items()},  # type: ignore[misc]
                    context.options.repeats,
                )
            raw = [ours - plain for ours, plain in zip(taken["prefetchpipe"], taken["plain"], strict=True)]
            median = statistics.median(raw)
            result.values.append(
                Value(f"more per batch, {label}", median, "us", f"<= {_TARGET_US:.0f}", median <= _TARGET_US, raw)
            )
        return result


def _pass_us(batches: Iterable[Any], count: int) -> float:
    start = time.perf_counter()
    seen = 0
    for _batch in batches:
        seen += 1
    if seen != count:
        raise RuntimeError(f"{seen} batches instead of {count}")
    return (time.perf_counter() - start) / count * 1e6


ROWS = (CpuPass(),)
