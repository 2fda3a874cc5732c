"""From the device back to the host: outputs of 64 MB, alone and beside batches that go the other way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.environment import Env
from benchmarks.measure import interleaved
from benchmarks.rows.base import Context
from benchmarks.schema import RowResult, Value
from benchmarks.sources import CyclingBatches

__all__ = ["ROWS"]

_TARGET = 0.9
_BOTH_TARGET = 1.8
_WARM = 4


def _size(env: Env) -> int:
    return (1 << 20) if env.small or not env.cuda else (64 << 20)


def _outputs(env: Env) -> list[torch.Tensor]:
    return [torch.full((_size(env) // 4,), float(seed), device=env.device) for seed in range(1, 5)]


def _checked(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """The batches, one element of each compared with what it has to be."""
    for number, batch in enumerate(batches):
        if float(batch[-1]) != number % 4 + 1:
            raise RuntimeError(f"batch {number} of {count} is wrong")
        yield batch


def _milliseconds(env: Env, batches: Iterable[Any], count: int) -> float:
    """Per batch, behind the first few."""
    start = 0.0
    number = -1
    for number, batch in enumerate(_checked(batches, count)):
        del batch
        if number + 1 == _WARM:
            env.synchronize()
            start = time.perf_counter()
    env.synchronize()
    if number + 1 != count:
        raise RuntimeError(f"{number + 1} batches instead of {count}")
    return (time.perf_counter() - start) / (count - _WARM) * 1e3


class Back:
    """The device makes nothing meanwhile: the outputs are ready, in a circle of four."""

    name = "d2h"
    group = "host"
    rank = 1
    title = "64 MB outputs from the device to the host (1 MB where there is no GPU)"

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        from prefetchpipe import HostPrefetcher

        env = context.env
        result = RowResult(self.name, self.title, batch_bytes=_size(env), leaves=1)
        count = 12 if env.small or not env.cuda else 60
        source = CyclingBatches(_outputs(env), count)
        ways: dict[str, Callable[[], Iterable[Any]]] = {
            ".cpu()": lambda: (batch.cpu() for batch in source),
            "pinned, non_blocking, synchronize": lambda: _by_hand(env, source),
        }
        with (
            HostPrefetcher(source, device=env.device) as owned,
            HostPrefetcher(source, device=env.device, borrow=True) as borrowed,
        ):
            ways |= {"HostPrefetcher": lambda: owned, "HostPrefetcher, borrow": lambda: borrowed}
            taken = interleaved(
                {name: lambda way=way: _milliseconds(env, way(), count) for name, way in ways.items()},  # type: ignore[misc]
                context.options.repeats,
            )
        for name, raw in taken.items():
            result.values.append(Value(name, statistics.median(raw), "ms", raw=raw))
        link = env.limits.get("d2h_gb_per_s")
        if link:
            for name in ("HostPrefetcher", "HostPrefetcher, borrow"):
                shares = [_size(env) / milliseconds / 1e6 / link for milliseconds in taken[name]]
                share = statistics.median(shares)
                result.values.append(Value(f"{name}, of D2H", share, "x", f">= {_TARGET}", share >= _TARGET, shares))
        return result


def _by_hand(env: Env, source: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    target: torch.Tensor | None = None
    for batch in source:
        if target is None:
            target = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=env.cuda)
        target.copy_(batch, non_blocking=True)
        env.synchronize()
        yield target


class Both:
    """Batches of 64 MB to the device, each of them sent back: against one direction after the other."""

    name = "both"
    group = "host"
    rank = 2
    title = "both directions at once: 64 MB there and 64 MB back for each batch (1 MB where there is no GPU)"

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        from prefetchpipe import GPUPrefetcher, HostPrefetcher

        env = context.env
        result = RowResult(self.name, self.title, batch_bytes=2 * _size(env), leaves=1)
        count = 12 if env.small or not env.cuda else 60
        there = [torch.full((_size(env) // 4,), float(seed)) for seed in range(1, 5)]
        pool = [batch.pin_memory() if env.cuda else batch for batch in there]
        with (
            GPUPrefetcher([pool[number % 4] for number in range(count)], env.device) as up,
            HostPrefetcher(CyclingBatches(_outputs(env), count), device=env.device, borrow=True) as down,
            HostPrefetcher(up, device=env.device, borrow=True) as both,
        ):
            ways = {"there": up, "back": down, "both": both}
            taken = interleaved(
                {name: lambda way=way: _milliseconds(env, way, count) for name, way in ways.items()},  # type: ignore[misc]
                context.options.repeats,
            )
        for name, raw in taken.items():
            result.values.append(Value(name, statistics.median(raw), "ms", raw=raw))
        gains = [(one + other) / at_once for one, other, at_once in zip(*taken.values(), strict=True)]
        gain = statistics.median(gains)
        met = gain >= _BOTH_TARGET if env.cuda else None
        result.values.append(
            Value("both at once, against one after the other", gain, "x", f">= {_BOTH_TARGET}", met, gains)
        )
        return result


ROWS = (Back(), Both())
