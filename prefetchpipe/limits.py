"""What the machine can do: the rate of the link and of packing, measured when somebody asks for it."""

from __future__ import annotations

import statistics
import threading
import weakref
from dataclasses import dataclass
from time import perf_counter

import torch

from prefetchpipe import native
from prefetchpipe.device import Device, resolve
from prefetchpipe.options import usable_cores
from prefetchpipe.pipeline.threadstate import limit_packing_threads

__all__ = ["Limits", "known_limits", "measure_limits"]

_BYTES = 64 << 20
_SIMULATED_BYTES = 1 << 20
_REPEATS = 5
_COPIES = 4

_known: weakref.WeakKeyDictionary[Device, Limits] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of one device and the host it is in; medians."""

    host_to_device_gb_per_second: float | None
    """GB/s of the copy engine out of page-locked memory; None: no link (the CPU)."""
    packing_gb_per_second: float
    """GB/s of packing into memory of the kind that batches are packed into."""
    packing_threads: int
    """Threads that packed."""


def known_limits(device: str | torch.device | Device | None = None) -> Limits | None:
    """What :func:`measure_limits` found for ``device`` in this process; None if it was not called."""
    return _known.get(resolve(device))


def measure_limits(device: str | torch.device | Device | None = None) -> Limits:
    """Measure the link and the packing rate of ``device``, and remember them for ``stats()``.

    Takes 64 MiB of page-locked and 64 MiB of device memory for some tenths of a second. The device memory stays with
    torch's allocator, as always; the page-locked memory goes back. Measure while nothing else runs: what
    else uses the link or the cores lowers what is found.

    Args:
        device: As for :class:`prefetchpipe.GPUPrefetcher`.

    Returns:
        The rates.

    Raises:
        PinnedMemoryError: Page-locked memory is refused.
        torch.OutOfMemoryError: The device is full.

    Example:
        >>> from prefetchpipe.stats import measure_limits
        >>> measure_limits("cpu").host_to_device_gb_per_second is None
        True
    """
    place = resolve(device)
    size = _SIMULATED_BYTES if place.host_memory else _BYTES
    threads = usable_cores()
    if not place.staged:
        limits = Limits(None, _packing_rate(torch.empty(size, dtype=torch.uint8, device="cpu"), threads), threads)
    else:
        with place.beside_captures():
            block = place.host_alloc(size)
        try:
            packing = _packing_rate(block.tensor, threads)
            limits = Limits(_link_rate(place, block.tensor), packing, threads)
        finally:
            block.free()
    _known[place] = limits
    return limits


def _link_rate(device: Device, source: torch.Tensor) -> float:
    """GB/s of the copy engine, from timing events around a few copies at a time."""
    rates = []
    with device.beside_captures(), device.on_copy_stream():
        stream = device.copy_stream
        target = device.alloc(source.numel())
        start, end = device.new_timing_event(), device.new_timing_event()
        try:
            for _ in range(_REPEATS + 1):
                device.record(start, stream)
                for _ in range(_COPIES):
                    device.copy(target, source, stream)
                device.record(end, stream)
                device.synchronize(end)
                rates.append(_COPIES * source.numel() / device.elapsed_seconds(start, end) / 1e9)
        finally:
            device.record(end, stream)
            device.synchronize(end)  # contract 6: the source outlives every copy out of it
    return statistics.median(rates[1:])


def _packing_rate(target: torch.Tensor, threads: int) -> float:
    """GB/s with ``threads`` threads, of what packs batches: native copies, or torch's in a thread of ours."""
    source = torch.ones(target.numel(), dtype=torch.uint8, device="cpu")
    rates: list[float] = []
    copier = native.Copier(threads) if native.is_available() else None

    def pack() -> None:
        limit_packing_threads(threads)
        for _ in range(_REPEATS + 1):
            begin = perf_counter()
            if copier is None:
                target.copy_(source)
            else:
                copier.copy(target.data_ptr(), source.data_ptr(), target.numel())
            rates.append(target.numel() / (perf_counter() - begin) / 1e9)
        if copier is not None:
            copier.close()

    thread = threading.Thread(target=pack, name="prefetchpipe-limits", daemon=True)
    thread.start()
    thread.join()
    return statistics.median(rates[1:])
