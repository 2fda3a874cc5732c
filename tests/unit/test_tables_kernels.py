"""The CUDA source of the row kernels, compiled as C++ and run thread by thread: values, widths, padding, bad ids."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetchpipe.tables.index import PAD
from prefetchpipe.tables.kernels import NAMES, SOURCE, RowKernels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]

SHIM = """
#define __global__
#define __device__
struct uint4 { unsigned x, y, z, w; };
struct Dim { int x, y, z; };
static Dim gridDim, blockDim, blockIdx, threadIdx;
static unsigned long long atomicCAS(unsigned long long* p, unsigned long long was, unsigned long long now) {
    unsigned long long old = *p;
    if (old == was) *p = now;
    return old;
}
static void __threadfence_system() {}
extern "C" void place(int blocks, int threads, int block, int thread) {
    gridDim.x = blocks; blockDim.x = threads; blockIdx.x = block; threadIdx.x = thread;
}
"""
BLOCKS, THREADS, ROWS, IDS = 3, 7, 20, 57


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> RowKernels:
    folder: Path = tmp_path_factory.mktemp("kernels")
    (folder / "rows.cpp").write_text(SHIM + SOURCE)
    command = ["g++", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-o", "rows.so", "rows.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "rows.so"))

    def launcher(name: str) -> Callable[..., None]:
        function = getattr(library, name)

        def launch(stream: Any, blocks: int, threads: int, args: tuple[Any, ...]) -> None:
            values = [ctypes.c_longlong(a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in args]
            for block in range(BLOCKS):
                for thread in range(THREADS):
                    library.place(BLOCKS, THREADS, block, thread)
                    function(*values)

        return launch

    return RowKernels({name: launcher(name) for name in NAMES})


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 8, 16, 33])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int32, torch.int64], ids=str
)
def test_rows_move_and_bad_ids_are_told(kernels: RowKernels, dtype: torch.dtype, dim: int) -> None:
    draw = torch.Generator().manual_seed(dim)
    table = torch.randint(0, 100, (ROWS, dim), generator=draw).to(dtype)
    values = torch.randint(0, 100, (IDS, dim), generator=draw).to(dtype)
    ids = torch.randint(0, ROWS, (IDS,), generator=draw)
    ids[5] = PAD
    fault = torch.zeros(3, dtype=torch.int64)
    expected = table.clone()

    out = torch.full((IDS, dim), 9).to(dtype)
    kernels.gather(table, ids, out, fault=fault, stream=None)
    wanted = table[ids.clamp(max=ROWS - 1)]
    wanted[5] = 0
    assert torch.equal(out, wanted)

    ordered, order = torch.sort(ids, stable=True)
    kernels.scatter(table, ordered, order, values, fault=fault, stream=None)
    for position, row in enumerate(ids.tolist()):
        if row != PAD:
            expected[row] = values[position]
    assert torch.equal(table, expected)

    distinct = torch.randperm(ROWS, generator=draw)[:9]
    kernels.scatter(table, distinct, None, values[:9].contiguous(), fault=fault, stream=None)
    expected[distinct] = values[:9]
    assert torch.equal(table, expected)

    if kernels.can_add(dtype):
        more = torch.randn(IDS, dim, generator=draw).to(dtype)
        kernels.add(table, ordered, order, more, fault=fault, stream=None)
        for position, row in enumerate(ids.tolist()):
            if row != PAD:
                expected[row] += more[position]
        assert torch.equal(table, expected)
    assert fault.tolist() == [0, 0, 0]

    ids[7], ids[9] = ROWS, -3
    kernels.gather(table, ids, out, fault=fault, stream=None)
    assert fault.tolist() in ([2, ROWS, 7], [2, -3, 9])
    assert not out[[7, 9]].any()
    fault.zero_()
    kernels.scatter(table, torch.tensor([ROWS]), None, values[:1].contiguous(), fault=fault, stream=None)
    assert fault.tolist() == [2, ROWS, 0]
    assert torch.equal(table, expected)
