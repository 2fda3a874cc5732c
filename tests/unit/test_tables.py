"""HostTable: where its rows live, how they start, files, host reads; what the options say."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prefetchpipe
from prefetchpipe import HostEmbedding, HostTable
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.testing import SimulatedDevice
from tests.support import Thread
from tests.support_tables import ZeroCopyDevice, on_device


def numbers(rows: int = 6, dim: int = 4) -> torch.Tensor:
    return torch.arange(rows * dim, dtype=torch.float32).view(rows, dim)


# Start


@pytest.mark.parametrize("init", [None, "zeros"])
def test_rows_start_as_zeros(init: Any) -> None:
    assert HostTable(3, 2, device=SimulatedDevice(), init=init).numpy().tolist() == [[0, 0]] * 3


def test_rows_start_as_a_callable_a_tensor_or_an_array_says() -> None:
    assert HostTable(2, 2, device="cpu", init=torch.nn.init.ones_).numpy().tolist() == [[1, 1], [1, 1]]
    for init in (numbers(), numbers().numpy(), numbers().double(), numbers().t().contiguous().t()):
        assert torch.equal(HostTable(6, 4, device="cpu", init=init).host_tensor(), numbers())


def test_a_table_copies_what_it_starts_from() -> None:
    source = numbers()
    table = HostTable(6, 4, device="cpu", init=source)
    source.zero_()
    assert torch.equal(table.host_tensor(), numbers())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((-1, 2), {}, ValueError, "num_rows must be at least 0, not -1"),
        ((1.5, 2), {}, TypeError, "num_rows must be a whole number"),
        ((True, 2), {}, TypeError, "num_rows must be a whole number"),
        ((1, 0), {}, ValueError, "dim must be at least 1, not 0"),
        ((1, 2, "float32"), {}, TypeError, "dtype must be a torch.dtype, not 'float32'"),
        ((1, 2), {"init": "ones"}, ValueError, "init must be None, 'zeros', .* not 'ones'"),
        ((1, 2), {"init": 3}, TypeError, "init must be None, 'zeros', .* not 3"),
        ((1, 2), {"init": torch.ones(2, 2)}, ValueError, r"init must have shape \(1, 2\), not \(2, 2\)"),
        ((1, 2), {"max_pinned_bytes": -1}, ValueError, "max_pinned_bytes must be at least 0, not -1"),
        ((1, 2), {"device": "tpu"}, ValueError, "device must be"),
    ],
)
def test_a_wrong_option_is_named(arguments: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        HostTable(*arguments, **{"device": "cpu", **options})


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(2, 3), r"out must have shape \(2, 4\)"),
        (torch.empty(2, 4, dtype=torch.float64), "out must be torch.float32"),
        (torch.empty(4, 2).t(), "out must be contiguous"),
        (torch.empty(2, 4, device="meta"), "out must be on cpu, not meta"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostTable(6, 4, device="cpu", init=numbers()).gather([0, 1], out)


@pytest.mark.parametrize("device", [SimulatedDevice(), ZeroCopyDevice()])
def test_out_is_filled_and_returned(device: Any) -> None:
    table = HostTable(6, 4, device=device, init=numbers())
    out = device.empty(torch.Size((2, 1, 4)), (4, 4, 1), torch.float32)
    result = table.gather([[5], [1]], out)
    device.synchronize()
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out, numbers()[torch.tensor([[5], [1]])])
    with pytest.raises(ValueError, match="out must be on simulated"):
        table.gather([[5], [1]], torch.empty(2, 1, 4))


# Memory


def test_a_table_that_fits_is_page_locked() -> None:
    device = SimulatedDevice()
    table = HostTable(6, 4, device=device)
    assert table.pinned
    assert device.pinned_bytes == table.nbytes == 96


@pytest.mark.parametrize("why", ["budget", "system"])
def test_a_table_that_does_not_fit_is_pageable_with_one_warning(why: str) -> None:
    device = SimulatedDevice(pinned_limit=90 if why == "system" else None)
    with pytest.warns(PrefetchWarning, match=r"the table's 96 bytes cannot be page-locked .* slower"):
        table = HostTable(6, 4, device=device, init=numbers(), max_pinned_bytes=90 if why == "budget" else None)
    for _ in range(3):  # a second warning would be an error here
        rows = table.gather([4, 5])
        table.scatter([0, 1], rows)
        device.synchronize()
    assert not table.pinned
    assert device.pinned_bytes <= 90
    assert torch.equal(table.host_tensor()[:2], numbers()[4:])


@pytest.mark.parametrize("limit", [0, 96, 100, 200])
def test_the_budget_covers_staging_too(limit: int) -> None:
    device = SimulatedDevice(bandwidth=1e6)
    table = None
    if limit < 96:
        with pytest.warns(PrefetchWarning):
            table = HostTable(6, 4, device=device, init=numbers(), max_pinned_bytes=limit)
    else:
        table = HostTable(6, 4, device=device, init=numbers(), max_pinned_bytes=limit)
    rows = [table.gather(range(6)) for _ in range(4)]
    table.scatter([0, 1, 2], rows[-1][3:])
    assert device.pinned_bytes <= limit
    device.synchronize()
    assert all(torch.equal(row, numbers()) for row in rows)
    assert torch.equal(table.host_tensor()[:3], numbers()[3:])


def test_a_kernel_table_without_room_for_its_record_goes_the_staged_way() -> None:
    device = ZeroCopyDevice()
    table = HostTable(6, 4, device=device, init=numbers(), max_pinned_bytes=100)
    assert table.pinned
    assert not table.ids_on_device
    rows = table.gather([1])
    device.synchronize()
    assert torch.equal(rows, numbers()[[1]])


@pytest.mark.parametrize("device", [SimulatedDevice(), ZeroCopyDevice()])
def test_a_table_that_goes_gives_its_memory_back(device: Any) -> None:
    before = device.pinned_bytes
    table = HostTable(6, 4, device=device)
    table.gather([1, 2])
    gone = weakref.ref(table)
    del table
    assert gone() is None
    assert device.pinned_bytes == before


@pytest.mark.parametrize("device", ["cpu", SimulatedDevice(), ZeroCopyDevice()])
def test_a_closed_table_moves_no_rows(device: Any) -> None:
    """Kernels would be given the address of memory that is somebody else's by then."""
    embedding = HostEmbedding(6, 4, device=device, init=numbers())
    table = embedding.table
    ids = torch.tensor([1, 2])
    loop = iter(embedding.lookahead([ids, ids + 1], lambda ids: ids))
    next(loop)
    table.close()
    table.close()
    places = [lambda tensor: tensor] if device == "cpu" else [lambda tensor: tensor, partial(on_device, device)]
    values = torch.ones(2, 4)
    calls = [partial(call, place(ids)) for place in places for call in (table.gather, embedding, embedding.prepare)]
    for call in (table.scatter, table.scatter_add):
        calls += [partial(call, place(ids), other(values)) for place in places for other in places]
    for call in calls:
        with pytest.raises(RuntimeError, match="this HostTable was closed"):
            call()
    assert table.host_tensor().shape == (0, 4)
    table.synchronize()


@pytest.mark.parametrize("device", [SimulatedDevice(), ZeroCopyDevice()])
def test_a_view_keeps_the_rows_that_it_shows(device: Any) -> None:
    before = device.pinned_bytes
    view = HostTable(6, 4, device=device, init=numbers())[2:4]
    gc.collect()
    assert view.tolist() == numbers()[2:4].tolist()
    del view
    assert device.pinned_bytes == before


# Host reads


def test_slices_are_views() -> None:
    table = HostTable(6, 4, device="cpu", init=numbers())
    view = table[1:3]
    assert isinstance(view, np.ndarray)
    view[:] = 9
    assert torch.equal(table.gather([1, 2]), torch.full((2, 4), 9.0))
    table[5] = 1
    assert table.gather(5).tolist() == [1, 1, 1, 1]
    assert np.asarray(table).base is not None
    assert np.shares_memory(np.asarray(table), table.numpy())
    assert np.array(table, dtype=np.float64).dtype == np.float64
    assert len(table) == 6
    assert repr(table) == "HostTable(6, 4, dtype=torch.float32, device=cpu, pageable)"


def test_numpy_says_so_where_it_has_no_such_type() -> None:
    table = HostTable(2, 2, torch.bfloat16, "cpu", "zeros")
    with pytest.raises(TypeError):
        table.numpy()
    assert table.host_tensor().dtype is torch.bfloat16


def test_gathers_in_inference_mode_and_scatters_outside_it() -> None:
    with torch.inference_mode():
        table = HostTable(6, 4, device=SimulatedDevice(), init=numbers())
        table.gather([1])
    table.scatter([1], torch.ones(1, 4))
    table.host_tensor()[2] = 3
    assert table[1].tolist() == [1, 1, 1, 1]


def test_a_default_device_and_dtype_do_not_leak_in() -> None:
    device = ZeroCopyDevice()
    with torch.device("meta"):
        table = HostTable(6, 4, device=device, init=numbers_here)
        rows = table.gather(torch.tensor([1, 2], device="cpu"))
        table.scatter([0], torch.ones(1, 4, device="cpu"))
    device.synchronize()
    assert torch.equal(rows, numbers()[1:3])


def numbers_here(rows: torch.Tensor) -> None:
    rows.copy_(torch.arange(24, dtype=torch.float32, device="cpu").view(6, 4))


def test_many_threads_at_once() -> None:
    device = SimulatedDevice(bandwidth=1e6)
    table = HostTable(8, 4, device=device)

    def work(number: int) -> None:
        for step in range(20):
            table.scatter([number], torch.full((1, 4), float(step)))
            rows = table.gather([number])
            table.scatter_add([number], torch.ones(1, 4))
            table.scatter([number], rows)

    for thread in [Thread(lambda n=n: work(n)) for n in range(8)]:
        thread.result()
    assert table.numpy().tolist() == [[19.0] * 4] * 8


# Files


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_save_and_load(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    path = tmp_path / f"rows{suffix}"
    device = SimulatedDevice(bandwidth=1e3)
    table = HostTable(6, 4, dtype, device, numbers())
    source = device.empty(torch.Size((1, 4)), (4, 1), dtype).fill_(7)
    table.scatter([2], source)
    table.save(path)
    again = HostTable.load(path, "cpu", dtype=dtype)
    expected = numbers().to(dtype)
    expected[2] = 7
    assert again.dtype is dtype
    assert torch.equal(again.host_tensor(), expected)
    again.scatter([0], torch.ones(1, 4, dtype=dtype))
    assert torch.equal(HostTable.load(path, "cpu", dtype=dtype).host_tensor(), expected)


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    table = HostTable(2, 2, device="cpu")
    with pytest.raises(ValueError, match=r"end in .npy or .safetensors, not '.pt'"):
        table.save(tmp_path / "rows.pt")
    with pytest.raises(ValueError, match=r"end in .npy or .safetensors, not '.pt'"):
        HostTable.load(tmp_path / "rows.pt")
    np.save(tmp_path / "cube.npy", np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2\); a matrix is wanted"):
        HostTable.load(tmp_path / "cube.npy", "cpu")


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"prefetchpipe\[tables\]"):
        HostTable(2, 2, device="cpu").save(tmp_path / "rows.safetensors")


@pytest.mark.parametrize("device", ["cpu", SimulatedDevice(bandwidth=1e4)])
def test_a_mapped_table_keeps_its_rows_in_the_file(tmp_path: Path, device: Any) -> None:
    path = tmp_path / "rows.npy"
    table = HostTable(6, 4, device=device, init=numbers(), path=path)
    assert not table.pinned
    table.scatter([1], table.gather([0]))
    table.flush()
    assert np.load(path)[1].tolist() == [0, 1, 2, 3]
    table.scatter([2], table.gather([0]))
    del table
    gc.collect()
    again = HostTable(6, 4, device=device, path=path)
    assert again[2].tolist() == [0, 1, 2, 3]
    again.close()
    with pytest.raises(ValueError, match="init must be None"):
        HostTable(6, 4, device=device, path=path, init="zeros")
    with pytest.raises(ValueError, match=r"holds float32 of shape \(6, 4\), not float32 of shape \(5, 4\)"):
        HostTable(5, 4, device=device, path=path)
    (tmp_path / "other.npy").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"no .npy file"):
        HostTable(5, 4, device=device, path=tmp_path / "other.npy")


@pytest.mark.parametrize("init", [torch.zeros(5, 4), lambda rows: rows[7]])
def test_a_file_that_could_not_be_filled_is_not_taken_for_a_table(tmp_path: Path, init: Any) -> None:
    with pytest.raises((ValueError, IndexError)):
        HostTable(6, 4, device="cpu", init=init, path=tmp_path / "rows.npy")
    assert list(tmp_path.iterdir()) == []
    table = HostTable(6, 4, device="cpu", init=numbers(), path=tmp_path / "rows.npy")
    assert torch.equal(table.host_tensor(), numbers())
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


def test_saving_onto_a_mapped_file_destroys_no_rows(tmp_path: Path) -> None:
    """Truncated, it would read as zeros in the table that maps it."""
    path = tmp_path / "rows.npy"
    table = HostTable(6, 4, device="cpu", init=numbers(), path=path)
    table.save(path)
    assert torch.equal(table.host_tensor(), numbers())
    table.scatter([0], torch.full((1, 4), 9.0))
    table.flush()
    assert np.load(path)[0].tolist() == [9] * 4  # still the same file
    (tmp_path / "link.npy").symlink_to(path)
    HostTable(2, 2, device="cpu", init=torch.ones(2, 2)).save(tmp_path / "link.npy")
    assert table[1].tolist() == numbers()[1].tolist()
    assert np.load(path).tolist() == [[1, 1], [1, 1]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.npy", "rows.npy"]


def test_files_in_foreign_byte_order(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.asfortranarray(numbers().numpy().astype(">f4")))
    assert torch.equal(HostTable.load(tmp_path / "rows.npy", "cpu").host_tensor(), numbers())
    np.save(tmp_path / "words.npy", np.array([["a", "b"]]))
    with pytest.raises(ValueError, match="numbers that torch has are wanted"):
        HostTable.load(tmp_path / "words.npy", "cpu")


def test_a_mapped_table_of_a_type_that_numpy_lacks(tmp_path: Path) -> None:
    HostTable(2, 2, torch.bfloat16, "cpu", torch.full((2, 2), 1.5), path=tmp_path / "a.npy").close()
    again = HostTable(2, 2, torch.bfloat16, "cpu", path=tmp_path / "a.npy")
    assert again.host_tensor().tolist() == [[1.5, 1.5]] * 2


def test_a_mapped_table_may_be_larger_than_what_is_written(tmp_path: Path) -> None:
    """A sparse file of 64 GiB: nothing of it is read into memory."""
    path = tmp_path / "rows.npy"
    shape = (1 << 27, 128)
    np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    table = HostTable(*shape, device=SimulatedDevice(), path=path)
    table.scatter([0, shape[0] - 1], torch.ones(2, 128))
    rows = table.gather([shape[0] - 1, 5])
    table.where.synchronize()
    assert rows.sum(1).tolist() == [128, 0]
    assert path.stat().st_blocks * 512 < 1 << 24


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_a_copy_has_rows_of_its_own(twin: Any) -> None:
    table = HostTable(6, 4, device="cpu", init=numbers())
    other = twin(table)
    other.scatter([0], torch.ones(1, 4))
    assert torch.equal(table.host_tensor(), numbers())
    assert torch.equal(other.host_tensor()[1:], numbers()[1:])


# The package


def test_the_package_offers_them_late() -> None:
    assert {"HostTable", "HostEmbedding"} <= set(prefetchpipe.__all__)
    assert prefetchpipe.HostEmbedding.__name__ == "HostEmbedding"
    with pytest.raises(AttributeError, match="no attribute 'HostTables'"):
        prefetchpipe.HostTables  # noqa: B018
