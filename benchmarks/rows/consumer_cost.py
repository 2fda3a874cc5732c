"""What ``next`` costs the consumer's thread when a batch is ready, and whether anything in it synchronises."""

from __future__ import annotations

import statistics
import threading
import time
import warnings
from typing import Any

import torch

from benchmarks.batches import leaves
from benchmarks.environment import Env
from benchmarks.rows.base import Context
from benchmarks.rows.ready import dlrm_batch, images_batch, tiny_batch, tokens_batch
from benchmarks.schema import RowResult, Value
from benchmarks.sources import CyclingBatches

__all__ = ["ROWS"]

_TARGET_US = 15.0
_BATCHES = 60


class ConsumerCost:
    """The consumer sleeps before every ``next``, so that the batch is on the device already.

    Synchronising calls are those that torch reports under ``torch.cuda.set_sync_debug_mode("warn")``; calls into the
    CUDA runtime that do not go through torch are not seen by it.
    """

    name = "consumer-cost"
    group = "measure"
    rank = 4
    title = "microseconds inside next() with a batch ready, and synchronising calls on the consumer's thread"

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        env = context.env
        result = RowResult(self.name, self.title)
        makers: dict[str, Any] = {
            "images": images_batch,
            "dlrm": dlrm_batch,
            "tokens": tokens_batch,
            "tiny": tiny_batch,
        }
        for name, make in makers.items():
            pool = [make(seed, small=env.small) for seed in range(4)]
            raw = _next_us(env, pool)
            median = statistics.median(raw)
            note = f"{len(leaves(pool[0]))} leaves; the call as a whole, of which CUDA control calls are a part"
            met = median <= _TARGET_US if env.cuda else None
            result.values.append(
                Value(f"next(), {name}", median, "us", f"<= {_TARGET_US:.0f}" if env.cuda else "", met, raw, note)
            )
            if env.cuda:
                here, elsewhere = _synchronising_calls(env, pool)
                result.values.append(
                    Value(
                        f"synchronising calls, {name}", here, f"in {_BATCHES} batches", "0", here == 0,
                        note=f"{elsewhere} in other threads",
                    )
                )  # fmt: skip
        return result


def _next_us(env: Env, pool: list[Any]) -> list[float]:
    from prefetchpipe import GPUPrefetcher

    taken = []
    with GPUPrefetcher(CyclingBatches(pool, _BATCHES), env.device) as prefetcher:
        iterator = iter(prefetcher)
        for _ in range(_BATCHES):
            time.sleep(0.004)
            start = time.perf_counter_ns()
            batch = next(iterator)
            taken.append((time.perf_counter_ns() - start) / 1e3)
            del batch
    return taken[10:]


def _synchronising_calls(env: Env, pool: list[Any]) -> tuple[int, int]:
    from prefetchpipe import GPUPrefetcher

    me = threading.get_ident()
    seen: list[bool] = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            seen.append(threading.get_ident() == me)

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with GPUPrefetcher(CyclingBatches(pool, _BATCHES), env.device) as prefetcher:
                for batch in prefetcher:
                    leaves(batch)[0].reshape(-1)[:1].add_(1)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum(seen), len(seen) - sum(seen)


ROWS = (ConsumerCost(),)
