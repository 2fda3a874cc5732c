"""How long an event loop is held under ``async for``, by us: every step of every ``__anext__``, timed in the loop."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from typing import Any

import torch

from benchmarks.environment import Env
from benchmarks.rows.base import Context
from benchmarks.schema import RowResult, Value

__all__ = ["ROWS"]

_TARGET_MS = 5.0
_LOADER_SECONDS = 0.02


class EventLoop:
    """A loader of 20 ms a batch, a 1 ms ticker beside it; batches of 38.5 MB (0.4 MB if quick)."""

    name = "loop-hold"
    group = "measure"
    rank = 7
    title = "longest hold of an asyncio loop by one step of __anext__; loader of 20 ms a batch"

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        env = context.env
        result = RowResult(self.name, self.title)
        count = 10 if env.small else 50
        repeats = context.options.repeats
        controls = [asyncio.run(_control(env, count)) for _ in range(repeats)]
        control = statistics.median(controls)
        note = "a step that does nothing, beside a plain thread that copies the same bytes: what the machine adds"
        result.values.append(Value("control: longest hold", control, "ms", raw=controls, note=note))
        for kind in ("sync loader", "async source", "to the host"):
            found = [asyncio.run(_measure(env, kind, count)) for _ in range(repeats)]
            walls, cpus, beats = (list(column) for column in zip(*found, strict=True))
            wall, cpu = statistics.median(walls), statistics.median(cpus)
            target = f"<= {_TARGET_MS:.0f}"
            met = True if wall <= _TARGET_MS else None if control > _TARGET_MS else False
            result.values += [
                Value(f"{kind}: longest hold", wall, "ms", target, met, walls),
                Value(f"{kind}: longest hold, CPU time", cpu, "ms", target, cpu <= _TARGET_MS, cpus),
                Value(f"{kind}: beats of the ticker a batch", statistics.median(beats), "", raw=beats),
            ]
        return result


class _Timed(Awaitable[Any]):
    """Awaits a coroutine and keeps its longest step."""

    def __init__(self, coroutine: Any, longest: list[float]) -> None:
        self._steps = coroutine.__await__()
        self._longest = longest

    def __await__(self) -> Generator[Any, Any, Any]:
        value = None
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                waited_for = self._steps.send(value)
            except StopIteration as done:
                return done.value
            finally:
                self._longest[0] = max(self._longest[0], time.perf_counter() - wall)
                self._longest[1] = max(self._longest[1], time.thread_time() - cpu)
            value = yield waited_for


def _loader(pool: list[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    for index in range(count):
        time.sleep(_LOADER_SECONDS)
        yield pool[index % 4]


async def _source(pool: list[torch.Tensor], count: int) -> AsyncIterator[torch.Tensor]:
    for index in range(count):
        await asyncio.sleep(_LOADER_SECONDS)
        yield pool[index % 4]


async def _ticker(beats: list[int]) -> None:
    while True:
        await asyncio.sleep(0.001)
        beats[0] += 1


async def _control(env: Env, count: int) -> float:
    """Milliseconds of the longest step of a sleeping coroutine, while a thread makes batches that the loop drops."""
    batch = _pool(env)[0]
    stop = threading.Event()
    made: list[torch.Tensor] = []

    def copy() -> None:
        while not stop.wait(_LOADER_SECONDS):
            made.append(torch.empty_like(batch).copy_(batch))

    thread = threading.Thread(target=copy)
    thread.start()
    longest = [0.0, 0.0]
    ticking = asyncio.create_task(_ticker([0]))
    for _ in range(count):
        for _ in range(3):
            await _Timed(asyncio.sleep(_LOADER_SECONDS / 3), longest)
        made.clear()  # in the loop's thread, as a consumer drops its batches
    ticking.cancel()
    stop.set()
    thread.join()
    return longest[0] * 1e3


def _pool(env: Env) -> list[torch.Tensor]:
    side = 64 if env.small else 224
    return [torch.randint(0, 256, (32 if env.small else 256, 3, side, side), dtype=torch.uint8) for _ in range(4)]


async def _measure(env: Env, kind: str, count: int) -> tuple[float, float, float]:
    """Milliseconds of the longest step, as wall and as CPU time, and beats a batch."""
    from prefetchpipe import GPUPrefetcher, HostPrefetcher

    pool = _pool(env)
    beats = [0]
    longest = [0.0, 0.0]
    ticking = asyncio.create_task(_ticker(beats))
    seen = 0
    source = _source(pool, count) if kind == "async source" else _loader(pool, count)
    batches: Any = GPUPrefetcher(source, env.device)
    if kind == "to the host":
        batches = HostPrefetcher(batches, device=env.device)
    async with batches:
        iterator = aiter(batches)
        while True:
            try:
                await _Timed(iterator.__anext__(), longest)
            except StopAsyncIteration:
                break
            seen += 1
    ticking.cancel()
    if seen != count:
        raise RuntimeError(f"{seen} batches instead of {count}")
    return longest[0] * 1e3, longest[1] * 1e3, beats[0] / count


ROWS = (EventLoop(),)
