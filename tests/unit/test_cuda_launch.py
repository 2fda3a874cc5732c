"""The launch of a kernel through the driver, with a driver that only looks at what it is given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefetchpipe.device.cuda import CudaDevice

OURS = 77


class Driver:
    """Remembers launches, and the context in which each came."""

    def __init__(self) -> None:
        self.context = 0
        self.launched: list[tuple[int, list[int], tuple[int, ...]]] = []

    def ctxGetCurrent(self) -> int:  # noqa: N802 - CuPy's names
        return self.context

    def setDevice(self, index: int) -> None:  # noqa: N802
        self.context = OURS + index

    def launchKernel(self, *args: int) -> None:  # noqa: N802
        params = ctypes.cast(args[9], ctypes.POINTER(ctypes.POINTER(ctypes.c_longlong)))
        self.launched.append((self.context, [params[k][0] for k in range(4)], args[:9]))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()

    class Switch:
        """``torch.cuda.device``: back to the context before, which may be none."""

        def __init__(self, device: Any) -> None:
            del device

        def __enter__(self) -> None:
            self.before = driver.context

        def __exit__(self, *_: object) -> None:
            driver.context = self.before

    monkeypatch.setattr(torch.cuda, "device", Switch)
    return driver


@pytest.mark.parametrize("current", [0, OURS, OURS + 1])
@pytest.mark.parametrize("known", [0, OURS])
def test_a_kernel_is_launched_in_the_context_of_its_device(driver: Driver, current: int, known: int) -> None:
    device = object.__new__(CudaDevice)
    device.index = 0
    device.torch_device = torch.device("cuda", 0)
    device._cupy = SimpleNamespace(cuda=SimpleNamespace(driver=driver))
    device._runtime = driver
    device._context = known
    driver.context = current
    tensor = torch.arange(3)
    device._launch(SimpleNamespace(ptr=5), SimpleNamespace(raw=9), 2, 64, (tensor, -1, 1 << 40, tensor[1:]))
    ((context, values, given),) = driver.launched
    assert context == OURS
    assert values == [tensor.data_ptr(), -1, 1 << 40, tensor.data_ptr() + 8]
    assert given == (5, 2, 1, 1, 64, 1, 1, 0, 9)
    assert driver.context == current
