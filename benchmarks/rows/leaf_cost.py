"""Cost per leaf, and cost per batch by the length of the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.batches import map_leaves
from benchmarks.compute import Step
from benchmarks.environment import Env
from benchmarks.measure import interleaved, seconds_per_step
from benchmarks.rows.base import Context
from benchmarks.schema import RowResult, Value
from benchmarks.sources import CyclingBatches

__all__ = ["ROWS"]

_TARGET_US = 5.0
_TAIL = 4


class LeafCost:
    """Dicts of 1 to 400 small tensors of four dtypes; then passes of 100 to 100,000 small batches."""

    name = "leaves"
    group = "measure"
    rank = 3
    title = "cost by leaves (dicts of 1..400 tensors of 1 kB) and by batches in a pass"

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        env = context.env
        result = RowResult(self.name, self.title)
        counts = (1, 10, 41, 100) if env.small else (1, 10, 41, 100, 200, 400)
        ours_us, plain_us = {}, {}
        for count in counts:
            pool = [_dict_of(count, seed) for seed in range(16)]
            steps = 60 if env.small else max(60, 8000 // (count + 20))
            taken = _ours_and_plain(env, pool, steps, 3 if env.small else context.options.repeats)
            ours_us[count], plain_us[count] = float(np.median(taken["prefetchpipe"])), float(np.median(taken["plain"]))
            note = f"plain .to: {plain_us[count]:.1f} us"
            result.values.append(
                Value(f"{count} leaves", ours_us[count], "us a batch", raw=taken["prefetchpipe"], note=note)
            )
            context.progress.say(f"leaves  {count}: prefetchpipe {ours_us[count]:.1f} us, {note}")
        slope = float(np.polyfit(counts, [ours_us[count] for count in counts], 1)[0])
        plain_slope = float(np.polyfit(counts, [plain_us[count] for count in counts], 1)[0])
        result.values.append(
            Value(
                "per leaf",
                slope,
                "us",
                f"<= {_TARGET_US:.0f}",
                slope <= _TARGET_US,
                note=f"plain .to: {plain_slope:.2f} us",
            )
        )
        self._by_length(context, result)
        return result

    def _by_length(self, context: Context, result: RowResult) -> None:
        env = context.env
        pool = [torch.zeros(256) for _ in range(16)]
        lengths = (100, 1000, 4000) if env.small else (100, 1000, 10_000, 100_000)
        by_length = {}
        for length in lengths:
            repeats = max(1, min(context.options.repeats, 20_000 // length))
            taken = _ours_and_plain(env, pool, length - 8 - _TAIL, repeats)["prefetchpipe"]
            by_length[length] = float(np.median(taken))
            result.values.append(Value(f"pass of {length} batches", by_length[length], "us a batch", raw=taken))
        growth = by_length[lengths[-1]] / min(by_length.values())
        result.values.append(
            Value("longest pass against the cheapest", growth, "x", "constant: <= 1.25", growth <= 1.25)
        )


def _ours_and_plain(env: Env, pool: list[Any], steps: int, repeats: int) -> dict[str, list[float]]:
    from prefetchpipe import GPUPrefetcher

    warm = 8
    source = CyclingBatches(pool, warm + steps + _TAIL)
    step = Step(env)

    def timed(batches: Any) -> Callable[[], float]:
        return lambda: 1e6 * seconds_per_step(batches, step, env.synchronize, warm=warm, steps=steps, drain=True)

    with GPUPrefetcher(source, env.device) as prefetcher:
        ways = {"plain": timed(_Plain(source, env.device)), "prefetchpipe": timed(prefetcher)}
        interleaved(ways, 1)
        return interleaved(ways, repeats)


class _Plain:
    def __init__(self, source: CyclingBatches, device: torch.device) -> None:
        self._source, self._device = source, device

    def __iter__(self) -> Any:
        return (map_leaves(lambda leaf: leaf.to(self._device), batch) for batch in self._source)


def _dict_of(count: int, seed: int) -> dict[str, torch.Tensor]:
    kinds = (torch.float32, torch.int64, torch.int32, torch.uint8)
    batch = {}
    for place in range(count):
        dtype = kinds[place % len(kinds)]
        batch[f"leaf{place}"] = torch.full((1024 // dtype.itemsize,), seed, dtype=dtype)
    return batch


ROWS = (LeafCost(),)
