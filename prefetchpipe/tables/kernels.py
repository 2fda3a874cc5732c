"""Kernels that read and write rows in page-locked host memory: no copy in between, and no CPU core busy.

Rows move as bytes, in the widest pieces that width and addresses allow. A cap on the blocks leaves most multiprocessors
to the step that runs at the same time; bytes over the link need few of them.
"""

from __future__ import annotations

import weakref

import torch

from prefetchpipe.device.base import Device, Kernel, Stream
from prefetchpipe.tables.index import PAD

__all__ = ["RowKernels"]

_THREADS = 512
_UNROLL = 4
_BLOCKS = 32
_WIDTHS = {16: "uint4", 8: "u64", 4: "u32", 2: "u16", 1: "u8"}
_SUMMED = {torch.float32: "float", torch.float64: "double", torch.int32: "int", torch.int64: "i64"}

# `fault` is page-locked: [state, id, position]. Of several bad ids the first thread to get there reports its own.
_COMMON = f"""
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
#define PAD {PAD}LL
#define UNROLL {_UNROLL}

__device__ void report(i64* fault, i64 id, i64 position) {{
    if (atomicCAS((u64*)fault, 0ULL, 1ULL) == 0ULL) {{
        volatile i64* said = fault;
        said[1] = id;
        said[2] = position;
        __threadfence_system();
        said[0] = 2;
    }}
}}
"""

_MOVE = """
extern "C" __global__ void gather_%(bytes)d(
    const %(type)s* table, const i64* index, %(type)s* out, i64 count, i64 width, i64 rows, i64* fault) {
    i64 total = count * width, step = (i64)gridDim.x * blockDim.x;
    for (i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x; first < total; first += step * UNROLL) {
        %(type)s piece[UNROLL];
        #pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            i64 i = first + k * step;
            piece[k] = %(type)s();
            if (i >= total) continue;
            i64 position = i / width, id = index[position];
            if (id == PAD) continue;
            if (id < 0 || id >= rows) { report(fault, id, position); continue; }
            piece[k] = table[id * width + i %% width];
        }
        #pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            i64 i = first + k * step;
            if (i < total) out[i] = piece[k];
        }
    }
}

// ids are sorted if `order` is given, and then the last of equal ids is the one that is written.
extern "C" __global__ void scatter_%(bytes)d(
    %(type)s* table, const i64* ids, const i64* order, const %(type)s* values,
    i64 count, i64 width, i64 rows, i64* fault) {
    i64 total = count * width, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        i64 at = i / width, id = ids[at], position = order ? order[at] : at;
        if (id == PAD) continue;
        if (id < 0 || id >= rows) { report(fault, id, position); continue; }
        if (order && at + 1 < count && ids[at + 1] == id) continue;
        table[id * width + i %% width] = values[position * width + i %% width];
    }
}
"""

# One thread adds up all occurrences of an id, in their order: the same sum on every run.
_ADD = """
extern "C" __global__ void add_%(name)s(
    %(type)s* table, const i64* ids, const i64* order, const %(type)s* values,
    i64 count, i64 width, i64 rows, i64* fault) {
    i64 total = count * width, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        i64 at = i / width, id = ids[at], column = i %% width;
        if (id == PAD || (at > 0 && ids[at - 1] == id)) continue;
        if (id < 0 || id >= rows) { report(fault, id, order[at]); continue; }
        %(type)s sum = table[id * width + column];
        for (i64 next = at; next < count && ids[next] == id; ++next) sum += values[order[next] * width + column];
        table[id * width + column] = sum;
    }
}
"""

SOURCE = (
    _COMMON
    + "".join(_MOVE % {"bytes": size, "type": name} for size, name in _WIDTHS.items())
    + "".join(_ADD % {"name": name, "type": name} for name in _SUMMED.values())
)
NAMES = (
    *(f"{what}_{size}" for size in _WIDTHS for what in ("gather", "scatter")),
    *(f"add_{name}" for name in _SUMMED.values()),
)


class RowKernels:
    """The kernels of one device.

    Args:
        kernels: By name.
        blocks: Most blocks of a launch, one for each multiprocessor that it may take.
    """

    def __init__(self, kernels: dict[str, Kernel], blocks: int = _BLOCKS) -> None:
        self._kernels = kernels
        self._blocks = blocks

    @classmethod
    def of(cls, device: Device) -> RowKernels | None:
        """For ``device``, compiled once; None where there are none."""
        if device not in _compiled:
            kernels = device.compile_kernels(SOURCE, NAMES)
            _compiled[device] = None if kernels is None else cls(dict(kernels))
        return _compiled[device]

    def gather(
        self, table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, *, fault: torch.Tensor, stream: Stream
    ) -> None:
        """``out[i] = table[ids[i]]``; zeros for PAD and for an id out of range."""
        size = _piece(table, out)
        width = table.shape[1] * table.dtype.itemsize // size
        args = (table, ids, out, ids.numel(), width, table.shape[0], fault)
        self._launch(f"gather_{size}", ids.numel() * width, args, stream, _UNROLL)

    def scatter(
        self,
        table: torch.Tensor,
        ids: torch.Tensor,
        order: torch.Tensor | None,
        values: torch.Tensor,
        *,
        fault: torch.Tensor,
        stream: Stream,
    ) -> None:
        """``table[ids[i]] = values[order[i]]``, the last of equal ids; without ``order`` they are distinct."""
        size = _piece(table, values)
        width = table.shape[1] * table.dtype.itemsize // size
        args = (table, ids, 0 if order is None else order, values, ids.numel(), width, table.shape[0], fault)
        self._launch(f"scatter_{size}", ids.numel() * width, args, stream)

    def add(
        self,
        table: torch.Tensor,
        ids: torch.Tensor,
        order: torch.Tensor,
        values: torch.Tensor,
        *,
        fault: torch.Tensor,
        stream: Stream,
    ) -> None:
        """``table[ids[i]] += values[order[i]]``, ids sorted."""
        name = f"add_{_SUMMED[table.dtype]}"
        args = (table, ids, order, values, ids.numel(), table.shape[1], table.shape[0], fault)
        self._launch(name, ids.numel() * table.shape[1], args, stream)

    @staticmethod
    def can_add(dtype: torch.dtype) -> bool:
        """Whether there is an adding kernel for ``dtype``."""
        return dtype in _SUMMED

    def _launch(self, name: str, pieces: int, args: tuple[object, ...], stream: Stream, unroll: int = 1) -> None:
        blocks = max(1, min(self._blocks, -(-pieces // (_THREADS * unroll))))
        self._kernels[name](stream, blocks, _THREADS, args)


_compiled: weakref.WeakKeyDictionary[Device, RowKernels | None] = weakref.WeakKeyDictionary()


def _piece(table: torch.Tensor, rows: torch.Tensor) -> int:
    """The widest piece that divides a row and both addresses."""
    row = table.shape[1] * table.dtype.itemsize
    return next(s for s in _WIDTHS if row % s == 0 and table.data_ptr() % s == 0 and rows.data_ptr() % s == 0)
