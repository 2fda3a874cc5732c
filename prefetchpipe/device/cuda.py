"""CUDA, through CuPy's runtime calls where CuPy is there and through torch otherwise.

The only file that imports CuPy and ``torch.cuda``. CuPy's runtime calls cost one to four microseconds each
(docs/performance.md), so they serve the hot path.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
import torch.cuda

from prefetchpipe.device.arguments import Arguments
from prefetchpipe.device.base import Event, HostBlock, Kernel, Stream
from prefetchpipe.errors import PinnedMemoryError, PrefetchWarning
from prefetchpipe.ranks import check_device

__all__ = ["CudaDevice", "cuda_device", "cupy_status", "is_available"]

_KNOWN_BAD_CUPY = ("14.0.0", "14.1.0")
_HOST_TO_DEVICE = 1  # cudaMemcpyHostToDevice
_DEVICE_TO_HOST = 2  # cudaMemcpyDeviceToHost
_CAPTURE_MODE_RELAXED = 2  # cudaStreamCaptureModeRelaxed

_devices: dict[int, CudaDevice] = {}
_lock = threading.Lock()  # guards _devices: two threads may construct prefetchers at once


def is_available() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def cuda_device(index: int | None) -> CudaDevice:
    """The one object for a CUDA device of this process.

    Args:
        index: Device index; None: the current device of the calling thread.

    Raises:
        ValueError: No CUDA, or no such device.
    """
    if not is_available():
        name = "cuda" if index is None else f"cuda:{index}"
        built = torch.version.cuda or "none: this is a build without CUDA"
        raise ValueError(
            f"device={name!r} needs a CUDA device, and torch {torch.__version__} sees none (its CUDA: {built}); "
            "allowed here: device='cpu', or None to take whatever is there"
        )
    count = torch.cuda.device_count()
    if index is None:
        index = torch.cuda.current_device()
        check_device(index, count)
    if not 0 <= index < count:
        raise ValueError(f"device='cuda:{index}' is not there; allowed: cuda:0 to cuda:{count - 1}")
    with _lock:
        if index not in _devices:
            _devices[index] = CudaDevice(index, _load_cupy())
        return _devices[index]


class _Stream:
    """A torch stream and its raw handle; the torch object keeps a borrowed stream's owner alive."""

    __slots__ = ("raw", "torch_stream")

    def __init__(self, torch_stream: torch.cuda.Stream) -> None:
        self.torch_stream = torch_stream
        self.raw: int = torch_stream.cuda_stream


class CudaDevice:
    """One CUDA device, with one copy stream for the whole process.

    Args:
        index: Device index.
        cupy: The CuPy module, or None to do everything through torch.
    """

    staged = True
    host_memory = False

    def __init__(self, index: int, cupy: Any) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)
        self._cupy = cupy
        self._runtime: Any = None if cupy is None else cupy.cuda.runtime
        self._context = 0  # the device's primary context, once kernels have been compiled
        torch.cuda.init()
        self._own_streams: list[Any] = []
        self._like: dict[torch.dtype, torch.Tensor] = {}
        self._d2h_stream: _Stream | None = None
        self._several = torch.cuda.device_count() > 1
        self.copy_stream = _Stream(self._new_stream())
        self._streams: dict[int, _Stream] = {self.copy_stream.raw: self.copy_stream}

    def __repr__(self) -> str:
        return str(self.torch_device)

    def _new_stream(self) -> torch.cuda.Stream:
        """A stream that nobody else has: torch hands out its 32 pool streams again and again, also for captures."""
        if self._cupy is None:
            return torch.cuda.Stream(device=self.torch_device, priority=-1)
        with torch.cuda.device(self.torch_device):
            own = self._cupy.cuda.Stream(non_blocking=True)
        self._own_streams.append(own)
        return torch.cuda.ExternalStream(own.ptr, device=self.torch_device)

    @property
    def d2h_stream(self) -> Stream:
        """See the protocol."""
        if self._d2h_stream is None:
            with _lock:
                if self._d2h_stream is None:
                    self._d2h_stream = _Stream(self._new_stream())
        return self._d2h_stream

    # Threads and streams

    def bind_thread(self) -> None:
        """See the protocol; also makes our calls legal beside a graph capture of another thread (contract 13)."""
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self.copy_stream.torch_stream)
        _RelaxedCapture().__enter__()

    def on_copy_stream(self) -> AbstractContextManager[None]:
        """See the protocol."""
        return _OnStream(self.index, self.copy_stream.torch_stream)

    def on_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """See the protocol."""
        return _OnStream(self.index, stream.torch_stream)

    def beside_captures(self) -> AbstractContextManager[None]:
        """See the protocol."""
        return _RelaxedCapture()

    def current_stream(self) -> Stream:
        """The torch stream that is current for this device in the calling thread."""
        raw = torch._C._cuda_getCurrentRawStream(self.index)
        stream = self._streams.get(raw)
        if stream is None:
            stream = self._streams[raw] = _Stream(torch.cuda.current_stream(self.torch_device))
        return stream

    def generators(self) -> tuple[torch.Generator, ...]:
        """The device's default generator, which dropout and GPU augmentation draw from."""
        return (torch.cuda.default_generators[self.index],)

    # Memory

    def host_alloc(self, nbytes: int) -> HostBlock:
        """Page-locked memory of exactly ``nbytes``: CuPy's, without its pool; else registered pages of our own."""
        with torch.inference_mode(False), torch.cuda.device(self.torch_device):
            if self._cupy is None:
                return _RegisteredBlock(nbytes)
            return _CupyBlock(self._cupy, nbytes)

    def host_register(self, tensor: torch.Tensor) -> None:
        """Through torch's CUDA runtime."""
        with torch.cuda.device(self.torch_device):
            _register(tensor)

    def host_unregister(self, tensor: torch.Tensor) -> None:
        """See the protocol; legal in any thread."""
        with _RelaxedCapture(), torch.cuda.device(self.torch_device):
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the copy engine can read ``tensor`` where it is."""
        return tensor.is_pinned()

    def is_resident(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is on this device already."""
        return tensor.device == self.torch_device

    def alloc(self, nbytes: int) -> torch.Tensor:
        """From the copy stream's pool of torch's allocator, the stream being current."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`alloc`."""
        like = self._like.get(dtype)
        if like is None:
            like = self._like[dtype] = torch.empty(0, dtype=dtype, device=self.torch_device)
        return like.new_empty_strided(shape, stride)  # half the time of a call that is told dtype and device

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Launch the copy."""
        if self._runtime is not None and not (self._several and stream.raw == 0):
            self._runtime.memcpyAsync(dst.data_ptr(), src.data_ptr(), src.numel(), _HOST_TO_DEVICE, stream.raw)
            return
        flat = torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        start = dst.storage_offset() * dst.dtype.itemsize
        flat.set_(dst.untyped_storage(), start, (src.numel(),), (1,))
        with torch.cuda.stream(stream.torch_stream):
            flat.copy_(src, non_blocking=True)

    def copy_small(self, tensor: torch.Tensor) -> torch.Tensor:
        """Through torch's own cache of page-locked memory, which is guarded by its own events (contract 6)."""
        pinned = tensor.pin_memory()
        if pinned.data_ptr() == tensor.data_ptr():  # contract 5: it is pinned already, and may be written again
            pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return pinned.to(self.torch_device, non_blocking=True)

    def copy_to_host(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Launch the copy."""
        if self._runtime is not None and not (self._several and stream.raw == 0):
            self._runtime.memcpyAsync(dst.data_ptr(), src.data_ptr(), dst.numel(), _DEVICE_TO_HOST, stream.raw)
            return
        flat = torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        start = src.storage_offset() * src.dtype.itemsize
        flat.set_(src.untyped_storage(), start, (dst.numel(),), (1,))
        with torch.cuda.stream(stream.torch_stream):
            dst.copy_(flat, non_blocking=True)

    # Kernels

    def before_kernels(self) -> None:
        """Kernels queue up by themselves."""

    def compile_kernels(self, source: str, names: tuple[str, ...]) -> Mapping[str, Kernel] | None:
        """Through CuPy's ``RawModule`` (NVRTC, cached on disk by CuPy); None, with one warning, where that fails."""
        if self._cupy is None:
            return None
        try:
            with torch.cuda.device(self.torch_device):
                self._runtime.setDevice(self.index)
                self._context = self._cupy.cuda.driver.ctxGetCurrent()
                module = self._cupy.RawModule(code=source)
                functions = {name: module.get_function(name).kernel for name in names}
        except Exception as error:  # noqa: BLE001 - NVRTC missing, or another error type of CuPy's
            warnings.warn(
                f"kernels for rows in host memory cannot be compiled ({type(error).__name__}: {error}); "
                "rows go through staging buffers, which is slower",
                PrefetchWarning,
                stacklevel=4,
            )
            return None
        return {name: partial(self._launch, function) for name, function in functions.items()}

    def _launch(self, function: Any, stream: Stream, blocks: int, threads: int, args: tuple[Any, ...]) -> None:
        """By the driver's call, which takes the stream as an argument: CuPy's own current stream is not touched."""
        # Of this call alone: the driver's call gives up the GIL, and another thread may launch the same kernel then.
        arguments = Arguments.of(args)
        launch = self._cupy.cuda.driver.launchKernel
        if self._is_current():
            launch(function.ptr, blocks, 1, 1, threads, 1, 1, 0, stream.raw, arguments.address, 0)
        else:
            with torch.cuda.device(self.torch_device):
                self._runtime.setDevice(self.index)  # the driver needs a context in this thread
                launch(function.ptr, blocks, 1, 1, threads, 1, 1, 0, stream.raw, arguments.address, 0)
        arguments.leave()  # it has copied them; of a launch that fails they are let go

    def _is_current(self) -> bool:
        """Whether the driver would launch in this device's context; anybody may change that at any time."""
        return bool(self._context) and self._cupy.cuda.driver.ctxGetCurrent() == self._context

    # Events

    def fill(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """On the current stream, so after all work queued there."""
        torch._foreach_copy_(targets, sources)

    def before_transform(self) -> None:
        """The transform's kernels queue up behind the copies by themselves."""

    def new_event(self) -> Event:
        """An event of our own; a thread that waits for it sleeps."""
        if self._cupy is None:
            return torch.cuda.Event(blocking=True)
        with torch.cuda.device(self.torch_device):
            return self._cupy.cuda.Event(block=True, disable_timing=True)

    def record(self, event: Event, stream: Stream) -> None:
        """See the protocol."""
        if self._runtime is None:
            event.record(stream.torch_stream)
        elif self._several and stream.raw == 0:
            # The default stream's handle means that of the *current* device.
            with torch.cuda.device(self.torch_device):
                self._runtime.eventRecord(event.ptr, 0)
        else:
            self._runtime.eventRecord(event.ptr, stream.raw)

    def wait(self, stream: Stream, event: Event) -> None:
        """See the protocol."""
        if self._runtime is None:
            stream.torch_stream.wait_event(event)
        elif self._several and stream.raw == 0:
            with torch.cuda.device(self.torch_device):
                self._runtime.streamWaitEvent(0, event.ptr)
        else:
            self._runtime.streamWaitEvent(stream.raw, event.ptr)

    def query(self, event: Event) -> bool:
        """See the protocol."""
        if self._runtime is None:
            return bool(event.query())
        return bool(self._runtime.eventQuery(event.ptr) == 0)

    def synchronize(self, event: Event) -> None:
        """See the protocol."""
        event.synchronize()

    def new_timing_event(self) -> Event:
        """As :meth:`new_event`, with a time stamp."""
        if self._cupy is None:
            return torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.device(self.torch_device):
            return self._cupy.cuda.Event(block=True, disable_timing=False)

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """See the protocol; both calls count in milliseconds."""
        if self._runtime is None:
            return float(start.elapsed_time(end)) / 1e3
        return float(self._runtime.eventElapsedTime(start.ptr, end.ptr)) / 1e3

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """An NVTX range, for Nsight Systems."""
        return _NvtxRange(name)

    def record_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        """torch's own ``record_stream``, so that its allocator keeps the block (contract 4)."""
        tensor.record_stream(stream.torch_stream)


class _OnStream:
    """``torch.cuda.stream`` without its cost: two calls in, two out, nothing left changed."""

    __slots__ = ("_device", "_index", "_stream", "_target")

    def __init__(self, index: int, stream: torch.cuda.Stream) -> None:
        self._index = index
        self._target = stream

    def __enter__(self) -> None:
        self._device = torch._C._cuda_getDevice()
        self._stream = torch._C._cuda_getCurrentStream(self._index)
        target = self._target
        torch._C._cuda_setStream(
            stream_id=target.stream_id, device_index=target.device_index, device_type=target.device_type
        )

    def __exit__(self, *_: object) -> None:
        stream_id, device_index, device_type = self._stream
        torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        if self._device != self._index:
            torch.cuda._maybe_exchange_device(self._device)


class _NvtxRange:
    """``torch.cuda.nvtx.range``, which would take the name for a format string."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *_: object) -> None:
        torch.cuda.nvtx.range_pop()


class _RelaxedCapture:
    """Takes the calling thread out of the rule that a global-mode capture elsewhere forbids queries and allocations.

    The mode belongs to the thread; the user's has its own back after. One object serves one block after the other.
    Source: CUDA driver API, ``cuThreadExchangeStreamCaptureMode``.
    """

    __slots__ = ("_mode", "_reference")

    def __init__(self) -> None:
        self._mode = ctypes.c_int()
        self._reference = ctypes.byref(self._mode)

    def __enter__(self) -> None:
        if _exchange is not None:
            self._mode.value = _CAPTURE_MODE_RELAXED
            _exchange(self._reference)  # and the mode before is in its place

    def __exit__(self, *_: object) -> None:
        if _exchange is not None:
            _exchange(self._reference)


class _CupyBlock:
    """``cudaHostAlloc`` through CuPy, past its pool: exact size, and the user's pool stays as it is."""

    __slots__ = ("_memory", "nbytes", "tensor")

    def __init__(self, cupy: Any, nbytes: int) -> None:
        try:
            self._memory = cupy.cuda.PinnedMemory(nbytes)
        except (cupy.cuda.runtime.CUDARuntimeError, MemoryError, OverflowError) as error:
            raise PinnedMemoryError(f"cudaHostAlloc of {nbytes} bytes: {error}") from error
        self.nbytes = nbytes
        buffer = (ctypes.c_uint8 * nbytes).from_address(self._memory.ptr)
        buffer.owner = self._memory  # type: ignore[attr-defined] # a view that outlives the block stays readable
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8)

    def free(self) -> None:
        """``cudaFreeHost``, when the last view is gone too: the caller has dropped them."""
        del self.tensor, self._memory


class _RegisteredBlock:
    """Shared anonymous pages, registered with torch's CUDA runtime: exact size, and a fork copies none of them."""

    __slots__ = ("_map", "nbytes", "tensor")

    def __init__(self, nbytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, nbytes)
        except (OSError, OverflowError, ValueError) as error:
            raise PinnedMemoryError(f"mmap of {nbytes} bytes: {error}") from error
        self.nbytes = nbytes
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        try:
            _register(self.tensor)
        except PinnedMemoryError:
            del self.tensor
            raise

    def free(self) -> None:
        """Unregister; the pages go with the last view."""
        torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        del self.tensor, self._map


def _register(tensor: torch.Tensor) -> None:
    """Page-lock the bytes of a flat ``uint8`` tensor."""
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), len(tensor), 0)
    if int(status):
        _clear_last_error()
        raise PinnedMemoryError(f"cudaHostRegister of {len(tensor)} bytes: CUDA error {int(status)}")


def _clear_last_error() -> None:
    """Take back the error that a refused registration leaves in the thread, so that the next call is clean."""
    major = (torch.version.cuda or "12").partition(".")[0]
    try:
        ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()
    except (OSError, AttributeError):
        with suppress(RuntimeError):  # this call reports the old error, and so takes it back
            torch.cuda._sleep(0)


def _find_exchange() -> Callable[[Any], int] | None:
    try:
        # PyDLL: it is over at once, and whoever gives up the GIL for it may wait for another thread to get it back.
        function: Callable[[Any], int] = ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # another platform: captures there are the user's to keep apart
        return None
    return function


_exchange = _find_exchange()


def cupy_status() -> str:
    """Which CuPy serves, or why none does."""
    cupy = _load_cupy(quiet=True)
    return f"CuPy {cupy.__version__}" if cupy is not None else _cupy_problem


_cupy_module: Any = None
_cupy_problem = ""


def _load_cupy(*, quiet: bool = False) -> Any:
    """CuPy, imported late and after torch; None with one warning where it does not fit."""
    global _cupy_module, _cupy_problem  # noqa: PLW0603 - one import per process, remembered with its outcome
    if _cupy_module is not None or _cupy_problem:
        return _cupy_module
    cuda = torch.version.cuda or "?"
    wheel = f"cupy-cuda{cuda.partition('.')[0]}x"
    try:
        import cupy

        if cupy.__version__ in _KNOWN_BAD_CUPY:
            raise ImportError(f"CuPy {cupy.__version__} is known to be broken")
        cupy.cuda.runtime.getDeviceCount()
    except ModuleNotFoundError:
        _cupy_problem = f"no CuPy: torch's calls are used, which cost more; for speed install {wheel}"
    except Exception as error:  # noqa: BLE001 - CuPy raises its own types when its libraries do not fit the driver
        _cupy_problem = (
            f"CuPy does not work here ({type(error).__name__}: {error}); torch {torch.__version__} is built for "
            f"CUDA {cuda}: install {wheel}. Going on with torch's own calls"
        )
        if not quiet:
            warnings.warn(_cupy_problem, PrefetchWarning, stacklevel=4)
    else:
        _cupy_module = cupy
    return _cupy_module
