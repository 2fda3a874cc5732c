"""Tables: cases N6 (indices, values) and N7 (neighbours)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefetchpipe import HostEmbedding, HostTable
from prefetchpipe.testing import SimulatedDevice
from tests.support import is_cuda, is_simulated, run_script, settle
from tests.support_tables import ZeroCopyDevice, on_device

ROWS, DIM = 5, 3


@pytest.fixture(params=["cpu", "staged", "zero copy", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return {"staged": SimulatedDevice(), "zero copy": ZeroCopyDevice()}.get(request.param, request.param)


@pytest.fixture(params=["staged", "zero copy", pytest.param("cuda", marks=pytest.mark.gpu)])
def stream_device(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return {"staged": SimulatedDevice(), "zero copy": ZeroCopyDevice()}.get(request.param, request.param)


def content() -> torch.Tensor:
    return torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)


def table_on(device: Any) -> HostTable:
    return HostTable(ROWS, DIM, device=device, init=content())


def values_of(device: Any, tensor: torch.Tensor) -> torch.Tensor:
    settle(device)
    return tensor.cpu()


OUTSIDE = [ROWS, -1, -ROWS - 1, 2**40]
KINDS = {
    "list": list,
    "array": np.array,
    "int32": lambda ids: torch.tensor(ids, dtype=torch.int64).clamp(-(2**31), 2**31 - 1).int(),
    "int64": torch.tensor,
}


# Case N6, the index


@pytest.mark.parametrize("bad", OUTSIDE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["gather", "scatter", "scatter_add"])
def test_n6_an_id_out_of_range_is_named(device: Any, bad: int, kind: str, call: str) -> None:
    table = table_on(device)
    index = KINDS[kind]([[0, 1], [bad, 2]])
    shown = max(-(2**31), min(bad, 2**31 - 1)) if kind == "int32" else bad
    arguments = () if call == "gather" else (torch.ones(2, 2, DIM),)
    with pytest.raises(IndexError, match=rf"index {shown} at position \(1, 0\) .* table of 5 rows; allowed: 0 to 4"):
        getattr(table, call)(index, *arguments)
    assert torch.equal(table.host_tensor(), content())


@pytest.mark.parametrize("bad", OUTSIDE)
def test_n6_an_id_on_the_device_is_checked_there(stream_device: Any, bad: int) -> None:
    device = stream_device
    table = table_on(device)
    index = on_device(device, torch.tensor([1, bad, 2]))
    with pytest.raises(IndexError, match=rf"index {bad} at position 1 .* 5 rows"):
        rows = table.gather(index)
        settle(device)
        assert values_of(device, rows).tolist() == [[3, 4, 5], [0, 0, 0], [6, 7, 8]]
        table.gather([0])
    table.gather([0])  # said once
    with pytest.raises(IndexError, match=rf"index {bad} at position 1 "):
        table.scatter(index, on_device(device, torch.ones(3, DIM)))
        table.synchronize()
    expected = content()
    if isinstance(device, ZeroCopyDevice) or (is_cuda(device) and table.ids_on_device):
        expected[1] = expected[2] = 1
    assert torch.equal(table.host_tensor(), expected)


@pytest.mark.parametrize("bad", OUTSIDE)
def test_n6_ids_that_an_embedding_looks_up_are_checked_before_they_are_sorted(stream_device: Any, bad: int) -> None:
    device = stream_device
    embedding = HostEmbedding(5, DIM, device=device)
    if not embedding.table.ids_on_device:
        pytest.skip("ids are checked in host memory")
    with pytest.raises(IndexError, match=rf"index {bad} at position 1 is out of range for a table of 5 rows"):
        embedding(on_device(device, torch.tensor([3, bad, 2])))
        settle(device)
        embedding.table.synchronize()


@pytest.mark.parametrize("index", [[], np.zeros((2, 0), np.int32), torch.zeros(0, 3, dtype=torch.uint8)])
def test_n6_an_empty_index(device: Any, index: Any) -> None:
    table = table_on(device)
    shape = np.shape(index)
    assert table.gather(index).shape == (*shape, DIM)
    table.scatter(index, torch.zeros(*shape, DIM))
    table.scatter_add(index, torch.zeros(*shape, DIM))
    assert torch.equal(table.host_tensor(), content())


def test_n6_a_table_without_rows(device: Any) -> None:
    table = HostTable(0, DIM, device=device)
    assert table.gather([]).shape == (0, DIM)
    table.scatter(torch.zeros(0, dtype=torch.int64), torch.zeros(0, DIM))
    assert table.numpy().shape == (0, DIM)
    with pytest.raises(IndexError, match=r"index 0 .* no rows"):
        table.gather([0])


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (4,), (2, 2), (1, 2, 2)])
def test_n6_any_integer_type_and_shape(device: Any, where: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    table = table_on(device)
    ids = torch.tensor([4, 0, 2, 2])[: max(1, int(np.prod(shape)))].view(shape).to(dtype)
    index = on_device(device, ids) if where == "device" else ids
    assert torch.equal(values_of(device, table.gather(index)), content()[ids.long()])
    if where == "host":
        assert torch.equal(values_of(device, table.gather(ids.numpy())), content()[ids.long()])
        assert torch.equal(values_of(device, table.gather(ids.tolist())), content()[ids.long()])


@pytest.mark.parametrize(
    "index", [True, [True, False], torch.ones(2, dtype=torch.bool), [0.0], np.zeros(2), torch.zeros(2), "0", None]
)
def test_n6_what_is_no_integer_is_rejected(device: Any, index: Any) -> None:
    with pytest.raises(TypeError, match="index must be integers"):
        table_on(device).gather(index)


def test_n6_an_index_that_is_strided_or_read_only() -> None:
    table = table_on("cpu")
    array = np.arange(6)[::-1][1:]
    array.flags.writeable = False
    assert torch.equal(table.gather(array), content()[[4, 3, 2, 1, 0]])
    assert torch.equal(table.gather(torch.arange(8).view(4, 2)[:2, 0]), content()[[0, 2]])
    assert torch.equal(table.gather(np.array([3, 1], dtype=">i4")), content()[[3, 1]])
    with pytest.raises(IndexError, match="18446744073709551615"):
        table.gather(np.array([2**64 - 1], dtype=np.uint64))


# Case N6, the values


@pytest.mark.parametrize("call", ["scatter", "scatter_add"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(2, DIM + 1), r"shape \(2, 3\)"),
        (torch.ones(3, DIM), r"shape \(2, 3\)"),
        (torch.ones(DIM), r"shape \(2, 3\)"),
        (torch.ones(2, DIM, dtype=torch.float64), "float32"),
        (np.ones((2, DIM)), "float32"),
        (torch.ones(2, DIM, dtype=torch.int32), "float32"),
    ],
)
def test_n6_values_of_a_wrong_width_or_type(device: Any, call: str, values: Any, message: str) -> None:
    table = table_on(device)
    with pytest.raises(ValueError, match=message):
        getattr(table, call)([0, 1], values)
    assert torch.equal(table.host_tensor(), content())


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("ids_where", ["host", "device"])
def test_n6_the_last_of_repeated_ids_stays_and_adding_adds(device: Any, where: str, ids_where: str) -> None:
    ids = torch.tensor([3, 1, 3, 0, 3, 1])
    values = torch.arange(18, dtype=torch.float32).view(6, DIM) + 100
    index = on_device(device, ids) if ids_where == "device" else ids
    given = on_device(device, values) if where == "device" else values
    table = table_on(device)
    table.scatter(index, given)
    expected = content()
    expected[3], expected[1], expected[0] = values[4], values[5], values[3]
    assert torch.equal(table.host_tensor(), expected)
    table.scatter_add(index, given)
    for row, value in zip(ids.tolist(), values, strict=True):
        expected[row] += value
    assert torch.equal(table.host_tensor(), expected)


def test_n6_the_last_stays_in_a_large_scatter_too() -> None:
    table = HostTable(50, 4, device="cpu")
    ids = torch.randint(0, 50, (20_000,), generator=torch.Generator().manual_seed(0))
    values = torch.arange(80_000, dtype=torch.float32).view(-1, 4)
    table.scatter(ids, values)
    last = {int(row): position for position, row in enumerate(ids.tolist())}
    assert torch.equal(table.host_tensor(), values[[last[row] for row in range(50)]])


@pytest.mark.parametrize("where", ["host", "device"])
def test_n6_values_with_any_strides(device: Any, where: str) -> None:
    whole = torch.arange(24, dtype=torch.float32).view(DIM, 8)
    given = (on_device(device, whole) if where == "device" else whole).t()[::2]
    table = table_on(device)
    table.scatter([3, 0, 1, 2], given)
    assert torch.equal(table.host_tensor()[[3, 0, 1, 2]], whole.t()[::2])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.complex64]
)
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_n6_any_type_of_value(device: Any, dtype: torch.dtype, dim: int) -> None:
    rows = torch.arange(4 * dim).view(4, dim).to(dtype)
    table = HostTable(4, dim, dtype, device, rows)
    table.scatter([0, 1, 0], on_device(device, rows[[3, 3, 2]]))
    expected = rows[[2, 3, 2, 3]]
    assert torch.equal(values_of(device, table.gather(range(4))), expected)
    table.scatter_add([0, 0], on_device(device, rows[[1, 1]]))
    assert torch.equal(table.host_tensor()[0], expected[0] + rows[1] + rows[1])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("unique", [True, False])
def test_n6_types_that_torch_cannot_index_into(device: Any, dtype: torch.dtype, where: str, unique: bool) -> None:
    rows = (torch.arange(4 * DIM).view(4, DIM) % 5).to(dtype)
    table = HostTable(4, DIM, dtype, device)
    given = on_device(device, rows[[2, 3]]) if where == "device" else rows[[2, 3]]
    table.scatter([0, 3], given, unique=unique)
    assert values_of(device, table.gather([3, 0])).view(torch.uint8).equal(rows[[3, 2]].view(torch.uint8))


@pytest.mark.parametrize("call", ["scatter", "scatter_add"])
def test_n6_values_that_are_lazily_conjugated_or_negated(device: Any, call: str) -> None:
    rows = torch.randn(2, DIM, dtype=torch.complex64)
    for values in (rows.conj(), torch._neg_view(rows)):
        table = HostTable(2, DIM, torch.complex64, device)
        getattr(table, call)([0, 1], values)
        assert torch.equal(table.host_tensor(), values)


# Case N7


@pytest.mark.slow
def test_n7_a_live_table_at_exit_is_silent(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        "import sys\n"
        "import torch\n"
        "import prefetchpipe\n"
        "assert 'prefetchpipe.tables' not in sys.modules\n"
        "from prefetchpipe import HostEmbedding, HostTable\n"
        "from prefetchpipe.tables import RowOptimizer\n"
        "from prefetchpipe.testing import SimulatedDevice\n"
        "device = 'cuda' if torch.cuda.is_available() else SimulatedDevice(bandwidth=1e3)\n"
        f"mapped = HostTable(4, 2, device=device, path={str(tmp_path / 'rows.npy')!r})\n"
        "embedding = HostEmbedding(100, 4, device=device)\n"
        "optimizer = RowOptimizer(torch.optim.Adam, embedding, lr=0.1)\n"
        "for _ in embedding.lookahead([torch.arange(4)] * 3, lambda ids: ids):\n"
        "    embedding(_).sum().backward()\n"
        "    optimizer.step()\n"
        "from prefetchpipe.tables.index import read_index\n"
        "from prefetchpipe.tables.together import write_back\n"
        "write_back([mapped], read_index([1], 4, mapped.where),"
        " [mapped.gather([0]) if torch.cuda.is_available() else mapped.where.empty(torch.Size((1, 2)), (2, 1),"
        " torch.float32).fill_(7)])\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    if not torch.cuda.is_available():
        assert np.load(tmp_path / "rows.npy").tolist() == [[0, 0], [7, 7], [0, 0], [0, 0]]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_n7_a_table_on_another_device_than_the_current_one() -> None:
    torch.cuda.set_device(0)
    before = torch.cuda.memory_allocated(0)
    table = HostTable(ROWS, DIM, device="cuda:1", init=content())
    rows = table.gather([[4, 0]])
    table.scatter([2], rows[0, :1] + 1)
    assert rows.device == torch.device("cuda", 1)
    assert torch.equal(rows.cpu(), content()[torch.tensor([[4, 0]])])
    assert torch.equal(table.host_tensor()[2], content()[4] + 1)
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None, reason="needs a CUDA device and CuPy"
)
def test_n7_cupys_pools_and_stream_stay_as_they_were() -> None:
    import cupy

    def state() -> Any:
        pinned, device = cupy.get_default_pinned_memory_pool(), cupy.get_default_memory_pool()
        return (
            pinned.n_free_blocks(), device.total_bytes(), cupy.cuda.get_allocator(), cupy.cuda.get_current_stream().ptr,
            cupy.cuda.runtime.getDevice(),
        )  # fmt: skip

    before = state()
    table = HostTable(1000, 64, device="cuda")
    table.scatter([1], torch.ones(1, 64, device="cuda"))
    assert table.gather([1]).sum().item() == 64
    assert state() == before


def test_n7_the_simulated_device_has_its_memory_back() -> None:
    device = ZeroCopyDevice()
    table = HostTable(ROWS, DIM, device=device)
    table.gather(torch.arange(5))
    assert table.pinned
    assert device.pinned_bytes > table.nbytes
    table.close()
    assert device.pinned_bytes == 0
    table.close()
    assert is_simulated(device)
    with pytest.raises(RuntimeError, match="this HostTable was closed"):
        table.gather([0])
