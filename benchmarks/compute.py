"""The work of a training step: a chain of matrix products of calibrated length that depends on the batch."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.batches import leaves
from benchmarks.environment import Env

__all__ = ["Step", "make_step"]

_SIZES = ((0.3, 1024), (3.0, 2048), (float("inf"), 4096))


class Step:
    """Reads one element of the batch on the consumer's stream, then runs the chain.

    The chain is captured once as a CUDA graph, so a step costs the CPU a few microseconds whatever its length.

    Attributes:
        products: Matrix products in the chain; another process makes the same step with it and ``size``.
        size: Rows and columns of the matrices.
    """

    def __init__(self, env: Env, products: int = 0, size: int = 1024) -> None:
        self.products, self.size = products, size
        self.total = torch.zeros(1, device=env.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._operands: tuple[torch.Tensor, ...] = ()
        if products and env.cuda:
            self._graph, self._operands = _chain(env, self.total, products, size)

    def __call__(self, batch: Any) -> None:
        """Queue the work for ``batch``."""
        leaf = batch if isinstance(batch, torch.Tensor) else _first(batch)
        self.total.add_(leaf.reshape(-1)[:1])
        if self._graph is not None:
            self._graph.replay()


def make_step(env: Env, target_ms: float, example: Any) -> tuple[Step, float]:
    """A step of about ``target_ms`` and what it really takes alone, in milliseconds per step.

    Args:
        env: Where to run.
        target_ms: Wanted milliseconds of compute per step; 0 is the one kernel that reads the batch.
        example: A batch on ``env.device``.
    """
    step = Step(env)
    if target_ms > 0 and env.cuda:
        size = next(size for limit, size in _SIZES if target_ms < limit)
        probe = _alone(env, Step(env, 16, size), example, 60) / 16
        step = Step(env, max(1, round(target_ms / probe)), size)
    return step, _alone(env, step, example, max(20, min(400, int(100 / max(target_ms, 0.05)))))


def _alone(env: Env, step: Step, example: Any, steps: int) -> float:
    best = []
    for _ in range(4):
        env.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step(example)
        env.synchronize()
        best.append((time.perf_counter() - start) / steps * 1e3)
    return sorted(best[1:])[1]


def _chain(
    env: Env, total: torch.Tensor, products: int, size: int
) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    generator = torch.Generator(device=env.device).manual_seed(0)
    options: dict[str, Any] = {"device": env.device, "dtype": torch.bfloat16}
    start = torch.randn(size, size, generator=generator, **options)
    # Scaled so that the values keep their size along the chain: matrix units are faster on zeros and infinities.
    weight = torch.randn(size, size, generator=generator, **options) / size**0.5
    ping, pong = torch.empty_like(start), torch.empty_like(start)

    def body() -> None:
        torch.add(start, total.to(torch.bfloat16), alpha=1e-9, out=ping)
        source, target = ping, pong
        for _ in range(products):
            torch.mm(source, weight, out=target)
            source, target = target, source

    side = torch.cuda.Stream(env.device)
    side.wait_stream(torch.cuda.current_stream(env.device))
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream(env.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    # The graph holds addresses only, so the matrices are kept with it.
    return graph, (start, weight, ping, pong)


def _first(batch: Any) -> torch.Tensor:
    values = batch.values() if isinstance(batch, dict) else batch
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
    return leaves(batch)[0]
