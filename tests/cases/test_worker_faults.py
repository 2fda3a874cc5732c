"""Workers that die, hang or raise, and a parent that does: the right error, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from prefetchpipe import GPUPrefetcher
from prefetchpipe.memory import shared as shared_memory
from prefetchpipe.memory.shared import Segment
from prefetchpipe.pipeline import collate as collate_module
from prefetchpipe.testing import SimulatedDevice
from tests.support import TIMEOUT, Surroundings, run_script, script_environment, settle

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.slow,
    # Torch raises the death of a worker from a signal handler, in the middle of what opens a file or a socket too; what
    # stays open is counted.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

DEATHS = (RuntimeError, OSError, EOFError)
"""Torch says that a worker has died; or that its socket or its memory has, if a batch was being taken over."""


def descriptors() -> list[str]:
    """What this process has open.

    Not the temporary files with which torch's DataLoader looks, when a message could not be read, whether it is out of
    descriptors: if it hears of the death of the worker while it opens one, nobody has that one's number any more.
    """
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own, and what another thread closes
            links.append(str(descriptor.readlink()))
    probe = str(Path(tempfile.gettempdir()) / tempfile.gettempprefix())
    return [link for link in links if not link.startswith(probe)]


class Left:
    """Processes, threads, registered bytes, file descriptors, mappings and names of shared memory, before and after."""

    def __init__(self, device: Any = "cpu") -> None:
        gc.collect()
        self.surroundings = Surroundings(device)
        self.before = self.now()

    def now(self) -> dict[str, int]:
        maps = Path("/proc/self/maps").read_text()
        return {
            "descriptors": len(descriptors()),
            "segments": maps.count("memfd:prefetchpipe"),
            "names": maps.count("/dev/shm/torch_"),
            "in /dev/shm": len(list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))),
        }

    def assert_nothing(self) -> None:
        gc.collect()
        self.surroundings.assert_restored()
        deadline = time.monotonic() + TIMEOUT  # multiprocessing's own threads close what a killed process has left
        while not self._is_restored(now := self.now()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self._is_restored(now), (self.before, now, descriptors())

    def _is_restored(self, now: dict[str, int]) -> bool:
        return all(now[what] <= count for what, count in self.before.items())


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Any:
    """Torch's own helpers (its resource sharer, say) are started first, with one pass of a plain loader."""
    list(DataLoader(range(2), num_workers=1))
    left = Left()
    yield
    left.assert_nothing()


class Rows(Dataset):
    """Item `at` does something; unless a file says that it has been done."""

    def __init__(self, act: Callable[[], Any], marker: Path, at: int = 7, count: int = 24) -> None:
        self.act = act
        self.marker = marker
        self.at = at
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at and not self.marker.exists():
            self.marker.touch()
            self.act()
        return torch.full((512,), float(index))


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_key_error() -> None:
    raise KeyError("row 7")


def hang() -> None:
    threading.Event().wait()


def values(device: Any, batches: list[torch.Tensor]) -> list[float]:
    settle(device)
    return [float(batch.mean()) for batch in batches]


def fails(device: Any, prefetcher: GPUPrefetcher, kinds: Any, **match: Any) -> list[float]:
    kept: list[torch.Tensor] = []
    with pytest.raises(kinds, **match) as caught:
        kept.extend(prefetcher)
    assert not isinstance(caught.value, AssertionError)
    return values(device, kept)


ALL = [float(i) for i in range(24)]


def kill_while_packing(monkeypatch: pytest.MonkeyPatch, marker: Path) -> None:
    """With half of the batch written, in the middle of a busy slot."""
    whole = collate_module.pack_alone

    def killed(slot: Any, layout: Any, leaves: Any) -> None:
        whole(slot, layout, leaves)
        if float(slot.views(layout)[0].view(-1)[0]) == 7.0 and not marker.exists():
            marker.touch()
            kill_me()

    monkeypatch.setattr(collate_module, "pack_alone", killed)


def kill_while_waiting(monkeypatch: pytest.MonkeyPatch, marker: Path) -> None:
    """Where it would wait for a slot."""
    acquire = collate_module._Packer._acquire

    def killed(self: Any, nbytes: int) -> Any:
        if self._largest and not marker.exists():
            marker.touch()
            kill_me()
        return acquire(self, nbytes)

    monkeypatch.setattr(collate_module._Packer, "_acquire", killed)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("when", ["fetching", "packing", "waiting"])
def test_c7_a_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, workers: int, persistent: bool
) -> None:
    device = SimulatedDevice(bandwidth=1e6)
    left = Left(device)
    marker = tmp_path / "dead"
    dataset = Rows(kill_me if when == "fetching" else lambda: None, marker, at=7 if when == "fetching" else -1)
    if when == "packing":
        kill_while_packing(monkeypatch, marker)
    elif when == "waiting":
        kill_while_waiting(monkeypatch, marker)
    loader = DataLoader(dataset, batch_size=1, num_workers=workers, persistent_workers=persistent)
    with GPUPrefetcher(loader, device) as prefetcher:
        seen = fails(device, prefetcher, DEATHS)
        assert seen == ALL[: len(seen)]
        assert values(device, list(prefetcher)) == ALL
        assert prefetcher.stats().workers == "shared"
    left.assert_nothing()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_c7_workers_are_killed_from_outside(taken: int) -> None:
    """At whatever point they are: with batches in the queue, received, or waiting for a slot."""
    device = SimulatedDevice(bandwidth=1e6)
    left = Left(device)
    loader = DataLoader(Rows(lambda: None, Path(os.devnull)), batch_size=1, num_workers=2)
    with GPUPrefetcher(loader, device) as prefetcher:
        iterator = iter(prefetcher)
        kept = [next(iterator) for _ in range(taken)]
        with pytest.raises((*DEATHS, FileNotFoundError)):  # the last: torch's own words for it may come later
            for child in psutil.Process().children():
                child.kill()  # torch's handler of signals may raise here
            kept.extend(iterator)
        assert values(device, kept) == ALL[: len(kept)]
        del kept, iterator
        assert values(device, list(prefetcher)) == ALL
    left.assert_nothing()


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_c7_an_exception_in_a_worker(tmp_path: Path, persistent: bool) -> None:
    device = SimulatedDevice(bandwidth=1e6)
    left = Left(device)
    loader = DataLoader(Rows(raise_key_error, tmp_path / "done"), None, num_workers=2, persistent_workers=persistent)
    with GPUPrefetcher(loader, device) as prefetcher:
        assert fails(device, prefetcher, KeyError, match="row 7") == ALL[:7]
        for _ in range(2):
            assert values(device, list(prefetcher)) == ALL
        assert prefetcher.stats().shared_bytes == prefetcher.stats().copied_bytes
    left.assert_nothing()


def test_c9_a_kept_exception_keeps_no_registered_memory(tmp_path: Path) -> None:
    device = SimulatedDevice()
    loader = DataLoader(Rows(raise_key_error, tmp_path / "done", at=2), None, num_workers=2)
    prefetcher = GPUPrefetcher(loader, device)
    with pytest.raises(KeyError) as caught:
        list(prefetcher)
    prefetcher.close()
    assert device.pinned_bytes == 0
    caught.value.__traceback__ = None
    del caught


def test_c7_a_worker_that_hangs_meets_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # How long torch waits for a worker at the end, before it terminates it: five seconds otherwise.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    device = SimulatedDevice()
    left = Left(device)
    loader = DataLoader(Rows(hang, tmp_path / "done", at=3), None, num_workers=1, timeout=1)
    with GPUPrefetcher(loader, device) as prefetcher:
        iterator = iter(prefetcher)
        kept = [next(iterator) for _ in range(3)]
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            next(iterator)
        assert values(device, kept) == ALL[:3]
        del kept, iterator
        assert values(device, list(prefetcher)) == ALL
    left.assert_nothing()


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(100_000)


PARENT = """
import sys, time, torch
from torch.utils.data import DataLoader
from prefetchpipe import GPUPrefetcher
from prefetchpipe.testing import SimulatedDevice
from tests.cases.test_worker_faults import Endless
import psutil
if __name__ == "__main__":
    prefetcher = GPUPrefetcher(DataLoader(Endless(), 2, num_workers=2), SimulatedDevice())
    iterator = iter(prefetcher)
    for _ in range(6):
        next(iterator)
    print("PIDS", *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    sys.stdin.read()
"""


def test_c9_the_parent_is_killed(tmp_path: Path) -> None:
    names = set(os.listdir("/dev/shm"))  # noqa: PTH208
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = str(Path(__file__).resolve().parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=script_environment(PYTHONPATH=root),
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    line = parent.stdout.readline()
    assert line.startswith("PIDS")
    children = [psutil.Process(int(pid)) for pid in line.split()[1:]]
    assert len(children) == 2
    parent.kill()
    parent.wait(TIMEOUT)
    _, alive = psutil.wait_procs(children, timeout=TIMEOUT)  # torch's worker looks every five seconds
    parent.stdin.close()
    parent.stdout.close()
    for child in alive:
        child.kill()
    assert alive == []
    # Other test runs make names of their own.
    left = [name for name in set(os.listdir("/dev/shm")) - names if str(parent.pid) in name]  # noqa: PTH208
    assert left == []


EXIT = """
import torch
from torch.utils.data import DataLoader
from prefetchpipe import GPUPrefetcher
from prefetchpipe.testing import SimulatedDevice
rows = [torch.full((1000,), float(i)) for i in range(64)]
prefetcher = GPUPrefetcher(DataLoader(rows, 2, num_workers=2, persistent_workers={persistent}), {device}, depth=3)
for _ in range(2):
    iterator = iter(prefetcher)
    kept = [next(iterator) for _ in range(5)]
{end}
"""


@pytest.mark.parametrize("end", ["", "raise ValueError('the user')"], ids=["", "error"])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_c9_the_interpreter_exits_in_the_middle(tmp_path: Path, persistent: bool, end: str) -> None:
    done = run_script(tmp_path, EXIT.format(persistent=persistent, device="SimulatedDevice()", end=end))
    if end:
        assert done.returncode == 1
        assert done.stderr.strip().splitlines()[-1] == "ValueError: the user"
        assert done.stderr.count("Traceback") == 1
    else:
        assert (done.returncode, done.stderr) == (0, "")


# The portable way


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "has_anonymous", lambda: False)


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_c15_without_anonymous_memory(persistent: bool) -> None:
    device = SimulatedDevice(bandwidth=1e6)
    left = Left(device)
    assert Segment.create(16).handle[0] == "torch"
    rows = Rows(lambda: None, Path(os.devnull))
    loader = DataLoader(rows, batch_size=1, num_workers=2, persistent_workers=persistent)
    with GPUPrefetcher(loader, device) as prefetcher:
        for _ in range(2):
            assert values(device, list(prefetcher)) == ALL
        assert values(device, [next(iter(prefetcher))]) == [0.0]
        assert prefetcher.stats().shared_bytes == prefetcher.stats().copied_bytes
    left.assert_nothing()


BY_NAME = """
import torch
from torch.utils.data import DataLoader
from prefetchpipe import GPUPrefetcher
from prefetchpipe.memory import shared
from prefetchpipe.testing import SimulatedDevice
shared.has_anonymous = lambda: False
torch.multiprocessing.set_sharing_strategy("file_system")
device = SimulatedDevice()
rows = [torch.full((1000,), float(i)) for i in range(16)]
kept = list(GPUPrefetcher(DataLoader(rows, 2, num_workers=2), device, workers="shared"))
device.synchronize()
print("SEEN", [batch[:, 5].tolist() for batch in kept] == [[2.0 * i, 2.0 * i + 1] for i in range(8)])
"""


def test_c15_without_anonymous_memory_by_name(tmp_path: Path) -> None:
    """Torch's other strategy, which starts a manager process."""
    done = run_script(tmp_path, BY_NAME)
    assert (done.returncode, done.stderr) == (0, "")
    assert "SEEN True" in done.stdout


class DiesWhenSixAreTaken(Rows):
    """The worker of item 7 is killed while no descriptor is on its way to the parent.

    There torch raises its error from a signal handler, at whatever line the main thread is at; between two lines of the
    standard library that take a descriptor over, that one is lost.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(kill_me, folder / "dead")
        self.taken = folder / "taken"
        self.worker = folder / "worker"

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at and not self.marker.exists():
            self.worker.write_text(str(os.getpid()))
            wait_until(self.taken.exists)
        elif index > self.at:
            wait_until(self.marker.exists)
            wait_until(partial(is_dead, int(self.worker.read_text())))
        return super().__getitem__(index)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.usefixtures("portable")
def test_c15_without_anonymous_memory_a_killed_worker_leaves_nothing(tmp_path: Path) -> None:
    left = Left()
    dataset = DiesWhenSixAreTaken(tmp_path)
    loader = DataLoader(dataset, batch_size=1, num_workers=2)
    with GPUPrefetcher(loader, "cpu") as prefetcher:
        iterator = iter(prefetcher)
        kept = [next(iterator) for _ in range(7)]
        dataset.taken.touch()
        with pytest.raises(DEATHS):
            kept.extend(iterator)
        assert values("cpu", kept) == ALL[:7]
        del kept, iterator
        assert values("cpu", list(prefetcher)) == ALL
    left.assert_nothing()


# Many passes


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["", "persistent"])
def test_c14_fifty_passes_leave_everything_as_it_was(options: dict[str, Any]) -> None:
    device = SimulatedDevice()
    count = 50 if options else 12
    loader = DataLoader(Rows(lambda: None, Path(os.devnull), count=6), batch_size=2, num_workers=1, **options)
    with GPUPrefetcher(loader, device) as prefetcher:
        for number in range(count):
            for taken, _ in enumerate(prefetcher):
                if taken == number % 4:
                    break
            if number == 3:
                left = Left()
                allocations = prefetcher.stats().pinned_allocations
        left.assert_nothing()
        if options:
            assert prefetcher.stats().pinned_allocations <= max(allocations, 4)
    assert device.pinned_bytes == 0
