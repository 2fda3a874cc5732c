"""Beside other code in one process: cases N1 and N5; contracts C13 (no side effects), C15 (no CuPy, no CUDA)."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import locale
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from prefetchpipe import GPUPrefetcher
from tests.support import Source, Thread, collect, is_cuda, run_script, settle

pytestmark = pytest.mark.timeout(90)


def rows(count: int = 8) -> Source:
    return Source(lambda index: {"x": torch.full((1000,), float(index)), "y": np.full(3, index)}, count)


def check(batches: list[Any]) -> None:
    assert [(float(b["x"][5]), int(b["y"][1])) for b in batches] == [(i, i) for i in range(len(batches))]


# Case N1, settings of the process


@pytest.fixture
def four_threads() -> Any:
    """A count that differs from the default, so that a reset shows."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 3)
    yield before + 3
    torch.set_num_threads(before)


@pytest.mark.parametrize("copy_threads", [None, 1, 2])
def test_c13_n1_thread_counts_stay(device: Any, fetch: str, four_threads: int, copy_threads: int | None) -> None:
    inter = torch.get_num_interop_threads()
    fresh = Thread(torch.get_num_threads).result()
    prefetcher = GPUPrefetcher(rows(), device, fetch=fetch, copy_threads=copy_threads)
    during = []
    kept = []
    for batch in prefetcher:
        during.append(torch.get_num_threads())
        kept.append(batch)
    settle(device)
    check(kept)
    assert set(during) == {four_threads}
    assert torch.get_num_threads() == four_threads
    assert Thread(torch.get_num_threads).result() == fresh
    assert torch.get_num_interop_threads() == inter


def process_state() -> dict[str, Any]:
    state = {
        "torch rng": torch.get_rng_state().tolist(),
        "numpy rng": str(np.random.get_state()),  # noqa: NPY002  the global generator is the point
        "random": random.getstate(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "excepthook": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "folder": Path.cwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.callbacks[:]),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "trace": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "descriptors": sorted(os.listdir("/proc/self/fd")),  # noqa: PTH208  names, not what they point to
    }
    if torch.cuda.is_available():
        state["cuda"] = (
            torch.cuda.current_device(),
            torch.cuda.current_stream(),
            torch.cuda.get_rng_state().tolist(),
            torch.cuda.get_allocator_backend(),
            torch.cuda.get_sync_debug_mode(),
        )
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


@pytest.mark.parametrize("leave", ["end", "middle", "error"])
def test_c13_n1_nothing_of_the_process_changes(device: Any, fetch: str, leave: str) -> None:
    def one_pass(*, look: bool) -> None:
        def transform(batch: Any) -> Any:
            if leave == "error" and int(batch["x"].shape[0]) != 1000:
                raise ValueError("short batch")
            return batch

        batches: list[Any] = [rows().make(i) for i in range(8)]
        if leave == "error":
            batches[4] = {"x": torch.ones(3)}
        prefetcher = GPUPrefetcher(batches, device, fetch=fetch, transform=transform)
        with contextlib.suppress(ValueError):
            for index, _ in enumerate(prefetcher):
                if look:
                    changed = differences(before, process_state())
                    changed.pop("descriptors", None)
                    assert changed == {}
                if leave == "middle" and index == 3:
                    break
        prefetcher.close()
        settle(device)

    before = process_state()
    one_pass(look=False)
    changed = differences(before, process_state())
    changed.pop("descriptors", None)  # a driver may keep some, from its first use on
    assert changed == {}
    before = process_state()
    one_pass(look=True)
    assert differences(before, process_state()) == {}


@pytest.mark.slow
def test_c13_n1_nothing_of_the_process_changes_with_workers() -> None:
    loader = DataLoader(range(20), batch_size=4, num_workers=1, generator=torch.Generator())
    list(loader)  # torch installs its own handler for child processes at its first use
    before = process_state()
    with GPUPrefetcher(loader, "cpu") as prefetcher:
        assert [batch.tolist()[0] for batch in prefetcher] == [0, 4, 8, 12, 16]
    gc.collect()
    changed = differences(before, process_state())
    changed.pop("descriptors", None)  # torch closes those of its queues when it gets round to it
    assert changed == {}
    assert loader.num_workers == 1
    assert [batch.tolist()[0] for batch in loader] == [0, 4, 8, 12, 16]


@pytest.mark.slow
def test_c13_n1_the_dataloader_itself_is_not_changed(device: Any) -> None:
    loader = DataLoader(range(20), batch_size=4, num_workers=1)
    before = dict(vars(loader))
    assert [int(batch[0]) for batch in collect(device, GPUPrefetcher(loader, device))] == [0, 4, 8, 12, 16]
    assert {key: vars(loader).get(key) for key in before} == before
    assert set(vars(loader)) == set(before)


def test_c13_n1_users_modes_in_the_body_are_the_users(device: Any, fetch: str) -> None:
    """What the consumer sets between two steps stays set, and is not ours to see or to undo."""
    prefetcher = GPUPrefetcher(rows(), device, fetch=fetch)
    kept = []
    before = torch.is_grad_enabled()
    try:
        for index, batch in enumerate(prefetcher):
            torch.set_grad_enabled(index % 2 == 0)
            kept.append(batch)
            assert torch.is_grad_enabled() == (index % 2 == 0)
    finally:
        torch.set_grad_enabled(before)
    settle(device)
    check(kept)


OPTIONAL = ["cupy", "lightning", "pytorch_lightning", "accelerate", "transformers", "ray", "tensordict", "torchdata"]
OPTIONAL += ["torch_geometric"]


@pytest.mark.slow
def test_c13_n1_importing_does_nothing_else(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        f"""
import sys, threading, warnings
import torch
threads, filters = torch.get_num_threads(), list(warnings.filters)
import prefetchpipe
assert threading.active_count() == 1, threading.enumerate()
assert torch.get_num_threads() == threads
assert not torch.cuda.is_initialized()
assert warnings.filters == filters
loaded = [name for name in {OPTIONAL} if name in sys.modules]
assert loaded == [], loaded
batches = list(prefetchpipe.GPUPrefetcher([torch.ones(3) * i for i in range(5)], "cpu"))
assert [int(b[0]) for b in batches] == [0, 1, 2, 3, 4]
loaded = [name for name in {OPTIONAL} if name in sys.modules]
assert loaded == [], loaded
assert not torch.cuda.is_initialized()
print("RIGHT")
""",
    )
    assert done.stderr == ""
    assert "RIGHT" in done.stdout
    assert done.returncode == 0


# Case N5, CuPy that is missing, broken or of another CUDA

FAKES = {
    "missing": "raise ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')",
    "other CUDA": 'raise ImportError("libcudart.so.11.0: cannot open shared object file: No such file or directory")',
    "broken": 'raise AttributeError("module numpy has no attribute product")',
    "no driver": """
__version__ = "14.2.0"
class CUDARuntimeError(RuntimeError): pass
class runtime:
    CUDARuntimeError = CUDARuntimeError
    @staticmethod
    def getDeviceCount(): raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    @staticmethod
    def runtimeGetVersion(): raise CUDARuntimeError("cudaErrorInsufficientDriver")
class cuda:
    runtime = runtime
    @staticmethod
    def is_available(): return False
""",
    "bad release": """
__version__ = "14.0.0"
def __getattr__(name): raise AssertionError("used although it is known to be bad: " + name)
""",
}

SCRIPT = """
import torch
from prefetchpipe import GPUPrefetcher
prefetcher = GPUPrefetcher([{{"x": torch.full((1000,), float(i))}} for i in range(12)], {device!r}, depth=3)
kept = list(prefetcher) + list(prefetcher)
assert [float(b["x"][7]) for b in kept] == list(range(12)) * 2
assert [b["x"].device.type for b in kept] == [{device!r} or "cpu"] * 24
print("RIGHT", prefetcher.stats().path)
"""


def with_fake_cupy(folder: Path, name: str, device: str | None) -> Any:
    package = folder / "fake" / "cupy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKES[name])
    return run_script(folder, SCRIPT.format(device=device), PYTHONPATH=str(package.parent))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAKES))
def test_c15_n5_on_the_cpu_cupy_does_not_matter(tmp_path: Path, name: str) -> None:
    done = with_fake_cupy(tmp_path, name, "cpu")
    assert done.stderr == ""
    assert "RIGHT" in done.stdout
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("name", ["missing", "no driver"])
def test_c15_n5_without_cuda_the_default_device_is_the_cpu(tmp_path: Path, name: str) -> None:
    done = with_fake_cupy(tmp_path, name, None)
    assert done.stderr == ""
    assert "RIGHT" in done.stdout
    assert done.returncode == 0


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("name", list(FAKES))
def test_c15_n5_on_cuda_torchs_pinned_memory_takes_over(tmp_path: Path, name: str) -> None:
    """Right values; and if anything is said, it is said once, with what to install."""
    done = with_fake_cupy(tmp_path, name, "cuda")
    assert "RIGHT" in done.stdout, done.stderr
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert done.stderr.count("PrefetchWarning") <= 1
    if done.stderr:
        assert "cupy" in done.stderr.lower()
        assert "install" in done.stderr.lower()


@pytest.mark.gpu
@pytest.mark.slow
@needs_cuda
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy, an optional dependency")
@pytest.mark.parametrize(
    "order", ["cupy, torch, prefetchpipe", "torch, prefetchpipe, cupy", "prefetchpipe, cupy, torch"]
)
def test_c15_n5_any_import_order(tmp_path: Path, order: str) -> None:
    source = f"import {order}\n" + SCRIPT.format(device="cuda")
    source += "assert float(cupy.arange(5).sum()) == 10\n"
    done = run_script(tmp_path, source)
    assert "RIGHT" in done.stdout, done.stderr
    assert done.returncode == 0
    assert done.stderr == ""


def test_c15_n5_stats_say_which_path_was_taken_and_why(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(rows(), device, fetch=fetch)
    check(collect(device, prefetcher))
    stats = prefetcher.stats()
    assert isinstance(stats.path, str)
    assert stats.path
    assert isinstance(stats.path_reason, str)
    assert stats.path_reason
    assert stats.batches == 8
    assert stats.stall_seconds >= 0
    if is_cuda(device):
        assert stats.copied_bytes >= 8 * 4000
