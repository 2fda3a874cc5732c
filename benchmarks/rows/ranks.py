"""Several GPUs of one host, one process each, against one process alone."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.batches import map_leaves, nbytes
from benchmarks.compute import make_step
from benchmarks.environment import Env
from benchmarks.rows.base import Context
from benchmarks.rows.ready import images_batch
from benchmarks.runner import FACTORS
from benchmarks.schema import RowResult, Value

__all__ = ["ROWS"]

_TARGET = 0.975
"""Of the number of processes: 1.95 of two."""
_SECONDS = 0.5
_END_SECONDS = 20


class RanksRow:
    """The images of the row of that name, batches ready, in ``count`` processes without anything in common.

    One alone has all cores; of several, each has its share, as under torchrun. A ratio is that of batches a second:
    all of them together over the mean of each alone. ``link`` is the yardstick, pinned memory copied and nothing else:
    where it does not scale, the host's links are shared and nothing can.

    Args:
        name: Name of the row.
        count: Processes, one a GPU; without GPUs they all run on the CPU.
        rank: Place in the table.
    """

    group = "ranks"

    def __init__(self, name: str, count: int, rank: int) -> None:
        self.name = name
        self.rank = rank
        self.title = f"images, batches ready, in {count} processes of one host against one"
        self._count = count

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        env, options = context.env, context.options
        devices = _devices(env, self._count)
        example = images_batch(0, small=env.small)
        batch_bytes = nbytes(example)
        regimes = [name for name in FACTORS if name in options.regimes and (env.cuda or FACTORS[name] == 0)]
        resident = map_leaves(lambda leaf: leaf.to(env.device), example)
        steps = {name: make_step(env, FACTORS[name] * env.link_ms(batch_bytes), resident)[0] for name in regimes}
        compute = {name: (step.products, step.size) for name, step in steps.items()}
        del steps
        seconds = options.seconds if env.small else max(options.seconds, _SECONDS)
        result = RowResult(self.name, self.title, "batches are ready", batch_bytes, 2)
        with ExitStack() as stack:

            def start(device: str, rank: int, count: int) -> _Rank:
                context.watch()
                made = _Rank(device, rank, count, seconds=seconds, small=env.small, compute=compute)
                stack.enter_context(made)
                if not env.small:
                    made.wait_ready()  # one after the other: none is disturbed while it gets warm
                return made

            alone = [start(device, 0, 1) for device in dict.fromkeys(devices)]
            together = [start(device, rank, self._count) for rank, device in enumerate(devices)]
            for rank in (*alone, *together) if env.small else ():
                rank.wait_ready()
            for regime in (*regimes, *(("link",) if env.cuda else ())):
                context.watch()
                value = _measure(regime, alone, together, options.repeats)
                if env.cuda and value.target:
                    value.ok = value.value is not None and value.value >= _TARGET * self._count
                result.values.append(value)
                context.progress.say(f"{self.name}  {regime}: {value.value:.3f} x one ({value.note})")
        return result


def _measure(regime: str, alone: list[_Rank], together: list[_Rank], repeats: int) -> Value:
    raw, ones, rates = [], [], []
    for _ in range(repeats):
        one = statistics.mean(rank.measure(regime) for rank in alone)
        for rank in together:
            rank.begin(regime)
        each = [rank.end() for rank in together]
        raw.append(sum(each) / one)
        ones.append(one)
        rates.append(each)
    each = [statistics.median(column) for column in zip(*rates, strict=True)]
    note = (
        f"one: {statistics.median(ones):.0f} batches/s with {alone[0].cores} cores; "
        f"each: {', '.join(f'{rate:.0f}' for rate in each)} with {together[0].cores}"
    )
    target = "" if regime == "link" else f">= {_TARGET * len(together):.2f}"
    return Value(f"{regime}, {len(together)} processes", statistics.median(raw), "x one", target, raw=raw, note=note)


def _devices(env: Env, count: int) -> list[str]:
    if not env.cuda:
        return ["cpu"] * count
    there = torch.cuda.device_count()
    if there < count:
        raise RuntimeError(f"{count} processes need {count} GPUs, and there are {there}")
    return [f"cuda:{index}" for index in range(count)]


class _Rank:
    """One process and the pipe to it; as a context manager it is ended at the end."""

    def __init__(
        self, device: str, rank: int, count: int, *, seconds: float, small: bool, compute: dict[str, tuple[int, int]]
    ) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        if count > 1 and "OMP_NUM_THREADS" not in os.environ:
            place["OMP_NUM_THREADS"] = 1  # as torchrun does
        arguments = ["--device", device, "--seconds", str(seconds), "--compute", json.dumps(compute)]
        self.cores = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rank", *arguments, *(["--small"] if small else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | {name: str(value) for name, value in place.items()},
        )

    def wait_ready(self) -> None:
        """Wait until it is warm."""
        self.cores = self.end()["cores"]

    def begin(self, regime: str) -> None:
        """Start a measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{regime}\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """Wait for the answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the row ended with {self._process.wait(_END_SECONDS)}")
        return json.loads(line)

    def measure(self, regime: str) -> float:
        """Batches a second."""
        self.begin(regime)
        return float(self.end())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


ROWS = (RanksRow("two-gpus", 2, 0), RanksRow("four-gpus", 4, 1), RanksRow("eight-gpus", 8, 2))
