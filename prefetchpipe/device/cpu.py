"""The CPU: batches are packed straight into memory of their own; streams and events have nothing to order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from prefetchpipe.device.base import Event, HostBlock, Kernel, Stream
from prefetchpipe.errors import PinnedMemoryError

__all__ = ["CpuDevice", "cpu_device"]


class CpuDevice:
    """Same contracts as a GPU, no GPU: what a yielded batch holds belongs to the consumer alone."""

    torch_device = torch.device("cpu")
    staged = False
    host_memory = False
    copy_stream: Stream = None
    d2h_stream: Stream = None

    def __repr__(self) -> str:
        return "cpu"

    def bind_thread(self) -> None:
        """Nothing to make current."""

    def on_copy_stream(self) -> AbstractContextManager[None]:
        """Nothing to make current."""
        return nullcontext()

    def on_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Nothing to make current."""
        return nullcontext()

    def beside_captures(self) -> AbstractContextManager[None]:
        """The CPU captures nothing."""
        return nullcontext()

    def current_stream(self) -> Stream:
        """The CPU has none."""
        return None

    def generators(self) -> tuple[torch.Generator, ...]:
        """None beside the CPU's, which everybody watches."""
        return ()

    def host_alloc(self, nbytes: int) -> HostBlock:
        """Never asked for: nothing is staged."""
        raise PinnedMemoryError(f"{nbytes} bytes: the CPU needs no page-locked memory")

    def host_register(self, tensor: torch.Tensor) -> None:
        """The CPU reads any memory."""

    def host_unregister(self, tensor: torch.Tensor) -> None:
        """Nothing to take back."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Nothing is copied from where it is: the consumer's batch is its own (contract 5)."""
        return False

    def is_resident(self, tensor: torch.Tensor) -> bool:
        """Never: what arrives on the CPU is a copy (contract 5)."""
        return False

    def alloc(self, nbytes: int) -> torch.Tensor:
        """Pageable memory of exactly ``nbytes``."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Pageable memory."""
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Copy now."""
        start = dst.storage_offset() * dst.dtype.itemsize
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        flat.set_(dst.untyped_storage(), start, (src.numel(),), (1,)).copy_(src)

    def copy_small(self, tensor: torch.Tensor) -> torch.Tensor:
        """Never asked for: nothing is staged."""
        raise NotImplementedError

    def copy_to_host(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Never asked for: nothing is staged."""
        raise NotImplementedError

    def before_kernels(self) -> None:
        """Nothing is under way."""

    def compile_kernels(self, source: str, names: tuple[str, ...]) -> Mapping[str, Kernel] | None:
        """None: torch's own operators are used."""
        return None

    def fill(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy now."""
        torch._foreach_copy_(targets, sources)

    def before_transform(self) -> None:
        """Nothing is under way."""

    def new_event(self) -> Event:
        """An event that has always passed."""
        return None

    def record(self, event: Event, stream: Stream) -> None:
        """Nothing to order."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing to order."""

    def query(self, event: Event) -> bool:
        """Everything has passed."""
        return True

    def synchronize(self, event: Event) -> None:
        """Everything has passed."""

    def new_timing_event(self) -> Event:
        """As :meth:`new_event`: nothing runs beside the host."""

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Nothing runs beside the host."""
        return 0.0

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """No profiler of its own."""
        return nullcontext()

    def record_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Memory goes back when its last reference goes."""


@cache
def cpu_device() -> CpuDevice:
    """The one CPU device of the process."""
    return CpuDevice()
