"""Fixtures for the whole suite: devices to run on, and a check that no thread of ours outlives its test."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import join_ours, our_threads

PHASES = pytest.StashKey[dict[str, bool]]()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and the scripts that get Ctrl-C from a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    item.stash.setdefault(PHASES, {})[report.when] = report.passed
    return report


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    before = our_threads()
    yield
    # The traceback of a failed test keeps its iterators alive, so their threads say nothing.
    if not request.node.stash.get(PHASES, {}).get("call", False) or our_threads() <= before:
        return
    gc.collect()
    left = join_ours(before)
    if left:
        pytest.fail(f"threads outlive the test: {sorted(thread.name for thread in left)}")


def _device(name: str) -> Any:
    if name == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        return "cuda"
    if name == "sim":
        from prefetchpipe.testing import SimulatedDevice

        return SimulatedDevice()
    return name


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to pack: native copies, and torch's."""
    from prefetchpipe import native

    if request.param == "torch":
        monkeypatch.setattr(native, "_library", None)
    elif not native.is_available():
        pytest.skip(f"no native copies: {native.why_not()}")
    return str(request.param)


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", "sim", CUDA])
def device(request: pytest.FixtureRequest) -> Any:
    """Each kind of device in turn: the CPU, a simulated one, CUDA."""
    return _device(request.param)


@pytest.fixture(params=["sim", CUDA])
def stream_device(request: pytest.FixtureRequest) -> Any:
    """Each kind of device that has streams."""
    return _device(request.param)


@pytest.fixture
def sim() -> Any:
    return _device("sim")


@pytest.fixture(params=["thread", "caller"])
def fetch(request: pytest.FixtureRequest) -> str:
    """Who calls next(loader)."""
    return request.param
