"""``stats()``: a frozen snapshot of what a prefetcher has done, and what it says about where the time goes.

Counting is always on and costs a prefetcher a few clock readings a batch (:mod:`prefetchpipe.counters`). Taking a
snapshot measures nothing; the limits of the machine are measured by :func:`measure_limits` when somebody calls it, and
every later snapshot for that device shows them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self

from prefetchpipe import report, verdict
from prefetchpipe.counters import Steady
from prefetchpipe.limits import Limits, known_limits, measure_limits
from prefetchpipe.verdict import Bottleneck

__all__ = ["Bottleneck", "Limits", "Stats", "Steady", "known_limits", "measure_limits"]

_NOW = (
    "device",
    "loader",
    "num_workers",
    "persistent_workers",
    "workers",
    "workers_reason",
    "largest_batch_bytes",
    "pinned_bytes",
    "pinned_limit_bytes",
    "device_bytes",
    "peak_device_bytes",
    "depth",
    "depth_asked",
    "depth_reached",
    "copy_threads",
    "usable_cores",
    "path",
    "path_reason",
    "limits",
)
"""Fields that say how things are; all others are sums, of which :meth:`Stats.since` takes the difference."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Stats:
    """What a prefetcher has done so far, over all its passes.

    Example:
        >>> from prefetchpipe import GPUPrefetcher
        >>> loader = GPUPrefetcher([1, 2, 3], device="cpu")
        >>> sum(loader)
        6
        >>> loader.stats().batches
        3
        >>> loader.stats().bottleneck
        'unknown'
    """

    device: str
    loader: str = ""
    """Type of the loader."""
    num_workers: int | None = None
    """Worker processes of the loader; None: it is not a DataLoader."""
    persistent_workers: bool = False
    """Whether they outlive a pass."""
    workers: str = "none"
    """How batches come from worker processes: ``none`` (there are none), ``plain`` (torch's own queue), ``shared``
    (through pinned shared memory)."""
    workers_reason: str = ""
    """Why."""
    passes: int = 0
    """Passes begun."""
    batches: int
    """Batches handed to the consumer."""
    copied_bytes: int
    """Bytes copied to the device (on the CPU: into memory of the batch's own)."""
    staged_bytes: int
    """Bytes of these that went through a pinned slot."""
    direct_bytes: int
    """Bytes of these that were copied from where they were: the loader's batch was pinned already."""
    shared_bytes: int
    """Bytes of these that were copied out of the memory that worker processes had packed them into."""
    pageable_bytes: int
    """Bytes of these copied from pageable memory, because pinned memory was refused."""
    largest_batch_bytes: int = 0
    """Most bytes copied for one batch."""
    pinned_bytes: int
    """Page-locked bytes held now."""
    pinned_allocations: int
    """Page-locked allocations made so far; constant after warm-up."""
    pinned_limit_bytes: int | None = None
    """``max_pinned_bytes``."""
    device_bytes: int = 0
    """Bytes on the device that belong to batches not taken yet, now."""
    peak_device_bytes: int = 0
    """Most of these at one time."""
    start_seconds: float = 0.0
    """Time spent in ``iter(loader)``, which starts worker processes."""
    fetch_seconds: float
    """Time spent in ``next(loader)``."""
    send_seconds: float
    """Time spent packing, launching copies and in the transform's launches."""
    transform_seconds: float = 0.0
    """Of ``send_seconds``: in the transform (the host's time; its kernels run later)."""
    slot_wait_seconds: float = 0.0
    """Of ``send_seconds``: waiting for a pinned slot, or the loader's pinned memory, whose copy was still running."""
    device_wait_seconds: float = 0.0
    """Time in which nothing was fetched, because the device was still busy with an earlier batch."""
    stall_seconds: float
    """Time the consumer's thread waited for a batch from the producer's thread."""
    handover_seconds: float = 0.0
    """Of ``stall_seconds``: the batch was there, and the consumer's thread did not get to run (the GIL, or no core)."""
    next_seconds: float = 0.0
    """Time the consumer spent in ``next(prefetcher)``, for whatever reason."""
    loop_seconds: float = 0.0
    """Time the consumer spent in its own code, between two calls of ``next(prefetcher)``."""
    gil_probes: int = 0
    """Times it was looked whether the consumer's thread has to wait for the GIL, while a slow loader runs beside it."""
    gil_waits: int = 0
    """Times that it had to, for more than a millisecond."""
    gil_wait_seconds: float = 0.0
    """Sum of these waits."""
    timed_copies: int = 0
    """Copies measured on the device; a sample of all."""
    timed_bytes: int = 0
    """Bytes of these."""
    timed_seconds: float = 0.0
    """What these took on the device."""
    depth: int
    """Batches copied ahead now; less than asked for when device memory is short."""
    depth_asked: int = 0
    """``depth`` as asked for."""
    depth_reached: int = 0
    """Most batches that were sent and not taken at one time."""
    copy_threads: int = 0
    """Threads used for packing."""
    usable_cores: int = 0
    """Cores that this process may use."""
    path: str
    """``thread``: a producer thread fetches. ``caller``: the consumer's thread does, inside ``next``. Before the first
    batch: ``not started``."""
    path_reason: str
    """Why this path was taken, and what would change it."""
    limits: Limits | None = None
    """What the machine can do, if :func:`measure_limits` was called for this device."""
    steady: Steady = field(default_factory=Steady)
    """Times of the batches behind the warm-up; what the verdict looks at."""

    # Derived

    @property
    def loader_seconds(self) -> float:
        """``fetch_seconds``."""
        return self.fetch_seconds

    @property
    def packing_seconds(self) -> float:
        """Time spent taking batches apart, packing them and launching their copies; without waits and transform."""
        return max(0.0, self.send_seconds - self.transform_seconds - self.slot_wait_seconds)

    @property
    def copy_seconds(self) -> float | None:
        """Time that the copies took on the device: estimated from those measured, None without any."""
        return None if not self.timed_bytes else self.timed_seconds * self.copied_bytes / self.timed_bytes

    @property
    def copy_gb_per_second(self) -> float | None:
        """GB/s of the link while a copy ran; None if none was measured."""
        return self.timed_bytes / self.timed_seconds / 1e9 if self.timed_seconds else None

    @property
    def achieved_gb_per_second(self) -> float | None:
        """GB/s that arrived, over the whole time of the loop; None before the second batch."""
        seconds = self.next_seconds + self.loop_seconds
        return self.copied_bytes / seconds / 1e9 if seconds else None

    @property
    def limit_gb_per_second(self) -> float | None:
        """GB/s that the link was measured to reach; None if it was not, or there is none (the CPU)."""
        return None if self.limits is None else self.limits.host_to_device_gb_per_second

    @property
    def bottleneck(self) -> Bottleneck:
        """What :attr:`verdict` names, as one word."""
        return verdict.judge(self).bottleneck

    @property
    def verdict(self) -> str:
        """One sentence: what the loop waits for, in numbers, and the one change most likely to help."""
        return verdict.judge(self).sentence

    # Differences, and other formats

    def since(self, earlier: Self) -> Self:
        """What was done after ``earlier``, a snapshot of the same prefetcher: for figures of one epoch.

        Example:
            >>> from prefetchpipe import GPUPrefetcher
            >>> loader = GPUPrefetcher([1, 2, 3], device="cpu")
            >>> first = sum(loader), loader.stats()
            >>> second = sum(loader), loader.stats()
            >>> second[1].since(first[1]).batches
            3
        """
        changes: dict[str, object] = {
            entry.name: getattr(self, entry.name) - getattr(earlier, entry.name)
            for entry in dataclasses.fields(self)
            if entry.name not in _NOW and entry.name != "steady"
        }
        steady = {
            entry.name: getattr(self.steady, entry.name) - getattr(earlier.steady, entry.name)
            for entry in dataclasses.fields(Steady)
        }
        return dataclasses.replace(self, steady=Steady(**steady), **changes)  # type: ignore[arg-type]

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """Every number as a float, for any logger: Lightning's ``self.log_dict``, TensorBoard, a CSV file.

        Args:
            prefix: Put in front of each name, such as ``"prefetch/"``.

        Returns:
            Names with their units, such as ``prefetch/stall_seconds``. What is not known is left out.

        Example:
            >>> from prefetchpipe import GPUPrefetcher
            >>> GPUPrefetcher([1, 2, 3], device="cpu").stats().as_dict("prefetch/")["prefetch/batches"]
            0.0
        """
        names = [entry.name for entry in dataclasses.fields(self)]
        names += ["packing_seconds", "copy_seconds", "copy_gb_per_second", "achieved_gb_per_second"]
        names += ["limit_gb_per_second", "waiting_percent"]
        values = ((name, getattr(self, name)) for name in names)
        return {prefix + name: float(value) for name, value in values if isinstance(value, (int, float))}

    @property
    def waiting_percent(self) -> float | None:
        """Share of the steady loop's time that was spent in ``next(prefetcher)``; None before there was any."""
        seconds = self.steady.next_seconds + self.steady.loop_seconds
        return 100 * self.steady.next_seconds / seconds if seconds else None

    def postfix(self) -> dict[str, str]:
        """A few short values for ``tqdm.set_postfix``.

        Example:
            >>> from prefetchpipe import GPUPrefetcher
            >>> GPUPrefetcher([1, 2, 3], device="cpu").stats().postfix()
            {'wait': '-', 'GB/s': '-', 'bound': 'unknown'}
        """
        rate, waiting = self.achieved_gb_per_second, self.waiting_percent
        return {
            "wait": "-" if waiting is None else f"{waiting:.0f}%",
            "GB/s": "-" if rate is None else f"{rate:.2f}",
            "bound": self.bottleneck,
        }

    def __repr__(self) -> str:
        return report.line(self)

    def __str__(self) -> str:
        return report.text(self)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return report.html(self)
