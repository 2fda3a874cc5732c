"""Wrong batches: a slow GPU behind a fast CPU.

Every step queues milliseconds of GPU work, then reads the whole batch on the same stream and drops it. The counts of
wrong elements stay on the device until the end, so that the CPU runs as far ahead as the loader lets it. A loader that
gives the memory of a batch to a later one before the GPU has read it shows here, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.batches import leaves, map_leaves, nbytes
from benchmarks.contenders.base import Contender
from benchmarks.environment import Env
from benchmarks.rows.base import LoaderRow
from benchmarks.schema import RaceCount

__all__ = ["BATCHES", "count_wrong", "delay_ms", "run_race"]

BATCHES = 60


def run_race(
    row: LoaderRow,
    contender: Contender,
    env: Env,
    *,
    depth: int | None = None,
    transform: bool = False,
    delay: float = 0.0,
) -> RaceCount:
    """Count the wrong batches out of :data:`BATCHES` of one contender; its exceptions are recorded, not raised.

    Args:
        row: Whose batches.
        contender: Who brings them.
        env: Where.
        depth: Batches ahead, ``None``: the contender's default.
        transform: Add one to every leaf, on the device (ours only).
        delay: Milliseconds of GPU work per step; 0: by the size of the batch.
    """
    parts = ([f"depth {depth}"] if depth is not None else []) + (["transform"] if transform else [])
    count = RaceCount(row.name, contender.name, ", ".join(parts), of=BATCHES)
    try:
        source, expected = row.race_source(env, BATCHES)
        example = next(iter(source.loader(pin=False)))
        reason = contender.unfit(source, example)
        if reason is not None:
            count.error, count.of = reason, 0
            return count
        prepared = contender.prepare(source, env, depth=depth, transform=_plus_one if transform else None)
        try:
            wanted = [value + 1 for value in expected] if transform else expected
            count.wrong = count_wrong(prepared.batches, wanted, env, delay or delay_ms(nbytes(example)))
        finally:
            if prepared.close is not None:
                prepared.close()
    except Exception as error:
        count.error = f"{type(error).__name__}: {error}"[:500]
    return count


def count_wrong(batches: Any, expected: list[int], env: Env, delay: float) -> int:
    """Batches with a wrong element, plus those that are missing or too many."""
    bad = torch.zeros(len(expected), dtype=torch.int64, device=env.device)
    cycles = int(delay * _cycles_per_ms(env)) if env.cuda else 0
    count = 0
    # No enumerate: it would hold the batch until the next one has come, and the point is to drop it.
    for batch in batches:
        if count < len(expected):
            if cycles:
                torch.cuda._sleep(cycles)
            for leaf in leaves(batch):
                bad[count] += leaf.ne(expected[count]).sum()
            del leaf
        count += 1
        del batch
    return int((bad > 0).sum().item()) + abs(len(expected) - count)


def delay_ms(batch_bytes: int) -> float:
    """Enough GPU time per step for any CPU loop over batches of this size to run ahead."""
    return max(6.0, 3 * batch_bytes / 30e6)


def _plus_one(batch: Any) -> Any:
    return map_leaves(lambda leaf: leaf + 1, batch)


_rates: dict[torch.device, float] = {}


def _cycles_per_ms(env: Env) -> float:
    if env.device not in _rates:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        _rates[env.device] = 20_000_000 / start.elapsed_time(end)
    return _rates[env.device]
