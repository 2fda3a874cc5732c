"""A device that makes every ordering mistake visible as a wrong value, on a laptop.

Streams run in order and *late*: an operation takes effect at its simulated completion, and simulated time moves only
when the host waits for something (and by a small random step at each call, so that seeds give different schedules).
A copy reads its source when it completes, a freed block is poisoned and handed out again at once, freed host memory is
poisoned too. What changes under an operation between its start and its completion reaches it as poison: hardware may
read early or late, and right code cannot tell. A missing wait, an event checked too early or a reference dropped too
soon then gives wrong numbers.
"""

from __future__ import annotations

import ctypes
import heapq
import random
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from prefetchpipe.device.base import Kernel
from prefetchpipe.errors import PinnedMemoryError

__all__ = ["SimulatedDevice", "SimulatedStream"]

POISON = 0xAB
_HOST_CALL_SECONDS = 1e-6
_FREE_BLOCKS = 64


class SimulatedStream:
    """An in-order queue of operations; ``tail`` is the simulated second at which the last one completes."""

    __slots__ = ("name", "tail")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tail = 0.0

    def __repr__(self) -> str:
        return f"<SimulatedStream {self.name}>"


class _Event:
    """Passed from the second ``at`` on; its time stamp is the second at which the device came to it."""

    __slots__ = ("at", "stamp")

    def __init__(self) -> None:
        self.at = 0.0
        self.stamp = 0.0


class _Current:
    """A class, since a generator's context manager would touch the exceptions that pass through."""

    __slots__ = ("_before", "_local", "_stream")

    def __init__(self, local: threading.local, default: SimulatedStream, stream: SimulatedStream) -> None:
        self._local = local
        self._before = getattr(local, "stream", default)
        self._stream = stream

    def __enter__(self) -> None:
        self._local.stream = self._stream

    def __exit__(self, *_: object) -> None:
        self._local.stream = self._before


class _Block:
    """A piece of device memory. The bytes stay readable for ever: a stale pointer reads poison, not a crash."""

    __slots__ = ("bytes", "nbytes", "owner", "users")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = bytearray(nbytes)
        self.owner: SimulatedStream | None = None
        self.users: set[SimulatedStream] = set()


class _HostBlock:
    """Simulated page-locked memory."""

    __slots__ = ("_device", "nbytes", "tensor")

    def __init__(self, device: SimulatedDevice, nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def free(self) -> None:
        """Poison: a copy that is still under way carries it to the device."""
        self._device._free_host(self)  # noqa: SLF001 - the other half of this class


class SimulatedDevice:
    """A simulated GPU, to be passed as ``device=`` to a prefetcher.

    Batches hold plain CPU tensors over simulated device memory: poison at first, the right values once the copy has
    completed, which is certain after :meth:`synchronize`. Methods may be called from any thread.

    Args:
        seed: Seeds the schedule: how far simulated time moves at each call.
        bandwidth: Bytes a second of the copy engine.
        memory_limit: Device bytes; beyond them an allocation raises ``torch.OutOfMemoryError``. None: no limit.
        pinned_limit: Page-locked bytes; beyond them they are refused. None: no limit.

    Attributes:
        allocated_bytes: Device bytes held by live tensors.
        pinned_bytes: Page-locked bytes held.
        pinned_allocations: Page-locked allocations made so far.
        copies: Host-to-device copies launched so far.
        copies_back: Device-to-host copies launched so far.
        late_writes: Page-locked blocks that were freed while a copy back to them was under way.
        now: Simulated time in seconds.

    Example:
        >>> from prefetchpipe import GPUPrefetcher
        >>> device = SimulatedDevice()
        >>> batches = list(GPUPrefetcher([torch.full((2,), float(i)) for i in range(3)], device=device))
        >>> device.synchronize()
        >>> [batch.tolist() for batch in batches]
        [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    """

    torch_device = torch.device("cpu")
    staged = True
    host_memory = True

    def __init__(
        self,
        *,
        seed: int = 0,
        bandwidth: float = 25e9,
        memory_limit: int | None = None,
        pinned_limit: int | None = None,
    ) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a schedule, not a secret
        self._bandwidth = bandwidth
        self._memory_limit = memory_limit
        self._pinned_limit = pinned_limit
        self._lock = threading.RLock()  # guards all state: the producer, the consumer and finalizers call in
        self._current = threading.local()
        self._pending: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0
        self._free: list[_Block] = []
        self._waiting: list[tuple[_Block, float]] = []
        self._freed: list[tuple[_Block, float]] = []  # appended to by finalizers, inside any call of any thread
        self._leases: dict[int, _Block] = {}
        self._pinned: list[tuple[int, int]] = []
        self.default_stream = SimulatedStream("default")
        self.copy_stream = SimulatedStream("copy")
        self.d2h_stream = SimulatedStream("copy back")  # an engine of its own: both directions overlap
        self.now = 0.0
        self.allocated_bytes = 0
        self.pinned_bytes = 0
        self.pinned_allocations = 0
        self.copies = 0
        self.copies_back = 0
        self.late_writes = 0
        self._landing: list[int] = []

    def __repr__(self) -> str:
        return "simulated"

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedDevice:
        return self  # a device is a place, not a value

    # What a test does

    def synchronize(self, event: _Event | None = None) -> None:
        """Let everything queued complete (or all up to ``event``); leaves of batches read as plain CPU tensors then."""
        with self._lock:
            self._reclaim()
            self._advance(max([self.now, *(op[0] for op in self._pending)]) if event is None else event.at)

    def pass_time(self, seconds: float) -> None:
        """Let simulated time pass, as it does while the host is busy with something else: what is due completes."""
        with self._lock:
            self._reclaim()
            self._advance(self.now + seconds)

    def new_stream(self) -> SimulatedStream:
        """A further stream."""
        return SimulatedStream(f"stream {self._random.getrandbits(32):08x}")

    def use_stream(self, stream: SimulatedStream) -> AbstractContextManager[None]:
        """Make ``stream`` current in the calling thread for a ``with`` block."""
        return _Current(self._current, self.default_stream, stream)

    def launch(self, fn: Callable[..., object], *tensors: torch.Tensor, seconds: float = 0.0) -> None:
        """Queue a kernel on the current stream.

        Args:
            fn: Called at the simulated completion with views of the same memory as ``tensors``; with poison in the
                place of one whose bytes changed after the kernel had started.
            tensors: Kernel arguments. Like a real kernel's, they are addresses: they keep nothing alive.
            seconds: Simulated duration.
        """
        views = [_raw_view(tensor) for tensor in tensors]
        memory = [self._block_of(tensor) or tensor.untyped_storage() for tensor in tensors]
        at_start: list[torch.Tensor] = []
        in_inference = torch.is_inference_mode_enabled()  # a kernel knows no modes: it may write what was made in one

        def begin() -> None:
            at_start.extend(_bytes_of(view).clone() for view in views)

        def run() -> None:
            pairs = zip(views, at_start, strict=True)
            with torch.inference_mode(in_inference):
                fn(*(view if torch.equal(_bytes_of(view), was) else _poison_like(view) for view, was in pairs))
            memory.clear()  # held until now: a stale address reads poison, it does not crash

        self._enqueue(self.current_stream(), seconds, begin, run)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` that counts as page-locked."""
        pinned = tensor.clone()
        start = pinned.untyped_storage().data_ptr()
        span = (start, start + pinned.untyped_storage().nbytes())
        with self._lock:
            self._pinned.append(span)
        weakref.finalize(pinned, self._pinned.remove, span).atexit = False
        return pinned

    # The protocol

    def bind_thread(self) -> None:
        """The copy stream becomes current."""
        self._current.stream = self.copy_stream

    def on_copy_stream(self) -> AbstractContextManager[None]:
        """The copy stream becomes current for a block."""
        return self.use_stream(self.copy_stream)

    def on_stream(self, stream: SimulatedStream) -> AbstractContextManager[None]:
        """As :meth:`use_stream`."""
        return self.use_stream(stream)

    def beside_captures(self) -> AbstractContextManager[None]:
        """No graphs are captured here."""
        return nullcontext()

    def current_stream(self) -> SimulatedStream:
        """The stream current in the calling thread."""
        stream: SimulatedStream = getattr(self._current, "stream", self.default_stream)
        return stream

    def generators(self) -> tuple[torch.Generator, ...]:
        """None."""
        return ()

    def host_alloc(self, nbytes: int) -> _HostBlock:
        """Page-locked memory, refused beyond ``pinned_limit``."""
        with self._lock:
            if self._pinned_limit is not None and self.pinned_bytes + nbytes > self._pinned_limit:
                raise PinnedMemoryError(f"{nbytes} bytes: the simulated limit is {self._pinned_limit}")
            with torch.inference_mode(False):
                block = _HostBlock(self, nbytes)
            self.pinned_bytes += nbytes
            self.pinned_allocations += 1
            return block

    def _free_host(self, block: _HostBlock) -> None:
        with self._lock:
            start = block.tensor.data_ptr()
            self.late_writes += any(start <= target < start + block.nbytes for target in self._landing)
            block.tensor.fill_(POISON)
            self.pinned_bytes -= block.nbytes

    def host_register(self, tensor: torch.Tensor) -> None:
        """Counts as page-locked from here on; refused beyond ``pinned_limit``."""
        with self._lock:
            if self._pinned_limit is not None and self.pinned_bytes + len(tensor) > self._pinned_limit:
                raise PinnedMemoryError(f"{len(tensor)} bytes: the simulated limit is {self._pinned_limit}")
            self._pinned.append(_span_of(tensor))
            self.pinned_bytes += len(tensor)
            self.pinned_allocations += 1

    def host_unregister(self, tensor: torch.Tensor) -> None:
        """Poison, as for host memory that is freed: a copy that is still under way carries it to the device."""
        with self._lock:
            tensor.fill_(POISON)
            self._pinned.remove(_span_of(tensor))
            self.pinned_bytes -= len(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` came from :meth:`pin_memory`."""
        pointer = tensor.data_ptr()
        return any(start <= pointer < end for start, end in self._pinned)

    def is_resident(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in simulated device memory."""
        try:
            return tensor.is_cpu and tensor.layout is torch.strided and self._block_of(tensor) is not None
        except (RuntimeError, NotImplementedError, TypeError):
            return False  # a wrapper without memory of its own

    def alloc(self, nbytes: int) -> torch.Tensor:
        """A poisoned block, the latest freed of this size if there is one, ordered by the current stream."""
        with self._lock:
            self._tick()
            if self._memory_limit is not None and self.allocated_bytes + nbytes > self._memory_limit:
                raise torch.OutOfMemoryError(
                    f"simulated: {nbytes} bytes more than the {self.allocated_bytes} in use of {self._memory_limit}"
                )
            stream = self.current_stream()
            fitting = [b for b in self._free if b.nbytes == nbytes and b.owner is stream]  # one pool a stream
            if fitting:
                block = fitting[-1]
                self._free.remove(block)
            else:
                block = _Block(nbytes)
                _fill(block)
            block.owner = stream
            block.users = set()
            if nbytes:
                self.allocated_bytes += nbytes
            return self._lease(block)

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`alloc`."""
        nbytes = shape.numel() * dtype.itemsize
        view = torch.empty(0, dtype=dtype, device="cpu")
        return view.set_(self.alloc(nbytes).untyped_storage(), 0, shape, stride)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: SimulatedStream) -> None:
        """Launch a copy. It reads ``src`` when it completes; freed or written to by then, it arrives as poison."""
        target, source, nbytes = dst.data_ptr(), src.data_ptr(), src.numel()
        memory = [self._block_of(dst)]
        at_launch = ctypes.string_at(source, nbytes)
        reference = StorageWeakRef(src.untyped_storage())

        def begin() -> None:
            ctypes.memset(target, POISON, nbytes)

        def run() -> None:
            held: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # noqa: SLF001 - None if it has gone
            if held is not None and ctypes.string_at(source, nbytes) == at_launch:
                ctypes.memmove(target, at_launch, nbytes)
            else:
                ctypes.memset(target, POISON, nbytes)
            memory.clear()

        self.copies += 1
        self._enqueue(stream, nbytes / self._bandwidth, begin, run)

    def copy_small(self, tensor: torch.Tensor) -> torch.Tensor:
        """See the protocol; refused beyond ``pinned_limit``, which counts what is held for longer."""
        if self._pinned_limit is not None and self.pinned_bytes + tensor.nbytes > self._pinned_limit:
            raise PinnedMemoryError(f"{tensor.nbytes} bytes: the simulated limit is {self._pinned_limit}")
        stream = self.current_stream()
        arrived = self.empty(tensor.shape, tensor.stride(), tensor.dtype)
        held = [_bytes_of(tensor).clone()]
        self.copy(arrived, held[0], stream)
        self._enqueue(stream, 0.0, lambda: None, held.clear)
        return arrived

    def copy_to_host(self, dst: torch.Tensor, src: torch.Tensor, stream: SimulatedStream) -> None:
        """Launch a copy. ``dst`` reads as poison until it completes; ``src`` must not change from start to end."""
        target, source, nbytes = dst.data_ptr(), src.data_ptr(), dst.numel()
        memory: list[Any] = [
            dst,
            self._block_of(src) or src.untyped_storage(),
        ]  # a late write must not hit memory of somebody else's
        at_start: list[bytes] = []

        def begin() -> None:
            ctypes.memset(target, POISON, nbytes)
            at_start.append(ctypes.string_at(source, nbytes))

        def run() -> None:
            if ctypes.string_at(source, nbytes) == at_start[0]:
                ctypes.memmove(target, at_start[0], nbytes)
            self._landing.remove(target)
            memory.clear()

        self.copies_back += 1
        with self._lock:
            self._landing.append(target)
            self._enqueue(stream, nbytes / self._bandwidth, begin, run)

    def before_kernels(self) -> None:
        """torch calls run at once here, so what is queued before them on the current stream completes first."""
        self.synchronize(_tail_of(self.current_stream()))

    def compile_kernels(self, source: str, names: tuple[str, ...]) -> Mapping[str, Kernel] | None:
        """None: rows go through staging buffers."""
        return None

    def fill(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queued on the current stream: takes effect late, as on a GPU."""
        for target, source in zip(targets, sources, strict=True):
            self.launch(lambda to, of: to.copy_(of), target, source)

    def before_transform(self) -> None:
        """A transform's torch calls run at once here, so the copies before it complete first."""
        self.synchronize(_tail_of(self.copy_stream))

    def new_event(self) -> _Event:
        """An event that has passed."""
        return _Event()

    def record(self, event: _Event, stream: SimulatedStream) -> None:
        """At the tail of ``stream``."""
        with self._lock:
            self._tick()
            event.at = stream.tail
            event.stamp = max(stream.tail, self.now)

    def wait(self, stream: SimulatedStream, event: _Event) -> None:
        """Later work on ``stream`` starts after ``event``."""
        with self._lock:
            self._tick()
            stream.tail = max(stream.tail, event.at)

    def query(self, event: _Event) -> bool:
        """Whether simulated time has reached ``event``."""
        with self._lock:
            self._tick()
            return event.at <= self.now

    def new_timing_event(self) -> _Event:
        """Every event has a time stamp here."""
        return _Event()

    def elapsed_seconds(self, start: _Event, end: _Event) -> float:
        """Simulated seconds; an event that has not passed is an error, as on hardware."""
        with self._lock:
            if max(start.at, end.at) > self.now:
                raise RuntimeError("simulated: an event that has not passed has no time yet")
            return end.stamp - start.stamp

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """No profiler of its own."""
        return nullcontext()

    def record_use(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """Keep the block of ``tensor``, once freed, until the work queued on ``stream`` by then has passed."""
        block = self._block_of(tensor)
        with self._lock:
            if block is not None and stream is not block.owner:
                block.users.add(stream)

    # Inside

    def _enqueue(
        self, stream: SimulatedStream, seconds: float, begin: Callable[[], None], run: Callable[[], None]
    ) -> None:
        with self._lock:
            self._tick()
            start = max(stream.tail, self.now)
            stream.tail = start + seconds
            for at, step in ((start, begin), (stream.tail, run)):
                self._order += 1
                heapq.heappush(self._pending, (at, self._order, step))

    def _tick(self) -> None:
        self._reclaim()
        self._advance(self.now + self._random.random() * _HOST_CALL_SECONDS)

    def _advance(self, to: float) -> None:
        while self._pending and self._pending[0][0] <= to:
            at, _, run = heapq.heappop(self._pending)
            self.now = max(self.now, at)
            run()
        self.now = max(self.now, to)

    def _lease(self, block: _Block) -> torch.Tensor:
        if not block.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # The buffer stands for the allocation: it goes when the last tensor over it goes, and the block is free then.
        buffer = (ctypes.c_uint8 * block.nbytes).from_buffer(block.bytes)
        self._leases[ctypes.addressof(buffer)] = block
        weakref.finalize(buffer, _free, block, self._freed).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _block_of(self, tensor: torch.Tensor) -> _Block | None:
        return self._leases.get(tensor.untyped_storage().data_ptr())

    def _reclaim(self) -> None:
        """Freed blocks: poisoned in the order of their stream, and ready again once every recorded use has passed."""
        self._advance(self.now)  # what completes at this very moment still finds its memory
        while self._freed:
            block, until = self._freed.pop()
            self.allocated_bytes -= block.nbytes
            del self._leases[_address(block)]
            if block.users:
                self._waiting.append((block, until))
            else:
                self._retire(block)
        for entry in [e for e in self._waiting if e[1] <= self.now]:
            self._waiting.remove(entry)
            self._retire(entry[0])
        del self._free[:-_FREE_BLOCKS]

    def _retire(self, block: _Block) -> None:
        """Back to the pool of its stream, whose earlier work may still use it."""
        assert block.owner is not None
        self._order += 1
        at = max(block.owner.tail, self.now)
        poison: Callable[[], object] = partial(_fill, block)
        heapq.heappush(self._pending, (at, self._order, poison))
        self._free.append(block)


def _free(block: _Block, freed: list[tuple[_Block, float]]) -> None:
    freed.append((block, max((stream.tail for stream in block.users), default=0.0)))


def _tail_of(stream: SimulatedStream) -> _Event:
    event = _Event()
    event.at = stream.tail
    return event


def _span_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + len(tensor)


def _fill(block: _Block) -> None:
    ctypes.memset(_address(block), POISON, block.nbytes)


def _address(block: _Block) -> int:
    return ctypes.addressof((ctypes.c_uint8 * block.nbytes).from_buffer(block.bytes))


def _raw_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same bytes that keeps them from nobody."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    buffer = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return view.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a dimension of one may keep an odd stride


def _poison_like(tensor: torch.Tensor) -> torch.Tensor:
    poison = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    _bytes_of(poison).fill_(POISON)
    return poison
