"""What the machine can do at all: link, host memory and packing rates, measured in the same run as everything else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.environment import Env

__all__ = ["measure", "rate"]


def measure(env: Env) -> dict[str, Any]:
    """Rates in GB/s; also put into ``env.limits``.

    Packing is torch's ``copy_`` of one batch of images into host memory (pinned where there is a GPU), by the number
    of threads torch may use; the number of threads is put back.
    """
    found: dict[str, Any] = {}
    size = (64 << 20) if env.cuda else (16 << 20)
    if env.cuda:
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        back = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pageable = torch.ones(size, dtype=torch.uint8)
        device = torch.empty(size, dtype=torch.uint8, device=env.device)
        other = torch.empty(size, dtype=torch.uint8, device=env.device)
        found["h2d_gb_per_s"] = rate(env, size, lambda: device.copy_(pinned, non_blocking=True))
        found["d2h_gb_per_s"] = rate(env, size, lambda: back.copy_(other, non_blocking=True))
        found["pageable_h2d_gb_per_s"] = rate(env, size, lambda: device.copy_(pageable))
        side = torch.cuda.Stream(env.device)

        def both() -> None:
            with torch.cuda.stream(side):
                back.copy_(other, non_blocking=True)
            device.copy_(pinned, non_blocking=True)
            torch.cuda.current_stream(env.device).wait_stream(side)
            side.wait_stream(torch.cuda.current_stream(env.device))

        found["both_ways_gb_per_s"] = rate(env, 2 * size, both)
    found["packing_gb_per_s"] = _packing(env)
    env.limits.update(found)
    return found


def rate(env: Env, nbytes: int, action: Callable[[], Any], *, repeats: int = 7, calls: int = 8) -> float:
    """GB/s of ``action``, which moves ``nbytes``: the median of ``repeats`` windows of ``calls`` calls."""
    times = []
    for _ in range(repeats + 1):
        env.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        env.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return nbytes / statistics.median(times[1:]) / 1e9


def _packing(env: Env) -> dict[str, float]:
    size = 256 * 3 * 224 * 224 if not env.small else 4 << 20
    sources = [torch.ones(size, dtype=torch.uint8) for _ in range(4)]
    target = torch.zeros(size, dtype=torch.uint8, pin_memory=env.cuda)
    before = torch.get_num_threads()
    found, threads, turn = {}, 1, 0

    def pack() -> None:
        nonlocal turn
        turn += 1
        target.copy_(sources[turn % len(sources)])

    try:
        while threads <= before:
            torch.set_num_threads(threads)
            found[str(threads)] = rate(env, size, pack)
            threads *= 2
    finally:
        torch.set_num_threads(before)
    return found
