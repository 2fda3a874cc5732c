"""What the driver says about a GPU, through NVML (nvidia-ml-py), and how busy it is while something runs.

NVML is optional everywhere: each question that cannot be answered gives None.
"""

from __future__ import annotations

import importlib
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

__all__ = ["Driver", "GpuFacts", "Usage", "UsageSampler", "gpu_facts", "read_driver"]

_SAMPLE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver of this machine."""

    version: str | None
    cuda: str | None
    """Newest CUDA version that it serves."""
    gpus: tuple[str, ...]
    """Names of the GPUs that it knows, whether torch sees them or not."""
    problem: str = ""
    """Why NVML does not answer; empty: it does."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as NVML sees it; None: it does not say."""

    bus_id: str | None = None
    pcie_generation: int | None = None
    """In use now; an idle GPU lowers it."""
    pcie_width: int | None = None
    pcie_max_generation: int | None = None
    """Of GPU and slot together."""
    pcie_max_width: int | None = None
    mig: bool | None = None
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """How busy a GPU was while something ran."""

    gpu_percent: float | None
    """Mean share of time in which a kernel ran."""
    memory_bytes: int | None
    """Most device memory in use, by all processes."""


def read_driver() -> Driver:
    """Ask NVML about the driver and its GPUs."""
    with _nvml() as (nvml, problem):
        if nvml is None:
            return Driver(None, None, (), problem)
        number = _ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
        handles = [_ask(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(_ask(nvml.nvmlDeviceGetCount) or 0)]
        names = [_ask(nvml.nvmlDeviceGetName, handle) for handle in handles if handle is not None]
        return Driver(
            version=_ask(nvml.nvmlSystemGetDriverVersion),
            cuda=None if number is None else f"{number // 1000}.{number % 1000 // 10}",
            gpus=tuple(name for name in names if name is not None),
        )


def gpu_facts(device: torch.device, root: Path = Path("/")) -> GpuFacts:
    """Ask NVML about one CUDA device; PCIe values are those of this moment, so ask while copies run.

    Args:
        device: A CUDA device with its index.
        root: Where ``sys`` is.
    """
    with _nvml() as (nvml, _):
        handle = None if nvml is None else _handle(nvml, device)
        if nvml is None or handle is None:
            return GpuFacts()
        mode = _ask(nvml.nvmlDeviceGetMigMode, handle)
        pci = _ask(nvml.nvmlDeviceGetPciInfo, handle)
        bus_id = None if pci is None else _decoded(pci.busId)
        return GpuFacts(
            bus_id=bus_id,
            pcie_generation=_ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            pcie_width=_ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            pcie_max_generation=_ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            pcie_max_width=_ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            mig=None if mode is None else bool(mode[0]),
            numa_node=_numa_node(bus_id, root),
        )


class UsageSampler:
    """Asks NVML every 50 ms from a thread of its own, between ``with`` and its end.

    Args:
        device: What is watched; nothing is for the CPU.

    Example:
        >>> import torch
        >>> with UsageSampler(torch.device("cpu")) as sampler:
        ...     pass
        >>> sampler.usage().gpu_percent is None
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._percent: list[int] = []
        self._memory: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            self._thread = threading.Thread(target=self._run, name="prefetchpipe-usage-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def usage(self) -> Usage:
        """Mean and maximum of what was seen."""
        return Usage(
            gpu_percent=statistics.fmean(self._percent) if self._percent else None,
            memory_bytes=max(self._memory, default=None),
        )

    def _run(self) -> None:
        with _nvml() as (nvml, _):
            handle = None if nvml is None else _handle(nvml, self._device)
            if nvml is None or handle is None:
                return
            while not self._stop.wait(_SAMPLE_SECONDS):
                if (rates := _ask(nvml.nvmlDeviceGetUtilizationRates, handle)) is not None:
                    self._percent.append(rates.gpu)
                if (memory := _ask(nvml.nvmlDeviceGetMemoryInfo, handle)) is not None:
                    self._memory.append(memory.used)


@contextmanager
def _nvml() -> Iterator[tuple[Any, str]]:
    """The initialised library, or None and why. NVML counts its users, so nesting is fine."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        yield None, "nvidia-ml-py is not installed"
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield None, f"NVML: {error}"
        return
    try:
        yield nvml, ""
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _handle(nvml: Any, device: torch.device) -> Any:
    """NVML's handle: its indices are not torch's (CUDA_VISIBLE_DEVICES, order); UUID and PCI address are the same."""
    properties = torch.cuda.get_device_properties(device)
    for prefix in ("GPU-", "MIG-"):
        handle = _ask(nvml.nvmlDeviceGetHandleByUUID, f"{prefix}{properties.uuid}")
        if handle is not None and prefix == "MIG-":
            # Link and utilisation belong to the whole GPU, whatever instance of it is in use.
            handle = _ask(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        if handle is not None:
            return handle
    try:
        domain, bus, slot = (int(getattr(properties, f"pci_{name}_id")) for name in ("domain", "bus", "device"))
    except AttributeError:  # an older torch does not say
        return None
    return _ask(nvml.nvmlDeviceGetHandleByPciBusId, f"{domain:08x}:{bus:02x}:{slot:02x}.0")


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, decoded; None where this GPU, driver or library has none."""
    nvml = importlib.import_module("pynvml")
    try:
        return _decoded(function(*arguments))
    except nvml.NVMLError:
        return None


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _numa_node(bus_id: str | None, root: Path) -> int | None:
    if bus_id is None:
        return None
    domain, _, rest = bus_id.lower().partition(":")
    path = root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node"
    try:
        node = int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
