"""What one of several training processes takes for itself: cores, a device, a share of the data; contracts C13, C18."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from prefetchpipe import GPUPrefetcher, native
from prefetchpipe.device import cuda
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.pipeline import fetching, producer
from prefetchpipe.pipeline.pace import Pace
from prefetchpipe.ranks import local_world_size, usable_cores

LAUNCHER = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


# Cores


def bind(monkeypatch: pytest.MonkeyPatch, own: int, parent: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(own if pid == 0 else parent)), raising=False)


@pytest.mark.parametrize(
    ("own", "parent", "ranks", "expected"),
    [
        (16, 16, 1, 16),  # alone
        (128, 128, 8, 16),  # eight ranks, none bound
        (16, 128, 8, 16),  # each bound to cores of its own
        (64, 128, 8, 16),  # four of them bound to each NUMA node
        (4, 128, 8, 4),  # bound to fewer than a fair share
        (100, 100, 8, 12),
        (2, 2, 8, 1),  # more ranks than cores
        (32, 16, 1, 32),  # a parent with fewer cores says nothing
    ],
)
def test_cores_are_shared_with_the_other_ranks_of_the_host(
    monkeypatch: pytest.MonkeyPatch, own: int, parent: int, ranks: int, expected: int
) -> None:
    bind(monkeypatch, own, parent)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert usable_cores() == expected
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert usable_cores(ranks) == expected


def test_cores_where_the_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def affinity(pid: int) -> set[int]:
        if pid:
            raise ProcessLookupError
        return set(range(8))

    monkeypatch.setattr(os, "sched_getaffinity", affinity, raising=False)
    assert usable_cores() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert usable_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert usable_cores() == 4


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"])
@pytest.mark.parametrize(("value", "expected"), [("4", 4), ("", 1), ("0", 1), ("-2", 1), ("many", 1)])
def test_the_launcher_says_how_many(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: int) -> None:
    monkeypatch.setenv(name, value)
    assert local_world_size() == expected


# Devices


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch sees four CUDA devices; nothing of them is touched."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(cuda, "_devices", {i: cpu_device_at(i) for i in range(4)})
    return current


def cpu_device_at(index: int) -> Any:
    from prefetchpipe.testing import SimulatedDevice

    device = SimulatedDevice()
    device.index = index
    return device


@pytest.mark.parametrize("device", [None, "cuda"])
def test_c18_a_rank_whose_device_was_never_set_is_warned(
    monkeypatch: pytest.MonkeyPatch, four_devices: list[int], device: str | None
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.warns(PrefetchWarning, match=r"cuda:0, but this is local rank 3 .*torch.cuda.set_device\(3\)") as seen:
        GPUPrefetcher([], device)
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("rank", "current", "device"),
    [
        ("3", 3, None),  # it was set
        ("0", 0, None),  # its own
        ("3", 0, "cuda:0"),  # asked for
        ("5", 0, None),  # more ranks than devices: shared on purpose
        (None, 0, None),  # no launcher
    ],
)
def test_c18_others_are_not(
    monkeypatch: pytest.MonkeyPatch, four_devices: list[int], rank: str | None, current: int, device: str | None
) -> None:
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    four_devices[0] = current
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GPUPrefetcher([], device)


# Samplers


@pytest.fixture
def group_of_one(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loader(replicas: int, rank: int) -> DataLoader[Any]:
    return DataLoader(range(8), batch_size=2, sampler=DistributedSampler(range(8), replicas, rank))


def test_a_sampler_for_more_processes_than_there_are(group_of_one: None) -> None:
    with pytest.warns(PrefetchWarning, match=r"num_replicas=4, but .* has 1 processes: 3 of 4 shares") as seen:
        GPUPrefetcher(loader(4, 0), "cpu")
    assert seen[0].filename == __file__
    batches = BatchSampler(DistributedSampler(range(8), 2, 1), 2, drop_last=False)
    with pytest.warns(
        PrefetchWarning, match=r"num_replicas=2.*DistributedSampler\(dataset\), or pass num_replicas=dist"
    ):
        prefetcher = GPUPrefetcher(DataLoader(range(8), batch_sampler=batches), "cpu")
    assert len(list(prefetcher)) == 2  # said, and not refused: torch takes it as well


def test_a_sampler_of_another_rank(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.warns(PrefetchWarning, match="rank=0 of 2, but this process is rank 1 of 2"):
        GPUPrefetcher(loader(2, 0), "cpu")


def test_no_warning_where_there_may_be_a_reason(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GPUPrefetcher(loader(1, 0), "cpu")
        GPUPrefetcher(DataLoader(range(8)), "cpu")  # evaluation on every rank, or sharded files
        GPUPrefetcher([1, 2], "cpu")
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        GPUPrefetcher(loader(2, 1), "cpu")  # two data-parallel groups of two


def test_no_warning_without_a_process_group() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GPUPrefetcher(loader(4, 3), "cpu")


# Packing under a launcher that gives torch one thread


@pytest.mark.parametrize(
    ("packs_alone", "packing", "expected"), [(True, 2e-3, True), (True, 2e-4, False), (False, 2e-3, False)]
)
def test_slow_packing_with_one_thread_is_handed_to_several(packs_alone: bool, packing: float, expected: bool) -> None:
    pace = Pace(cpu_device_at(0), has_workers=False, packs_alone=packs_alone)
    started = False
    for _ in range(8):
        pace.enter()
        pace.begin()
        pace._body_seconds = 0.0  # a loop that does nothing but wait: else a thread would pay anyway
        started = started or pace.end(1e-6, packing)
    assert started is expected
    assert ("one thread that torch may use" in pace.reason) is expected


def test_a_caller_with_one_thread_starts_ours_for_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def spy(*args: Any, **options: Any) -> Pace:
        made.append(options["packs_alone"])
        return Pace(*args, **options)

    monkeypatch.setattr(producer, "Pace", spy)
    monkeypatch.setattr(native, "_library", None)  # native copies have threads of their own, whatever torch may use
    for torch_threads, copy_threads in ((1, 8), (1, 2), (4, 8)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=torch_threads: threads)
        list(GPUPrefetcher([torch.ones(2)], "cpu", copy_threads=copy_threads))
    assert made == [True, False, False]


def test_c13_eight_ranks_do_not_pack_with_all_cores_each(monkeypatch: pytest.MonkeyPatch, sim: Any) -> None:
    limits: list[int] = []
    monkeypatch.setattr(fetching, "limit_packing_threads", limits.append)
    bind(monkeypatch, own=16, parent=16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    list(GPUPrefetcher([torch.ones(2)], sim, fetch="thread"))
    list(GPUPrefetcher([torch.ones(2)], sim, fetch="thread", copy_threads=5))
    assert limits == [2, 5]
