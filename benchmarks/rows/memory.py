"""Device and pinned memory over many passes."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.batches import leaves, nbytes
from benchmarks.rows.base import Context
from benchmarks.rows.ready import images_batch, tokens_batch
from benchmarks.schema import RowResult, Value
from benchmarks.sources import CyclingBatches

__all__ = ["ROWS"]

_DEPTH = 2
_PASSES = 40
_WARM = 3


class Memory:
    """Forty passes at depth 2: what is reserved, what is pinned, and how many batches live on the device at most."""

    name = "memory"
    group = "measure"
    rank = 6
    title = f"device and pinned memory over {_PASSES} passes, depth {_DEPTH}"

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        from prefetchpipe import GPUPrefetcher

        env = context.env
        result = RowResult(self.name, self.title)
        makers: dict[str, Any] = {"images": images_batch, "tokens": tokens_batch}
        for name, make in makers.items():
            pool = [make(seed, small=env.small) for seed in range(8)]
            largest = max(nbytes(batch) for batch in pool)
            total = torch.zeros(1, device=env.device)
            reserved, allocations, peak = [], [], 0
            if env.cuda:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            base = torch.cuda.memory_allocated(env.device) if env.cuda else 0
            with GPUPrefetcher(CyclingBatches(pool, 16), env.device, depth=_DEPTH) as prefetcher:
                for number in range(_PASSES):
                    if env.cuda and number == _WARM:
                        torch.cuda.reset_peak_memory_stats(env.device)
                    for batch in prefetcher:
                        total.add_(leaves(batch)[0].reshape(-1)[:1])
                    del batch
                    reserved.append(torch.cuda.memory_reserved(env.device) if env.cuda else 0)
                    allocations.append(int(prefetcher.stats().pinned_allocations))
                env.synchronize()
                pinned = int(prefetcher.stats().pinned_bytes)
                if env.cuda:
                    peak = torch.cuda.max_memory_allocated(env.device) - base
            grown = reserved[-1] - reserved[_WARM - 1]
            later = allocations[-1] - allocations[_WARM - 1]
            bound = (_DEPTH + 2) * largest * 1.05
            beyond = peak / largest - 1
            result.values += [
                Value(f"{name}: pinned allocations after pass 3", later, "", "0", later == 0),
                Value(f"{name}: pinned", pinned / 1e6, "MB", f"<= {bound / 1e6:.1f}", pinned <= bound),
            ]
            if env.cuda:
                result.values += [
                    Value(f"{name}: reserved, pass 40 against pass 3", grown / 1e6, "MB more", "0", grown == 0),
                    Value(
                        f"{name}: on the device beyond the batch in use", beyond, "batches", f"<= {_DEPTH + 1}",
                        beyond <= _DEPTH + 1.01,
                    ),
                ]  # fmt: skip
        return result


ROWS = (Memory(),)
