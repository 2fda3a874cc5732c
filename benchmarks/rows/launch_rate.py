"""How fast the main loop launches tiny kernels while batches are prefetched, against without."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.environment import Env
from benchmarks.measure import interleaved
from benchmarks.rows.base import Context
from benchmarks.rows.ready import dlrm_batch, images_batch
from benchmarks.schema import RowResult, Value
from benchmarks.sources import CyclingBatches

__all__ = ["ROWS"]

_TARGET = 0.95
_KERNELS = 400
_BATCHES = 60


class LaunchRate:
    """Only the launches are timed, not ``next``; a producer that holds the GIL shows as a lower rate."""

    name = "launch-rate"
    group = "measure"
    rank = 5
    title = f"main-loop launch rate of tiny kernels while prefetching, against without ({_KERNELS} a batch)"

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        from prefetchpipe import GPUPrefetcher

        env = context.env
        result = RowResult(self.name, self.title)
        makers: dict[str, Any] = {"images": images_batch, "dlrm": dlrm_batch}
        for name, make in makers.items():
            pool = [make(seed, small=env.small) for seed in range(4)]
            with GPUPrefetcher(CyclingBatches(pool, _BATCHES), env.device) as prefetcher:
                _rate(env, prefetcher)
                taken = interleaved(
                    {"without": lambda: _rate(env, range(_BATCHES)), "with": lambda p=prefetcher: _rate(env, p)},  # type: ignore[misc]
                    context.options.repeats,
                )
            raw = [busy / idle for busy, idle in zip(taken["with"], taken["without"], strict=True)]
            ratio = statistics.median(raw)
            note = f"without: {statistics.median(taken['without']):.0f} launches a millisecond"
            met = ratio >= _TARGET if env.cuda else None
            result.values.append(Value(f"rate, {name}", ratio, "x", f">= {_TARGET}", met, raw, note))
        return result


def _rate(env: Env, batches: Any) -> float:
    """Launches per millisecond of the loop's body."""
    value = torch.zeros(8, device=env.device)
    seconds, count = 0.0, 0
    for _batch in batches:
        start = time.perf_counter()
        for _ in range(_KERNELS):
            value.add_(1.0)
        seconds += time.perf_counter() - start
        count += _KERNELS
        # Outside the timed part: a full launch queue would measure the GPU.
        env.synchronize()
    return count / seconds / 1e3


ROWS = (LaunchRate(),)
