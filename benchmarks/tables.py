"""Ways to keep a table that is too large for the GPU: rows to the device by index, rows back, a training step.

Every contender is built for one row of the table of results and holds a table of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.environment import Env

__all__ = ["MOVERS", "STEPS", "Pinned", "SpeedTorchTable", "missing"]

Optimizer = type[torch.optim.Optimizer]


def missing(name: str, env: Env) -> str | None:
    """Why ``name`` cannot take part here, None if it can."""
    if name.startswith(("speedtorch", "gpu")) and not env.cuda:
        return "needs a CUDA device"
    if name.startswith("speedtorch"):
        try:
            import cupy  # noqa: F401
        except ImportError as error:
            return f"cupy cannot be imported: {error}"
    return None


class Mover:
    """Gathers and scatters rows of one table.

    Args:
        rows: What the table starts with, in host memory.
        env: Where to.
    """

    def __init__(self, rows: torch.Tensor, env: Env) -> None:
        self.table = rows.clone()
        self.device = env.device

    def gather(self, host: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
        """Rows by the same distinct ids, given in host memory and on the device."""
        del device
        return self.table[host].to(self.device)

    def scatter(self, host: torch.Tensor, device: torch.Tensor, values: torch.Tensor) -> None:
        """``values`` of the device into the rows."""
        del device
        self.table[host] = values.to("cpu")

    def read(self, host: torch.Tensor) -> torch.Tensor:
        """Rows as they are, in host memory."""
        return self.table[host]


class Pinned(Mover):
    """Tuned torch: ``index_select`` with all its threads into page-locked memory that is used again, then a copy."""

    def __init__(self, rows: torch.Tensor, env: Env) -> None:
        super().__init__(rows, env)
        self._cuda = env.cuda
        self._buffers: list[torch.Tensor] = []
        self._events = [torch.cuda.Event() for _ in range(2)] if env.cuda else []
        self._turn = 0

    def _buffer(self, count: int) -> torch.Tensor:
        if not self._buffers or len(self._buffers[0]) != count:
            shape = (count, self.table.shape[1])
            self._buffers = [torch.empty(shape, dtype=self.table.dtype, pin_memory=self._cuda) for _ in range(2)]
        self._turn = 1 - self._turn
        if self._cuda:
            self._events[self._turn].synchronize()
        return self._buffers[self._turn]

    def gather(self, host: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
        buffer = self._buffer(len(host))
        torch.index_select(self.table, 0, host, out=buffer)
        rows = buffer.to(self.device, non_blocking=True, copy=True)
        if self._cuda:
            self._events[self._turn].record()
        return rows

    def scatter(self, host: torch.Tensor, device: torch.Tensor, values: torch.Tensor) -> None:
        buffer = self._buffer(len(host))
        buffer.copy_(values, non_blocking=True)
        if self._cuda:
            self._events[self._turn].record()
            self._events[self._turn].synchronize()
        self.table.index_copy_(0, host, buffer)


class SpeedTorchTable(Mover):
    """SpeedTorch's way: a CuPy array whose memory is page-locked, CuPy's fancy indexing, DLPack."""

    def __init__(self, rows: torch.Tensor, env: Env) -> None:
        import cupy

        class HostMemory(cupy.cuda.BaseMemory):  # type: ignore[misc]
            def __init__(self, nbytes: int) -> None:
                self.size = nbytes
                self.device_id = cupy.cuda.device.get_device_id()
                self.ptr = cupy.cuda.runtime.hostAlloc(nbytes, 0)

            def __del__(self) -> None:
                cupy.cuda.runtime.freeHost(self.ptr)

        array = rows.numpy()
        pointer = cupy.cuda.MemoryPointer(HostMemory(array.nbytes), 0)
        self._cupy = cupy
        self.device = env.device
        self._array = cupy.ndarray(array.shape, array.dtype, memptr=pointer)
        self._array.set(array)

    def gather(self, host: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = torch.from_dlpack(self._array[self._cupy.from_dlpack(device)])
        return rows

    def scatter(self, host: torch.Tensor, device: torch.Tensor, values: torch.Tensor) -> None:
        self._array[self._cupy.from_dlpack(device)] = self._cupy.from_dlpack(values)

    def read(self, host: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._cupy.asnumpy(self._array[host.numpy()]))


class SpeedTorchHostIds(SpeedTorchTable):
    """The same with NumPy indices, as its loop has them: they are copied at each call."""

    def gather(self, host: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = torch.from_dlpack(self._array[host.numpy()])
        return rows

    def scatter(self, host: torch.Tensor, device: torch.Tensor, values: torch.Tensor) -> None:
        self._array[host.numpy()] = self._cupy.from_dlpack(values)


class OnGpu(Mover):
    """The table on the GPU."""

    def __init__(self, rows: torch.Tensor, env: Env) -> None:
        self.table = rows.to(env.device)
        self.device = env.device

    def gather(self, host: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
        return self.table.index_select(0, device)

    def scatter(self, host: torch.Tensor, device: torch.Tensor, values: torch.Tensor) -> None:
        self.table.index_copy_(0, device, values)

    def read(self, host: torch.Tensor) -> torch.Tensor:
        return self.table[host.to(self.device)].cpu()


class Ours(Mover):
    """``HostTable``, ids on the device."""

    unique = True

    def __init__(self, rows: torch.Tensor, env: Env) -> None:
        from prefetchpipe import HostTable

        self.rows = HostTable(*rows.shape, rows.dtype, env.device, rows)

    def gather(self, host: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
        return self.rows.gather(device)

    def scatter(self, host: torch.Tensor, device: torch.Tensor, values: torch.Tensor) -> None:
        self.rows.scatter(device, values, unique=self.unique)

    def read(self, host: torch.Tensor) -> torch.Tensor:
        return self.rows.host_tensor()[host]


class OursAnyIds(Ours):
    """The same without the promise that ids are distinct; a gather takes them from host memory."""

    unique = False

    def gather(self, host: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
        return self.rows.gather(host)


MOVERS: dict[str, Callable[[torch.Tensor, Env], Mover]] = {
    "torch": Mover,
    "torch-pinned": Pinned,
    "speedtorch": SpeedTorchTable,
    "speedtorch(numpy ids)": SpeedTorchHostIds,
    "gpu": OnGpu,
    "prefetchpipe": Ours,
    "prefetchpipe(any ids)": OursAnyIds,
}


# A training step: look up, a dot product as in skip-gram, backward, optimizer

Step = Callable[[torch.Tensor], None]
Loop = Callable[[list[torch.Tensor]], Iterator[torch.Tensor]]


def _loss(rows: torch.Tensor) -> torch.Tensor:
    """[n, contexts + 1, dim]: the first is the word."""
    score = (rows[:, 1:] * rows[:, :1]).sum(-1)
    return nn.functional.softplus(score).sum()


def _torch_step(rows: torch.Tensor, env: Env, kind: Optimizer, where: torch.device) -> tuple[Step, Any]:
    """``nn.Embedding`` with sparse gradients; Adam has its sparse twin for them."""
    embedding = nn.Embedding(*rows.shape, sparse=True, _weight=rows.clone().to(where))
    chosen = torch.optim.SparseAdam if kind is torch.optim.Adam else kind
    optimizer = chosen(embedding.parameters(), lr=0.01)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        _loss(embedding(ids.to(where)).to(env.device)).backward()
        optimizer.step()

    return step, embedding.weight


def _cpu(rows: torch.Tensor, env: Env, kind: Optimizer) -> tuple[Step, Any]:
    return _torch_step(rows, env, kind, torch.device("cpu"))


def _gpu(rows: torch.Tensor, env: Env, kind: Optimizer) -> tuple[Step, Any]:
    return _torch_step(rows, env, kind, env.device)


def _speedtorch(rows: torch.Tensor, env: Env, kind: Optimizer) -> tuple[Step, Any]:
    """Every position has a row of its own, as in its example: updates of repeated ids are lost."""
    names = ("sum",) if kind is torch.optim.Adagrad else ("exp_avg", "exp_avg_sq")
    tables = {name: SpeedTorchTable(torch.zeros_like(rows), env) for name in names}
    table = SpeedTorchTable(rows, env)
    embedding: list[nn.Embedding] = []
    optimizers: list[torch.optim.Optimizer] = []

    def step(ids: torch.Tensor) -> None:
        flat = ids.view(-1)
        if not embedding:
            embedding.append(nn.Embedding(flat.numel(), rows.shape[1], device=env.device))
            optimizers.append(kind(embedding[0].parameters(), lr=0.01))
            optimizers[0].zero_grad()
            _loss(embedding[0](torch.arange(flat.numel(), device=env.device).view(ids.shape))).backward()
            optimizers[0].step()  # makes the state
        model, optimizer = embedding[0], optimizers[0]
        device_ids = flat.to(env.device)
        weight = model.weight
        weight.data = table.gather(flat, device_ids)
        for name, states in tables.items():
            optimizer.state[weight][name] = states.gather(flat, device_ids)
        optimizer.zero_grad()
        _loss(model(torch.arange(flat.numel(), device=env.device).view(ids.shape))).backward()
        optimizer.step()
        table.scatter(flat, device_ids, weight.data)
        for name, states in tables.items():
            states.scatter(flat, device_ids, optimizer.state[weight][name])

    return step, None


def _ours(rows: torch.Tensor, env: Env, kind: Optimizer, **options: Any) -> tuple[Step, Any]:
    from prefetchpipe import HostEmbedding
    from prefetchpipe.tables import RowOptimizer

    embedding = HostEmbedding(*rows.shape, device=env.device, init=rows)
    optimizer = RowOptimizer(kind, embedding, lr=0.01, **options)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        _loss(embedding(ids)).backward()
        optimizer.step()

    return step, embedding


def _ours_table_count(rows: torch.Tensor, env: Env, kind: Optimizer) -> tuple[Step, Any]:
    return _ours(rows, env, kind, step_count="table")


STEPS: dict[str, Callable[[torch.Tensor, Env, Optimizer], tuple[Step, Any]]] = {
    "torch-cpu": _cpu,
    "speedtorch": _speedtorch,
    "gpu": _gpu,
    "prefetchpipe": _ours,
    "prefetchpipe(no lookahead)": _ours,
    "prefetchpipe(step_count=table)": _ours_table_count,
}


def random_ids(rows: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Zipf-like ids, as words are: a few of them often, most of them rarely."""
    generator = np.random.default_rng(seed)
    ranks = np.floor(rows ** generator.random(shape)).astype(np.int64) - 1
    return torch.from_numpy(np.random.default_rng(0).permutation(rows))[torch.from_numpy(ranks)]
