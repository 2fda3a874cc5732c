"""Tables on the host: gather, scatter, a training step of an embedding, memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch

from benchmarks.environment import Env
from benchmarks.measure import interleaved
from benchmarks.rows.base import Context
from benchmarks.schema import Cell, Regime, RowResult, Value
from benchmarks.tables import MOVERS, STEPS, missing, random_ids

__all__ = ["ROWS"]

_DIM = 128
_WARM = 3


class _TableRow:
    """Contenders over one table each, taking turns."""

    name = ""
    group = "host"
    rank = 1
    title = ""
    contenders: Iterable[str] = ()
    against = "speedtorch"
    target = 1.0

    def candidate(self, name: str, rows: torch.Tensor, env: Env, steps: int) -> Callable[[], float]:
        """Sets ``name`` up; the result measures seconds a step."""
        raise NotImplementedError

    def size(self, env: Env) -> tuple[int, int]:
        """Rows of the table, and bytes that a step brings."""
        raise NotImplementedError

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        env = context.env
        count, nbytes = self.size(env)
        result = RowResult(self.name, self.title, "rows of a table on the host", nbytes, 1)
        result.parts = {"link_ms": env.link_ms(nbytes), "source_ms": 0.0}
        rows = torch.rand(count, _DIM, generator=torch.Generator().manual_seed(0))
        steps = 3 if env.small else 30
        regime = Regime("transfer", 0.0, env.link_ms(nbytes), "link")
        cells: dict[str, Cell] = {}
        candidates: dict[str, Callable[[], float]] = {}

        def failed(name: str, error: Exception) -> None:
            cells[name].error = f"{type(error).__name__}: {error}"
            context.progress.say(f"{self.name}  {name}: {cells[name].error}", style="yellow")

        wanted = context.options.contenders
        for name in self.contenders:
            reason = missing(name, env)
            if wanted and not name.startswith(wanted):
                reason = "not asked for"
            if reason is not None:
                result.left_out[name] = reason
                continue
            cells[name] = Cell(name, steps)
            try:
                candidates[name] = self.candidate(name, rows, env, steps)
            except Exception as error:
                failed(name, error)
        context.watch()
        for name, seconds in interleaved(candidates, context.options.repeats, failed=failed).items():
            cells[name].ms = [1e3 * value for value in seconds]
        self._compare(result, cells)
        regime.cells = [
            cell for name, cell in cells.items() if name != "gpu"
        ]  # a yardstick, no peer: it needs the room
        result.regimes.append(regime)
        return result

    def _compare(self, result: RowResult, cells: dict[str, Cell]) -> None:
        """The ratios that the targets are about."""
        ours = cells["prefetchpipe"].median if "prefetchpipe" in cells else None
        on_gpu = cells["gpu"].median if "gpu" in cells else None
        if on_gpu is not None:
            result.values.append(Value(f"{self.name}, all on the GPU", on_gpu, "ms", raw=cells["gpu"].ms))
        peer = cells[self.against].median if self.against in cells else None
        if ours and peer:
            slower = self.against == "gpu"
            ratio = ours / peer if slower else peer / ours
            result.values.append(
                Value(
                    f"{self.name}, {'time against' if slower else 'times faster than'} {self.against}",
                    ratio,
                    "x",
                    f"{'<=' if slower else '>='} {self.target}",
                    ratio <= self.target if slower else ratio >= self.target,
                )
            )


def _timed(env: Env, step: Callable[[int], Any], steps: int) -> float:
    for number in range(_WARM):
        step(number)
    env.synchronize()
    start = time.perf_counter()
    for number in range(steps):
        step(_WARM + number)
    env.synchronize()
    return (time.perf_counter() - start) / steps


class MoveRow(_TableRow):
    """131,072 rows of 128 out of 4 million, distinct and in random order."""

    contenders = tuple(MOVERS)

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank
        self.target = 1.3 if name == "gather" else 1.0
        self.title = f"{name} 131,072 rows of 128 float32, table of 4 M rows"

    def _counts(self, env: Env) -> tuple[int, int]:
        return (20_000, 2_000) if env.small else (4_000_000, 131_072)

    def size(self, env: Env) -> tuple[int, int]:
        rows, ids = self._counts(env)
        return rows, ids * _DIM * 4

    def candidate(self, name: str, rows: torch.Tensor, env: Env, steps: int) -> Callable[[], float]:
        mover = MOVERS[name](rows, env)
        _, count = self._counts(env)
        pool = [
            torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count] for seed in range(1, 5)
        ]
        pairs = [(ids, ids.to(env.device)) for ids in pool]
        values = [torch.full((count, _DIM), float(seed), device=env.device) for seed in range(1, 5)]

        def gather(number: int) -> None:
            mover.gather(*pairs[number % 4])

        def scatter(number: int) -> None:
            mover.scatter(*pairs[number % 4], values[number % 4])

        step = gather if self.name == "gather" else scatter
        if self.name == "gather":
            got = mover.gather(*pairs[0]).cpu()
            assert torch.equal(got, rows[pool[0]]), "wrong rows"
        else:
            scatter(0)
            scatter(1)
            assert torch.equal(mover.read(pool[1]), values[1].cpu()), "wrong rows"
        return lambda: _timed(env, step, steps)


class StepRow(_TableRow):
    """512 words with 67 contexts each: look up, dot products, backward, optimizer."""

    def __init__(self, kind: type[torch.optim.Optimizer], rank: int) -> None:
        self.kind = kind
        self.against, self.target = "gpu", 1.2
        self.name, self.rank = f"embedding-{kind.__name__.lower()}", rank
        self.title = f"embedding step, 512 x 68 rows of 128, {kind.__name__}, table of 1 M rows"
        self.contenders = tuple(name for name in STEPS if "table" not in name or kind is torch.optim.Adam)

    def _shape(self, env: Env) -> tuple[int, int]:
        return (32, 8) if env.small else (512, 68)

    def size(self, env: Env) -> tuple[int, int]:
        words, contexts = self._shape(env)
        return 20_000 if env.small else 1_000_000, words * contexts * _DIM * 4

    def candidate(self, name: str, rows: torch.Tensor, env: Env, steps: int) -> Callable[[], float]:
        step, embedding = STEPS[name](rows, env, self.kind)
        pool = [random_ids(len(rows), self._shape(env), seed) for seed in range(1, 9)]
        ahead = name.startswith("prefetchpipe") and "no lookahead" not in name

        def run() -> float:
            batches = [pool[number % len(pool)].clone() for number in range(_WARM + steps)]
            loop = embedding.lookahead(batches, lambda ids: ids) if ahead else batches
            start = 0.0
            for number, ids in enumerate(loop):
                if number == _WARM:
                    env.synchronize()
                    start = time.perf_counter()
                step(ids)
            env.synchronize()
            return (time.perf_counter() - start) / steps

        return run


class MemoryRow:
    """What a table of 10 million rows of 128 float32 takes, on the host and on the GPU."""

    name = "table-memory"
    group = "host"
    rank = 9
    title = "memory of a table of 10 M x 128 float32"

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        env = context.env
        result = RowResult(self.name, self.title)
        count = 20_000 if env.small else 10_000_000
        expected = count * _DIM * 4 / 1e9
        for name in ("prefetchpipe", "speedtorch", "gpu"):
            reason = missing(name, env)
            if reason is not None:
                result.left_out[name] = reason
                continue
            rows = torch.zeros(1, _DIM).expand(count, _DIM)
            gc.collect()
            before = _held(env)
            mover = MOVERS[name](rows.contiguous() if name == "speedtorch" else rows, env)
            after = _held(env)
            for place, held in (("host", after[0] - before[0]), ("GPU", after[1] - before[1])):
                note = f"the rows alone are {expected:.3g} GB"
                result.values.append(Value(f"{name}, {place}", held / 1e9, "GB", note=note))
            del mover
        return result


def _held(env: Env) -> tuple[int, int]:
    device = 0
    if env.cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(env.device)
        device = total - free
    return psutil.Process().memory_info().rss, device


ROWS = (
    MoveRow("gather", 1),
    MoveRow("scatter", 2),
    StepRow(torch.optim.Adagrad, 3),
    StepRow(torch.optim.Adam, 4),
    MemoryRow(),
)
