"""Times of the operations over sizes: NumPy, torch on the CPU, torch on the GPU without and with copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prefetchpipe.cli.measure.crossover import Crossover, find_crossover
from prefetchpipe.cli.measure.operations import DTYPES, NUMPY_DTYPES, OPERATIONS, Operation
from prefetchpipe.cli.measure.timing import calls_for, seconds_per_call, synchronizer

__all__ = ["CPU_SIDES", "GPU_SIDES", "Curve", "crossovers", "measure_operation", "missing_sides"]

CPU_SIDES = ("NumPy", "torch CPU")
GPU_SIDES = ("torch GPU", "torch GPU + copies")
"""Data on the GPU already; inputs copied there and the result back at every call."""
_BEST_CPU = "the faster CPU side"
_REST_SECONDS = 0.05
"""OpenBLAS's threads spin for 2^26 cycles by default (THREAD_TIMEOUT in its Makefile.rule): some 25 ms."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One side of one operation.

    Attributes:
        seconds: For each size the time of one call, one number per repeat.
    """

    op: str
    side: str
    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> list[float]:
        """Median seconds of one call at each size."""
        return [statistics.median(repeats) for repeats in self.seconds]


def missing_sides(device: torch.device, dtype: str) -> dict[str, str]:
    """Sides that cannot be measured here, with the reason."""
    missing = {}
    if dtype not in NUMPY_DTYPES:
        missing["NumPy"] = f"NumPy has no {dtype}"
    if device.type != "cuda":
        missing |= dict.fromkeys(GPU_SIDES, "no GPU in use here")
    return missing


def measure_operation(
    name: str,
    sizes: Sequence[int],
    *,
    dtype: str,
    device: torch.device,
    seconds: float,
    repeats: int,
    done: Callable[[], None] = lambda: None,
) -> list[Curve]:
    """Measure one operation on every side that there is.

    Args:
        name: One of ``OPERATIONS``.
        sizes: Ascending.
        dtype: One of ``DTYPES``.
        device: The GPU, or the CPU for the CPU's sides alone.
        seconds: Aimed-for length of one timed window.
        repeats: Windows for each point; the sides take turns.
        done: Called after each size.

    Raises:
        RuntimeError: A size is too large for the memory, or an operation has no kernel for the dtype.
    """
    operation = OPERATIONS[name]
    taken: dict[str, list[tuple[float, ...]]] = {}
    for size in sizes:
        candidates = _sides(operation, size, dtype=dtype, device=device)
        calls = {}
        for side, (call, wait) in candidates.items():
            _let_threads_rest(side, seconds)
            calls[side] = calls_for(call, seconds, wait)
        times: dict[str, list[float]] = {side: [] for side in candidates}
        for repeat in range(repeats):
            order = list(candidates)
            shift = repeat % len(order)
            for side in order[shift:] + order[:shift]:
                call, wait = candidates[side]
                _let_threads_rest(side, seconds)
                times[side].append(seconds_per_call(call, calls[side], wait))
        for side, values in times.items():
            taken.setdefault(side, []).append(tuple(values))
        done()
    return [Curve(name, side, tuple(sizes), tuple(values)) for side, values in taken.items()]


def _let_threads_rest(side: str, seconds: float) -> None:
    """Before a side that computes on the CPU: the threads of the other one's library spin for a while after a call."""
    if side in CPU_SIDES:
        time.sleep(min(_REST_SECONDS, 2 * seconds))  # windows that are meant to be short say little anyway


def crossovers(curves: Sequence[Curve]) -> list[Crossover]:
    """Where each side of one operation overtakes what a user would have otherwise."""
    by_side = {curve.side: curve for curve in curves}
    sizes = curves[0].sizes

    def times(side: str) -> list[float]:
        return by_side[side].medians if side in by_side else []

    on_cpu = [times(side) for side in CPU_SIDES if side in by_side]
    best = [min(values) for values in zip(*on_cpu, strict=True)]
    name = _BEST_CPU if len(on_cpu) > 1 else next(iter(side for side in CPU_SIDES if side in by_side), _BEST_CPU)
    found = [find_crossover("torch CPU", "NumPy", sizes, times("torch CPU"), times("NumPy"))]
    return found + [find_crossover(side, name, sizes, times(side), best) for side in GPU_SIDES]


def _sides(
    operation: Operation, size: int, *, dtype: str, device: torch.device
) -> dict[str, tuple[Callable[[], Any], Callable[[], None]]]:
    """For each side: one call, and what waits for it."""
    generator = torch.Generator().manual_seed(size)
    weights = [_normal(shape, dtype, generator) * 0.05 for shape in operation.weights]
    inputs = [_normal(shape, dtype, generator) for shape in operation.inputs(size)]
    run, nothing = operation.run, synchronizer(torch.device("cpu"))
    sides: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {}
    if dtype in NUMPY_DTYPES:
        arrays = [tensor.clone().numpy() for tensor in (*weights, *inputs)]
        sides["NumPy"] = (lambda: run(*arrays)), nothing
    own = [weight.clone() for weight in weights]
    sides["torch CPU"] = (lambda: run(*own, *inputs)), nothing
    if device.type == "cuda":
        there = [tensor.to(device) for tensor in (*weights, *inputs)]
        kept = [weight.to(device) for weight in weights]

        def with_copies() -> Any:
            return run(*kept, *(tensor.to(device) for tensor in inputs)).cpu()

        wait = synchronizer(device)
        sides["torch GPU"] = (lambda: run(*there)), wait
        sides["torch GPU + copies"] = with_copies, wait
    return sides


def _normal(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(DTYPES[dtype])
