"""Helpers that the black-box tests share; nothing here looks inside prefetchpipe."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil
import torch

THREAD_PREFIX = "prefetchpipe-"
TIMEOUT = 20.0
"""Seconds after which a wait counts as a hang; nothing right comes near it."""


# Devices: "cpu", "cuda..." or a SimulatedDevice.


def is_simulated(device: Any) -> bool:
    return not isinstance(device, (str, torch.device))


def is_cuda(device: Any) -> bool:
    return not is_simulated(device) and torch.device(device).type == "cuda"


def settle(device: Any) -> None:
    """Let everything queued on the device finish, so that leaves of batches are readable."""
    if is_simulated(device):
        device.synchronize()
    elif is_cuda(device):
        torch.cuda.synchronize()


def kernel(device: Any, function: Callable[..., Any], *tensors: torch.Tensor, seconds: float = 0.0) -> None:
    """Queue `function(*tensors)` on the stream current in this thread, as work that takes `seconds`."""
    if is_simulated(device):
        device.launch(function, *tensors, seconds=seconds)
        return
    if is_cuda(device) and seconds:
        spin(seconds)
    function(*tensors)


_cycles_per_second: float | None = None


def spin(seconds: float) -> None:
    """Keep the current CUDA stream busy for about `seconds`."""
    global _cycles_per_second  # noqa: PLW0603
    if _cycles_per_second is None:
        torch.cuda._sleep(1_000_000)
        rates = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            torch.cuda._sleep(4_000_000)
            end.record()
            end.synchronize()
            rates.append(4_000_000 / (start.elapsed_time(end) / 1e3))
        _cycles_per_second = max(rates)  # the others shared the device with another process
    torch.cuda._sleep(int(seconds * _cycles_per_second))


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever makes the host wait for the GPU is an error, as far as torch sees it."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def new_stream(device: Any) -> Any:
    return device.new_stream() if is_simulated(device) else torch.cuda.Stream()


def use_stream(device: Any, stream: Any) -> contextlib.AbstractContextManager[Any]:
    return device.use_stream(stream) if is_simulated(device) else torch.cuda.stream(stream)


class Readings:
    """Reads tensors on the device in stream order, without host synchronisation: their least and greatest value."""

    def __init__(self, device: Any, rows: int) -> None:
        self.device = device
        self._host: list[tuple[float, float]] = [(math.nan, math.nan)] * rows
        self._results = torch.full((rows, 2), math.nan, dtype=torch.float64, device="cuda") if is_cuda(device) else None

    def queue(self, row: int, *leaves: torch.Tensor, seconds: float = 0.0) -> None:
        if self._results is not None:
            out = self._results[row]
            if seconds:
                spin(seconds)
            lows = torch.stack([leaf.amin().double() for leaf in leaves])
            highs = torch.stack([leaf.amax().double() for leaf in leaves])
            torch.amin(lows, 0, out=out[0])
            torch.amax(highs, 0, out=out[1])
            return

        def read(*views: torch.Tensor) -> None:
            self._host[row] = (min(float(v.min()) for v in views), max(float(v.max()) for v in views))

        kernel(self.device, read, *leaves, seconds=seconds)

    def values(self) -> list[tuple[float, float]]:
        settle(self.device)
        if self._results is not None:
            return [(low, high) for low, high in self._results.tolist()]
        return self._host


def constants(values: Iterable[float]) -> list[tuple[float, float]]:
    """What `Readings.values` gives for batches that hold nothing but these constants."""
    return [(float(v), float(v)) for v in values]


# Batches


def leaves_of(batch: Any) -> list[torch.Tensor]:
    """The tensors in nested dicts, lists, tuples and dataclasses, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves_of(value)]
    if isinstance(batch, (list, tuple)):
        return [leaf for value in batch for leaf in leaves_of(value)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [leaf for field in dataclasses.fields(batch) for leaf in leaves_of(getattr(batch, field.name))]
    return []


def to_plain(batch: Any) -> Any:
    """The same batch as CPU tensors of its own, in plain dicts, lists and tuples. Call `settle` before."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().to("cpu", copy=True)
    if isinstance(batch, Mapping):
        return {key: to_plain(value) for key, value in batch.items()}
    if isinstance(batch, list):
        return [to_plain(value) for value in batch]
    if isinstance(batch, tuple):
        return tuple(to_plain(value) for value in batch)
    return batch


def collect(device: Any, iterable: Iterable[Any]) -> list[Any]:
    """All batches, kept until the end and only then read."""
    kept = list(iterable)
    settle(device)
    return [to_plain(batch) for batch in kept]


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal element for element and bit for bit, for every dtype, those without arithmetic included."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)

    return torch.equal(raw(actual), raw(expected))


def assert_same(actual: Any, expected: Any) -> None:
    """Same types all the way down, same values; numeric arrays in `expected` count as tensors."""
    if isinstance(expected, np.ndarray):
        expected = torch.from_numpy(expected.copy())
    assert type(actual) is type(expected), (actual, expected)
    if isinstance(expected, torch.Tensor):
        assert same_bytes(actual, expected), (actual, expected)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), (actual, expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


# Loaders


class Source:
    """A re-iterable loader over the function of a number, which notes how far it was pulled."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self.make = make
        self.count = count
        self.iters = 0
        self.pulled = 0
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[Any]:
        self.iters += 1
        return self._rows()

    def _rows(self) -> Iterator[Any]:
        for index in range(self.count):
            with self._changed:
                self.pulled += 1
                self._changed.notify_all()
            yield self.make(index)

    def __len__(self) -> int:
        return self.count

    def wait_pulled(self, count: int, timeout: float = TIMEOUT) -> bool:
        """Whether `count` items have been pulled, over all passes, within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.pulled >= count, timeout)


# Threads, processes, memory


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)}


def join_ours(known: Iterable[threading.Thread] = (), timeout: float = 5.0) -> set[threading.Thread]:
    """Wait for the threads of ours that are not in `known`; returns those that stay."""
    deadline = time.monotonic() + timeout
    for thread in our_threads() - set(known):
        thread.join(max(0.0, deadline - time.monotonic()))
    return our_threads() - set(known)


def worker_processes() -> set[psutil.Process]:
    """Child processes, without the helpers that multiprocessing keeps for the life of a process."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in line and "forkserver" not in line:
                found.add(child)
    return found


class Surroundings:
    """Threads, processes and memory before; `assert_restored` compares."""

    def __init__(self, device: Any = "cpu") -> None:
        self.device = device
        self.threads = set(threading.enumerate())
        self.processes = worker_processes()
        self.memory = self._memory()

    def _memory(self) -> dict[str, int]:
        if is_simulated(self.device):
            settle(self.device)
            return {"device": self.device.allocated_bytes, "pinned": self.device.pinned_bytes}
        if is_cuda(self.device):
            settle(self.device)
            return {"device": torch.cuda.memory_allocated()}
        return {}

    def assert_restored(self) -> None:
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(5.0)
        psutil.wait_procs(worker_processes() - self.processes, timeout=5)
        assert set(threading.enumerate()) - self.threads == set()
        assert worker_processes() - self.processes == set()
        now = self._memory()  # less than before is what an earlier test had left behind
        assert all(now[kind] <= bytes_ for kind, bytes_ in self.memory.items()), (now, self.memory)


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """What is freed inside is freed by its last reference alone."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def frame_names(traceback: TracebackType | None) -> list[str]:
    names = []
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    return names


class Thread(threading.Thread):
    """A user's thread that hands on what its function returns or raises."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def result(self, timeout: float = TIMEOUT) -> Any:
        self.join(timeout)
        assert not self.is_alive(), "hangs"
        if self._error is not None:
            raise self._error
        return self._result


def held_up_at(index: int, count: int) -> tuple[threading.Event, threading.Event, Iterator[torch.Tensor]]:
    """Says when batch `index` is asked for, lets it go on, and the batches: 64 values of 1, of 2, and so on."""
    entered, leave = threading.Event(), threading.Event()

    def rows() -> Iterator[torch.Tensor]:
        for number in range(count):
            if number == index:
                entered.set()
                assert leave.wait(TIMEOUT)
            yield torch.full((64,), float(number + 1))

    return entered, leave, rows()


# Scripts


@dataclasses.dataclass(frozen=True)
class Finished:
    returncode: int
    stdout: str
    stderr: str
    exit_seconds: float
    """From the script's own `END <time.time()>` line to the end of its process."""


def script_environment(**extra: str) -> dict[str, str]:
    import prefetchpipe

    home = str(Path(prefetchpipe.__file__).resolve().parent.parent)
    paths = [extra.pop("PYTHONPATH", ""), home, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1", **extra}


def run_script(folder: Path, source: str, *, timeout: float = 60.0, **environment: str) -> Finished:
    path = folder / "script.py"
    path.write_text(source)
    done = subprocess.run(
        [sys.executable, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=script_environment(**environment),
        stdin=subprocess.DEVNULL,
    )
    ended = time.time()
    marks = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("END ")]
    return Finished(done.returncode, done.stdout, done.stderr, ended - marks[-1] if marks else math.nan)
