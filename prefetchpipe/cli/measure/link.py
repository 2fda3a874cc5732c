"""Rates of this machine: host to device and back, from pinned and from pageable memory, and packing by threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from prefetchpipe import native
from prefetchpipe.cli.measure.timing import Spread, calls_for, seconds_per_call, spread, synchronizer

__all__ = ["LinkRates", "measure_link", "measure_packing"]

_REPEATS = 5


@dataclass(frozen=True, slots=True)
class LinkRates:
    """GB/s (10^9 bytes) for one buffer size."""

    nbytes: int
    pinned_h2d: Spread
    pageable_h2d: Spread
    pinned_d2h: Spread
    pageable_d2h: Spread


def measure_link(device: torch.device, nbytes: int, during: Callable[[], Any] | None = None) -> tuple[LinkRates, Any]:
    """Copy ``nbytes`` back and forth.

    Args:
        device: A CUDA device with its index.
        nbytes: Size of the buffers.
        during: Called once while copies are queued, for what only a busy link shows.

    Returns:
        The rates, and what ``during`` gave.

    Raises:
        RuntimeError: Memory of either kind is refused (``torch.OutOfMemoryError`` is one).
    """
    with torch.cuda.device(device):
        pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        pageable = torch.zeros(nbytes, dtype=torch.uint8)
        here = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        copies: dict[str, Callable[[], Any]] = {
            "pinned_h2d": lambda: here.copy_(pinned, non_blocking=True),
            "pageable_h2d": lambda: here.copy_(pageable),
            "pinned_d2h": lambda: pinned.copy_(here, non_blocking=True),
            "pageable_d2h": lambda: pageable.copy_(here),
        }
        wait = synchronizer(device)
        rates = {name: _rate(copy, nbytes, wait) for name, copy in copies.items()}
        seen = None
        if during is not None:
            for _ in range(32):
                copies["pinned_h2d"]()
            seen = during()
            wait()
    return LinkRates(nbytes=nbytes, **rates), seen


def measure_packing(threads: list[int], nbytes: int, *, pinned: bool) -> dict[int, Spread]:
    """GB/s from ordinary memory into a staging buffer, by number of threads, of what packs batches.

    Native copies, or torch's ``copy_``, whose thread count is put back.

    Args:
        threads: Counts to try.
        nbytes: Size of the buffers; well above the CPU's caches.
        pinned: Whether the buffer is pinned, as with a GPU.
    """
    sources = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
    slot = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    turn = 0

    def pack() -> None:
        nonlocal turn
        turn += 1
        slot.copy_(sources[turn % 2])

    found = {}
    if native.is_available():
        for count in threads:
            copier = native.Copier(count)

            def pack_natively(copier: native.Copier = copier) -> None:
                nonlocal turn
                turn += 1
                copier.copy(slot.data_ptr(), sources[turn % 2].data_ptr(), nbytes)

            try:
                found[count] = _rate(pack_natively, nbytes, lambda: None)
            finally:
                copier.close()
        return found
    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            found[count] = _rate(pack, nbytes, lambda: None)
    finally:
        torch.set_num_threads(before)
    return found


def _rate(action: Callable[[], Any], nbytes: int, wait: Callable[[], None]) -> Spread:
    calls = calls_for(action, 0.02, wait)
    return spread([nbytes / seconds_per_call(action, calls, wait) / 1e9 for _ in range(_REPEATS)])
