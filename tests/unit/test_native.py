"""Native copies: their own values, and that packing with and without them gives the same batches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import hatch_build
from prefetchpipe import GPUPrefetcher, native
from prefetchpipe.batch.job import Job, pack_alone
from prefetchpipe.batch.layout import OWN_BLOCK_BYTES, Layout
from prefetchpipe.batch.rows import Gathered, Stacked
from prefetchpipe.device.base import HostBlock
from prefetchpipe.memory.pinned import PageableBlock
from prefetchpipe.memory.ring import Slot
from prefetchpipe.native import Copier
from prefetchpipe.pipeline import transfer
from prefetchpipe.testing import SimulatedDevice

needs_native = pytest.mark.skipif(not native.is_available(), reason=f"no native copies: {native.why_not()}")


def job(sources: Sequence[torch.Tensor], gap: int) -> tuple[array[int], array[int], array[int], int]:
    """Copies of flat ``uint8`` tensors, ``gap`` bytes apart; and the bytes of all."""
    offsets, position = [], gap
    for source in sources:
        offsets.append(position)
        position += len(source) + gap
    sizes = array("Q", map(len, sources))
    return array("Q", [source.data_ptr() for source in sources]), array("Q", offsets), sizes, position


def expected(sources: Sequence[torch.Tensor], offsets: Sequence[int], nbytes: int) -> torch.Tensor:
    target = torch.full((nbytes,), 7, dtype=torch.uint8)
    for source, offset in zip(sources, offsets, strict=True):
        target[offset : offset + len(source)] = source
    return target


SIZES = st.one_of(st.integers(0, 300), st.sampled_from([4095, 4096, 4127, 32768, 32769, 200_001, 700_000, 1_500_003]))


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    threads=st.integers(1, 5),
    jobs=st.lists(st.tuples(st.lists(SIZES, max_size=12), st.integers(0, 65)), min_size=1, max_size=4),
    is_alone=st.booleans(),
)
def test_what_is_copied_and_nothing_beside_it(
    threads: int, jobs: list[tuple[list[int], int]], *, is_alone: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    copier = Copier(threads)
    try:
        for sizes, gap in jobs:
            sources = [torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
            addresses, offsets, nbytes, total = job(sources, gap)
            target = torch.full((total,), 7, dtype=torch.uint8)
            if is_alone:
                native.copy_alone(target.data_ptr(), addresses, offsets, nbytes)
            else:
                copier.start(target.data_ptr(), addresses, offsets, nbytes)
                copier.finish()
            assert torch.equal(target, expected(sources, offsets, total))
    finally:
        copier.close()


@needs_native
@pytest.mark.parametrize("start", range(0, 64, 7))
def test_copies_past_the_caches_at_any_address(start: int) -> None:
    source = torch.arange(native._STREAMED_BYTES + 133, dtype=torch.int64).to(torch.uint8)
    target = torch.full((len(source) + 128,), 7, dtype=torch.uint8)
    one = array("Q", [len(source)])
    native.copy_alone(target.data_ptr() + start, array("Q", [source.data_ptr()]), array("Q", [0]), one)
    assert torch.equal(target[start : start + len(source)], source)
    assert set(target[:start].tolist() + target[start + len(source) :].tolist()) == {7}


@needs_native
def test_c5_nothing_is_left_undone_by_a_caller_that_was_interrupted() -> None:
    """Between `start` and `finish`: the next job, or the end, does what is left of the one before."""
    copier = Copier(1)  # nobody else copies
    first, second = (torch.full((100_000,), value, dtype=torch.uint8) for value in (1, 2))
    targets = [torch.zeros(100_000, dtype=torch.uint8) for _ in range(2)]
    for source, target in zip((first, second), targets, strict=True):
        copier.start(target.data_ptr(), *job([source], 0)[:3])
    assert (int(targets[0].sum()), int(targets[1].sum())) == (100_000, 0)
    copier.close()
    assert int(targets[1].sum()) == 200_000


@needs_native
def test_c9_threads_end_with_the_prefetcher() -> None:
    def threads() -> int:
        return psutil.Process().num_threads()

    batches = [torch.full((200_000,), float(index)) for index in range(12)]
    list(GPUPrefetcher(batches[:1], SimulatedDevice(), fetch="caller"))  # what torch starts once
    torch.ones(1 << 20).add_(1)
    before = threads()
    prefetcher = GPUPrefetcher(batches, SimulatedDevice(), copy_threads=4, fetch="caller")
    list(prefetcher)
    assert threads() == before + 3
    prefetcher.close()
    assert threads() == before


@needs_native
@pytest.mark.parametrize("is_busy", [False, True])
def test_c9_a_forked_child_copies_without_threads_and_ends(*, is_busy: bool) -> None:
    """Also where the fork came in the middle of a job: nobody would end that in the child."""
    copier = Copier(3 if not is_busy else 1)
    source, target = torch.full((1_000_000,), 5, dtype=torch.uint8), torch.zeros(1_000_000, dtype=torch.uint8)
    other = torch.zeros(1000, dtype=torch.uint8)
    if is_busy:
        copier.start(other.data_ptr(), *job([source[:1000]], 0)[:3])
    pid = os.fork()
    if not pid:
        code = 1
        try:
            copier.copy(target.data_ptr(), source.data_ptr(), len(source))
            copier.close()
            done = target.numpy().tobytes() == b"\x05" * len(source) and not other.numpy().any()
            code = int(not done)  # no operator of torch's: it may have threads
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    copier.close()


@pytest.mark.slow
def test_the_environment_does_without() -> None:
    code = "from prefetchpipe import native; print(native.is_available(), native.why_not())"
    environment = {**os.environ, "PREFETCHPIPE_NATIVE": "0"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "PREFETCHPIPE_NATIVE=0"]


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("source", ["int other(void) { return 1; }", "int copies_version(void) { return 0; }"])
def test_a_library_of_another_version_is_not_called(tmp_path: Path, source: str) -> None:
    """As in an editable installation after `git pull`."""
    package = Path(native.__file__).parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "other.c").write_text(source)
    library = tmp_path / package.name / "native" / "_copies.so"
    library.unlink()
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "other.c"], check=True)
    code = "from prefetchpipe import native; print(native.is_available(), native.why_not())"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("False out of date:")


# Building


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "copies.c").write_bytes((hatch_build.FOLDER / "copies.c").read_bytes())
    return tmp_path


@needs_native
def test_it_is_built_beside_its_source(folder: Path) -> None:
    (folder / "_copies.so.123").write_text("of a build that was ended in the middle")
    assert hatch_build.build(folder) == folder / "_copies.so"
    assert sorted(path.name for path in folder.iterdir()) == ["_copies.so", "copies.c"]


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("false", "false failed"),
        ("true", "true failed"),  # it says that all is well, and writes nothing
        ("no-such-compiler -O2", "no-such-compiler could not be run"),
        ('cc "', "No closing quotation"),
    ],
)
def test_a_compiler_that_fails_leaves_the_package_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, compiler: str, why: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert hatch_build.build(folder) is None
    assert f"built without native copies: {why}" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["copies.c"]


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    assert hatch_build.build(folder) is None
    assert "no C compiler was found" in capsys.readouterr().err


# Packing


def block(nbytes: int) -> HostBlock:
    return PageableBlock(nbytes)


LEAVES = {
    "contiguous": torch.arange(24.0).view(4, 6),
    "channels_last": torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.arange(24.0).view(4, 6).t(),
    "every second": torch.arange(24.0)[::2],
    "expanded": torch.arange(4.0).view(4, 1).expand(4, 6),
    "empty": torch.empty(0, 3),
    "a number": torch.tensor(3.0),
    "stack": Stacked([torch.full((2, 3), float(index)) for index in range(5)]),
    "stack of slices": Stacked([torch.arange(12.0)[index::3] for index in range(3)]),
    "stack of negatives": Stacked([torch._neg_view(torch.ones(3)) for _ in range(2)]),
    "stack with one negative": Stacked([torch.ones(3), torch._neg_view(torch.ones(3))]),
    "stack of complex": Stacked([torch.view_as_complex(torch.ones(3, 2)).conj() for _ in range(2)]),
    "stack with zeros without memory": Stacked([torch.ones(3), torch._efficientzerotensor(3)]),
    "stack of nothing": Stacked([torch.empty(0) for _ in range(4)]),
    "gathered": Gathered(torch.arange(40.0).view(20, 2), torch.tensor([3, 1, 19])),
}


def value_of(leaf: Any) -> torch.Tensor:
    return leaf if isinstance(leaf, torch.Tensor) else leaf.clone()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("others", [0, 9], ids=["", "in a slab"])
@pytest.mark.parametrize("name", LEAVES)
def test_c12_every_kind_of_leaf_is_packed_as_torch_has_it(name: str, others: int) -> None:
    leaves = [LEAVES[name], *(torch.full((5,), float(index)) for index in range(others))]
    slot = Slot(None)
    layout = Layout(leaves)  # type: ignore[arg-type]
    slot.replace(block(max(1, layout.nbytes)))
    pack_alone(slot, layout, leaves)
    arrived, memory = layout.allocate(
        lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype),
        lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
    )
    for target, piece in zip(memory, layout.pieces(slot.tensor), strict=True):
        flat = torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage())
        flat[: len(piece)] = piece
    for tensor, leaf in zip(arrived, leaves, strict=True):
        assert torch.equal(tensor, value_of(leaf).resolve_neg().resolve_conj())


@needs_native
def test_only_what_is_no_copy_of_bytes_is_left_to_torch() -> None:
    leaves = list(LEAVES.values())
    layout = Layout(leaves)  # type: ignore[arg-type]
    left = {list(LEAVES)[layout.spans[number].leaf] for number in Job(layout, leaves).rest}
    assert left == {
        "every second",
        "expanded",
        "stack of slices",
        "stack of negatives",
        "stack with one negative",
        "stack of complex",
        "stack with zeros without memory",
        "gathered",
    }


class Images(torch.utils.data.Dataset[Any]):
    """Samples of two leaves, the first worth packing where the batch lies."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((3, 40, 50), float(index)), "y": index}


def read(device: SimulatedDevice, batches: Any) -> list[Any]:
    device.synchronize()
    return [[leaf.unique().tolist() for leaf in batch.values()] for batch in batches]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("fetch", ["caller", "thread"])
@pytest.mark.parametrize("copy_threads", [1, 4])
@pytest.mark.parametrize("large_bytes", [None, 1 << 18], ids=["", "in pieces"])
def test_c5_batches_are_whole_when_their_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch, fetch: Any, copy_threads: int, large_bytes: int | None
) -> None:
    """Of one thread nothing is copied before it waits; of several, by a thread that may be late."""
    if large_bytes is not None:
        monkeypatch.setattr(transfer, "LARGE_BYTES", large_bytes)
    buffers = {f"x{leaf}": torch.empty(40_000 if leaf else OWN_BLOCK_BYTES) for leaf in range(12)}

    def rows() -> Any:
        for index in range(8):
            for leaf, buffer in enumerate(buffers.values()):
                buffer.fill_(index * 100 + leaf)
            yield buffers

    device = SimulatedDevice(bandwidth=1e9)
    kept = list(GPUPrefetcher(rows(), device, fetch=fetch, copy_threads=copy_threads))
    assert read(device, kept) == [[[float(index * 100 + leaf)] for leaf in range(12)] for index in range(8)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("fetch", ["caller", "thread"])
@pytest.mark.parametrize("large_bytes", [None, 1 << 18], ids=["", "in pieces"])
def test_stacks_are_packed_as_torch_stacks_them(
    monkeypatch: pytest.MonkeyPatch, fetch: Any, large_bytes: int | None
) -> None:
    if large_bytes is not None:
        monkeypatch.setattr(transfer, "LARGE_BYTES", large_bytes)
    device = SimulatedDevice(bandwidth=1e9)
    loader = DataLoader(Images(), batch_size=20)
    got = list(GPUPrefetcher(loader, device, fetch=fetch, copy_threads=4))
    device.synchronize()
    for batch, plain in zip(got, loader, strict=True):
        assert torch.equal(batch["x"], plain["x"])
        assert torch.equal(batch["y"], plain["y"])


@needs_native
@pytest.mark.parametrize("nbytes", [100_000, 1_000_000], ids=["small", "larger"])
def test_c5_c6_a_full_device_leaves_no_copy_under_way(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Packing has ended when the error is raised, and the batch is sent again."""
    device = SimulatedDevice(bandwidth=1e9)
    source = [torch.full((nbytes,), index, dtype=torch.uint8) for index in range(20)]
    prefetcher = GPUPrefetcher(([row, row.clone()] for row in source), device, fetch="caller", copy_threads=2)
    iterator = iter(prefetcher)
    kept = [next(iterator) for _ in range(10)]
    empty = device.empty
    finished: list[int] = []

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("simulated")

    for copier in native._open:
        finish = copier.finish
        copier.finish = lambda finish=finish: (finish(), finished.append(threading.get_ident()))  # type: ignore[assignment]
    with monkeypatch.context() as patch:
        patch.setattr(device, "empty", full)
        with pytest.raises(torch.OutOfMemoryError):
            next(iterator)
    monkeypatch.setattr(device, "empty", empty)
    assert finished
    device.synchronize()
    assert [batch[0].unique().tolist() for batch in kept] == [[index] for index in range(10)]
