"""Which step a loop waits for, and the one change most likely to help: read off a snapshot of its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from prefetchpipe.stats import Stats

__all__ = ["Bottleneck", "Verdict", "judge", "size", "time"]

Bottleneck = Literal[
    "unknown",
    "none",
    "device",
    "loader",
    "uneven",
    "gil",
    "start",
    "packing",
    "transform",
    "link",
    "pinned",
    "memory",
    "tiny",
]
"""What a loop waits for.

``unknown``: too few batches. ``none``: it does not wait. ``device``: the device computes all the time. ``loader``:
``next(loader)``. ``uneven``: single late batches. ``gil``: the loader's Python keeps the loop from running.
``start``: what every pass begins with. ``packing``: into pinned memory. ``transform``: the host's part of it.
``link``: the copies. ``pinned``: page-locked memory was refused. ``memory``: the device is full. ``tiny``: so small
that handing a batch over is all there is.
"""

_FEWEST_BATCHES = 8
_HIDDEN_SHARE = 0.1
"""A loop that spends less of its time in ``next`` has nothing to gain that anybody would notice."""

_BUSY_SHARE = 0.7
"""A copy engine that is busy for this much of a loop that waits is what it waits for."""

_FEWEST_PASSES = 2
_FITTING_SHARE = 0.7
"""A producer's thread that is busy for less of the loop's time is fast enough on average, if the loop itself is busy
for longer."""

_START_SHARE = 0.5
_PAGEABLE_SHARE = 0.05
_HANDOVER_SHARE = 0.2
_FEWEST_PROBES = 3
_GIL_SECONDS = 1e-3
"""Who has the GIL may keep it for 5 ms at a time, which is ``sys.getswitchinterval()``; a thread that is woken while
nobody has it runs at once."""

_TINY_BYTES = 256 << 10
_TINY_SECONDS = 0.5e-3
_MANY_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bottleneck, and the sentence about it."""

    bottleneck: Bottleneck
    sentence: str


@dataclass(frozen=True, slots=True)
class _Batch:
    """Seconds an average batch takes, behind the warm-up."""

    step: float
    waiting: float
    fetch: float
    packing: float
    transform: float
    slot_wait: float
    device_wait: float
    handover: float
    copy: float
    nbytes: float


def judge(stats: Stats) -> Verdict:
    """The verdict on ``stats``."""
    count = stats.steady.taken_batches
    if count < _FEWEST_BATCHES or not stats.steady.sent_batches:
        return Verdict(
            "unknown",
            f"Too few batches to tell: {count} of at least {_FEWEST_BATCHES} behind the warm-up (the first of each "
            "pass and the first three of all); run more of them.",
        )
    batch = _average(stats)
    started = _start(stats)
    if started is not None:
        return started
    hogged = _gil(stats, batch)
    if hogged is not None:
        return hogged
    waiting = batch.waiting / batch.step if batch.step else 0.0
    if waiting < _HIDDEN_SHARE:
        return Verdict(
            "none",
            f"Model-bound: the loop works for {time(batch.step - batch.waiting)} a batch and waits for "
            f"{time(batch.waiting)} ({waiting:.0%}); loading and copying are hidden behind it, and only a faster step "
            "makes it faster.",
        )
    return _short_of_memory(stats, batch) or _overhead(batch) or _largest(stats, batch)


def _average(stats: Stats) -> _Batch:
    steady = stats.steady
    sent, taken = steady.sent_batches, steady.taken_batches
    copied = stats.copied_bytes / max(stats.batches, 1)
    return _Batch(
        step=(steady.next_seconds + steady.loop_seconds) / taken,
        waiting=steady.next_seconds / taken,
        fetch=steady.fetch_seconds / sent,
        packing=(steady.send_seconds - steady.transform_seconds - steady.slot_wait_seconds) / sent,
        transform=steady.transform_seconds / sent,
        slot_wait=steady.slot_wait_seconds / sent,
        device_wait=steady.device_wait_seconds / sent,
        handover=steady.handover_seconds / taken,
        copy=copied * stats.timed_seconds / stats.timed_bytes if stats.timed_bytes else 0.0,
        nbytes=copied,
    )


def _start(stats: Stats) -> Verdict | None:
    """Passes so short that beginning them takes longer than all the rest."""
    warm_up = stats.start_seconds + stats.next_seconds - stats.steady.next_seconds
    whole = stats.start_seconds + stats.next_seconds + stats.loop_seconds
    workers = 0 if stats.persistent_workers else stats.num_workers or 0
    if stats.passes < _FEWEST_PASSES or not workers or warm_up < _START_SHARE * whole:
        return None
    return Verdict(
        "start",
        f"Start-bound: beginning {stats.passes} passes took {time(warm_up)} of {time(whole)} in all, since "
        f"{_count(workers, 'worker')} are started anew for each; persistent_workers=True starts them once.",
    )


def _short_of_memory(stats: Stats, batch: _Batch) -> Verdict | None:
    if stats.pageable_bytes > _PAGEABLE_SHARE * stats.copied_bytes:
        share = stats.pageable_bytes / stats.copied_bytes
        need = 2 * stats.largest_batch_bytes
        limit = stats.pinned_limit_bytes
        change = (
            f"max_pinned_bytes={limit} has to be at least {need}"
            if limit is not None and limit < need
            else f"the system has to give {size(need)} (`ulimit -l`, the container's memory limit)"
        )
        return Verdict(
            "pinned",
            f"Short of page-locked memory: {share:.0%} of the bytes went the slow way through pageable memory, and the "
            f"loop waits {time(batch.waiting)} of each {time(batch.step)} step; {change}, two slots of the largest "
            "batch.",
        )
    if stats.depth < stats.depth_asked:
        return Verdict(
            "memory",
            f"Short of device memory: it held {stats.depth} of the {stats.depth_asked} batches asked for ahead (the "
            f"largest has {size(stats.largest_batch_bytes)}), and the loop waits {time(batch.waiting)} of each "
            f"{time(batch.step)} step; a smaller batch, or a step that holds less, leaves room for them.",
        )
    return None


def _gil(stats: Stats, batch: _Batch) -> Verdict | None:
    """The loader's Python, in this process, keeps the loop's thread from running: in ``next`` or in its own calls."""
    if stats.num_workers:
        return None  # its Python runs in other processes; a batch handed over late waited for a core
    other = max(batch.packing, batch.transform, batch.slot_wait, batch.device_wait)
    if batch.fetch > other and batch.handover > max(_GIL_SECONDS, _HANDOVER_SHARE * batch.waiting):
        what = (
            f"a finished batch lies ready for {time(batch.handover)} of each {time(batch.step)} step before the loop's "
            "thread gets to run, because the loader's own Python holds the GIL"
        )
    elif batch.fetch > other and stats.gil_probes >= _FEWEST_PROBES and 4 * stats.gil_waits > stats.gil_probes:
        what = (
            f"the loop works for {time(batch.step - batch.waiting)} a batch, but whenever it lets go of the GIL the "
            f"loader's Python keeps it for {time(stats.gil_wait_seconds / stats.gil_waits)}"
        )
    else:
        return None
    return Verdict("gil", f"GIL-bound: {what}; {_elsewhere(stats)}.")


def _overhead(batch: _Batch) -> Verdict | None:
    costs = batch.fetch + batch.device_wait + batch.slot_wait + batch.transform
    if batch.nbytes <= _TINY_BYTES and batch.waiting < _TINY_SECONDS and costs < batch.waiting / 2:
        return Verdict(
            "tiny",
            f"Tiny batches: {size(batch.nbytes)} each, and handing one over takes {time(batch.waiting)} of each "
            f"{time(batch.step)} step, whatever its size; a larger batch_size spreads that over more samples.",
        )
    return None


def _largest(stats: Stats, batch: _Batch) -> Verdict:
    """What the loop waits for is what takes longest a batch."""
    waits = f"the loop waits {time(batch.waiting)} of each {time(batch.step)} step, {batch.waiting / batch.step:.0%}"
    if batch.copy > _BUSY_SHARE * batch.step or batch.slot_wait >= max(
        batch.fetch, batch.packing, batch.transform, batch.device_wait
    ):
        return _link(stats, batch, waits)
    costs: dict[Bottleneck, float] = {
        "loader": batch.fetch,
        "packing": batch.packing,
        "transform": batch.transform,
        "device": batch.device_wait,
    }
    busy = sum(costs.values()) + batch.slot_wait
    if stats.path == "thread" and busy < min(_FITTING_SHARE * batch.step, batch.step - batch.waiting):
        return Verdict(
            "uneven",
            f"Uneven: loading and packing take {time(busy)} a batch on average, which fits behind the loop's work, but "
            f"some batches come late ({waits}); a larger depth (now {stats.depth}) evens that out.",
        )
    largest = max(costs, key=costs.__getitem__)
    if largest == "loader":
        return Verdict(
            "loader",
            f"Loader-bound: next(loader) takes {time(batch.fetch)} a batch ({waits}); {_faster_loader(stats)}.",
        )
    if largest == "packing":
        return Verdict("packing", _packing(stats, batch, waits))
    if largest == "transform":
        return Verdict(
            "transform",
            f"Transform-bound: calling the transform takes the host {time(batch.transform)} a batch ({waits}); make it "
            "fewer and larger device operations (torch.compile can fuse them).",
        )
    return Verdict(
        "device",
        f"Model-bound on the device: it is still busy with earlier batches for {time(batch.device_wait)} of each "
        f"{time(batch.step)} step when a new one could be sent; nothing is to be gained before the device, and only a "
        "faster step makes it faster.",
    )


def _link(stats: Stats, batch: _Batch, waits: str) -> Verdict:
    limit = stats.limit_gb_per_second
    rate = stats.copy_gb_per_second
    took = (
        f"copying {size(batch.nbytes)} takes {time(batch.copy)} a batch"
        if batch.copy
        else (f"the copy of an earlier batch is waited for, {time(batch.slot_wait)} a batch")
    )
    at = "" if rate is None else f" at {rate:.3g} GB/s"
    if limit is not None:
        at += f", of {limit:.3g} GB/s measured"
    return Verdict(
        "link",
        f"Copy-bound: {took}{at} ({waits}); send fewer bytes: uint8 or a 16-bit type, made float in transform= on the "
        "device.",
    )


def _packing(stats: Stats, batch: _Batch, waits: str) -> str:
    took = f"Packing-bound: packing and launching {size(batch.nbytes)} takes {time(batch.packing)} a batch"
    if batch.packing:
        took += f", {batch.nbytes / batch.packing / 1e9:.3g} GB/s"
    if stats.limits is not None:
        took += f" of {stats.limits.packing_gb_per_second:.3g} GB/s measured"
    if batch.nbytes <= _TINY_BYTES:
        change = "a larger batch_size, or fewer tensors in a batch, spreads what each of them costs"
    elif stats.num_workers and stats.num_workers >= stats.usable_cores > 1:
        change = (
            f"{_count(stats.num_workers, 'worker')} and the packing threads want the same "
            f"{_count(stats.usable_cores, 'core')}: num_workers={stats.usable_cores - 1} leaves one for packing"
        )
    elif stats.copy_threads < stats.usable_cores:
        change = f"copy_threads={stats.usable_cores} (now {stats.copy_threads}) packs with all usable cores"
    elif stats.device == "cpu":
        change = f"{_count(stats.usable_cores, 'usable core')} pack already: load fewer bytes (uint8 or a 16-bit type)"
    else:
        change = (
            f"{_count(stats.usable_cores, 'usable core')} pack already: send fewer bytes (uint8 or a 16-bit type, made "
            "float in transform= on the device)"
        )
    return f"{took} ({waits}); {change}."


def _faster_loader(stats: Stats) -> str:
    """The one change for a loader that is too slow."""
    workers, cores = stats.num_workers, stats.usable_cores
    if workers and workers < cores:
        change = f"raise num_workers from {workers}: this process may use {_count(cores, 'core')}"
        return (
            change
            if stats.workers == "shared" or workers < _MANY_WORKERS
            else f"{change} (batches come the {stats.workers} way)"
        )
    if workers:
        has = "has" if workers == 1 else "have"
        return (
            f"its {_count(workers, 'worker')} {has} {_count(cores, 'core')} already: do less for each sample (decode "
            "once and cache, smaller images, augmentation on the device in transform=)"
        )
    if stats.path == "caller" and "fetch='thread'" in stats.path_reason:
        return f"nothing is loaded ahead, because {stats.path_reason}"
    return _elsewhere(stats)


def _elsewhere(stats: Stats) -> str:
    count = max(1, min(stats.usable_cores, _MANY_WORKERS))
    if stats.num_workers is None:
        return f"a torch DataLoader with num_workers={count} around its data set loads in other processes"
    return f"num_workers={count} (now {stats.num_workers}) loads in other processes"


def time(seconds: float) -> str:
    """For people: ``12.3 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def size(nbytes: float) -> str:
    """For people: ``38.5 MB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
