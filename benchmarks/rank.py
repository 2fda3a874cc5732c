"""One process of a row that runs several side by side: measures whenever its parent says so.

Started by :mod:`benchmarks.rows.ranks`, which sets the environment variables of a launcher. Each line on standard input
is the name of a regime; the answer is the number of batches a second, measured while the process runs on before and
after the window, so that windows of several processes started together lie under full load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.batches import nbytes
from benchmarks.compute import Step
from benchmarks.environment import Env
from benchmarks.rows.ready import images_batch
from benchmarks.sources import CyclingBatches

__all__ = ["main"]

_POOL = 8
_FOREVER = 1 << 40
_LEAD = 0.3
"""Part of a window that the process runs before it and after it."""


def main(argv: list[str] | None = None) -> int:
    """Answer until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compute", type=json.loads, required=True, help="regime to products and size of its step")
    options = parser.parse_args(argv)
    env = Env.detect(device=options.device, small=options.small)
    regimes = _regimes(env, options.compute)
    for batches, step in regimes.values():
        _rate(env, batches, step, options.seconds / 4)  # warm
    _say({"ready": True, "cores": _cores()})
    for line in sys.stdin:
        batches, step = regimes[line.strip()]
        _say(_rate(env, batches, step, options.seconds))
    return 0


def _regimes(env: Env, compute: dict[str, tuple[int, int]]) -> dict[str, tuple[Iterable[Any], Callable[[Any], None]]]:
    from prefetchpipe import GPUPrefetcher

    pool = [images_batch(seed, small=env.small) for seed in range(_POOL)]
    found: dict[str, tuple[Iterable[Any], Callable[[Any], None]]] = {}
    for name, (products, size) in compute.items():
        found[name] = GPUPrefetcher(CyclingBatches(pool, _FOREVER), env.device), Step(env, products, size)
    if env.cuda:
        found["link"] = _Link(env, nbytes(pool[0])), Step(env)
    return found


class _Link:
    """The yardstick: nothing but copies of pinned memory over the link, as many bytes as a batch has."""

    def __init__(self, env: Env, size: int) -> None:
        self._host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(size, dtype=torch.uint8, device=env.device)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in itertools.count(1):
            self._device.copy_(self._host, non_blocking=True)
            if number % 4 == 0:
                torch.cuda.current_stream().synchronize()  # not further ahead than a prefetcher would be
            yield self._device


def _rate(env: Env, batches: Iterable[Any], step: Callable[[Any], None], seconds: float) -> float:
    """Batches a second."""
    lead = _LEAD * seconds
    started = ended = 0.0
    count = 0
    begun = time.perf_counter()
    for batch in batches:
        step(batch)
        now = time.perf_counter()
        if not started:
            if now - begun >= lead:
                env.synchronize()
                started = time.perf_counter()
        elif not ended:
            count += 1
            if now - started >= seconds:
                env.synchronize()
                ended = time.perf_counter()
        elif now - ended >= lead:
            break
    env.synchronize()
    return count / (ended - started)


def _cores() -> int:
    from prefetchpipe.ranks import usable_cores

    return usable_cores()


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
