"""A prefetcher that a framework takes for the loader it wraps, and what all integrations check beforehand."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from prefetchpipe.batch.search import find_tensors
from prefetchpipe.device import resolve
from prefetchpipe.device.base import Device, Stream
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.options import Options
from prefetchpipe.prefetcher import GPUPrefetcher

__all__ = ["StandIn", "is_served", "make_options", "warn_of_world_size"]

_OWN_ATTRIBUTES = frozenset(("_shared", "_passes", "_static", "_is_retired", "_hands_out_late"))
_OPTION_NAMES = tuple(f.name for f in dataclasses.fields(Options) if f.name not in ("depth", "static", "keep_arrays"))


class StandIn(GPUPrefetcher):
    """Stands where a framework expects the loader itself.

    Frameworks ask ``isinstance(loader, DataLoader)``, read its attributes and set some. Here ``isinstance`` agrees with
    the loader, and attributes are read from it and set on it. NumPy arrays in a batch stay arrays.

    Args:
        loader: What the framework would iterate over.
        device: Where the framework would move its batches.
        options: From :func:`make_options`.
        hands_out_late: Whether the framework takes a batch one step before it hands it out, to know which is the last.
    """

    def __init__(
        self, loader: Any, device: torch.device | Device, options: Options, *, hands_out_late: bool = False
    ) -> None:
        self._is_retired = False
        self._hands_out_late = hands_out_late
        self._setup(loader, resolve(device), options)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self) if "_shared" not in vars(self) else self._shared.loader.__class__

    @property
    def wrapped(self) -> Any:
        """The loader."""
        return self._shared.loader

    @property
    def is_retired(self) -> bool:
        """Whether :meth:`retire` was called."""
        return self._is_retired

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self._shared.loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        """Start a pass; once retired, one over the loader as it is."""
        if self._is_retired:
            self._shared.state = None
            return iter(self._shared.loader)
        batches = super().__iter__()
        device = self._shared.device
        return _HandedOutLate(batches, device) if self._hands_out_late and device.staged else batches

    def _state_dict(self) -> Any:
        return self.wrapped.state_dict() if self._is_retired and self._shared.state is None else super()._state_dict()

    def retire(self, *, keep_state: bool) -> None:
        """End every pass and step aside: batches are the loader's own from now on, on the host.

        Args:
            keep_state: Whether ``state_dict()`` goes on saying what it says now, until the next pass.
        """
        self.close()
        self._is_retired = True
        if not keep_state:
            self._shared.state = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return StandIn.__new__, (StandIn,), self.__getstate__()


class _HandedOutLate(Iterator[Any]):
    """For a framework that asks for the next batch, and then hands out the one before.

    That one was delivered to the stream of an earlier moment. If the consumer has changed streams since, the batch is
    delivered to the new one as well.
    """

    def __init__(self, batches: Iterator[Any], device: Device) -> None:
        self._batches = batches
        self._device = device
        self._batch: Any = None
        self._stream: Stream = None

    def __next__(self) -> Any:
        stream = self._device.current_stream()
        if self._stream is not None and stream is not self._stream:
            self._deliver_again(stream)
        self._batch = None
        self._batch = next(self._batches)
        self._stream = stream
        return self._batch

    def _deliver_again(self, stream: Stream) -> None:
        device = self._device
        delivered = device.new_event()
        device.record(delivered, self._stream)
        device.wait(stream, delivered)  # contract 3: the copy is behind this event, on the stream of that moment
        for tensor in find_tensors(self._batch):
            with suppress(RuntimeError, NotImplementedError, TypeError):  # a wrapper without memory of its own
                if device.is_resident(tensor):
                    device.record_use(tensor, stream)  # contract 4: this stream reads it, whatever allocated it


def make_options(depth: int, options: dict[str, Any]) -> Options:
    """Options for a :class:`StandIn`.

    Raises:
        TypeError: An option is unknown or has a wrong type.
        ValueError: An option has a value that is not allowed.
    """
    if options.pop("static", False):
        raise ValueError(
            "static must be False here: the framework holds a batch while it asks for the next one, and static=True "
            "would overwrite it"
        )
    for name in options:
        if name not in _OPTION_NAMES:
            raise TypeError(f"there is no option {name!r}; options are depth, {', '.join(_OPTION_NAMES)}")
    return Options(depth=depth, keep_arrays=True, **options)


def is_served(device: torch.device) -> bool:
    """Whether batches can be prefetched to ``device``."""
    return device.type in ("cpu", "cuda")


def warn_of_world_size(loader: Any, processes: int) -> None:
    """Say so if the loader brings a sampler that was made for another number of processes."""
    places = (loader, getattr(loader, "batch_sampler", None))
    samplers = [getattr(place, "sampler", None) for place in places]
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas != processes:
            warnings.warn(
                f"the loader's DistributedSampler was made for num_replicas={sampler.num_replicas}, but its batches go "
                f"to {processes} process(es): pass the DataLoader without it, or "
                f"DistributedSampler(dataset, num_replicas={processes}, rank=...)",
                PrefetchWarning,
                stacklevel=4,
            )
            return
