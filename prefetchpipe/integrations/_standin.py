"""A prefetcher that a framework takes for the loader it wraps, and what all integrations check beforehand."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from prefetchpipe.device import resolve
from prefetchpipe.device.base import Device
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.options import Options
from prefetchpipe.prefetcher import GPUPrefetcher

__all__ = ["StandIn", "is_served", "make_options", "warn_of_world_size"]

_OWN_ATTRIBUTES = frozenset(("_shared", "_passes", "_static", "_is_retired"))
_OPTION_NAMES = tuple(f.name for f in dataclasses.fields(Options) if f.name not in ("depth", "static", "keep_arrays"))


class StandIn(GPUPrefetcher):
    """Stands where a framework expects the loader itself.

    Frameworks ask ``isinstance(loader, DataLoader)``, read its attributes and set some. Here ``isinstance`` agrees with
    the loader, and attributes are read from it and set on it. NumPy arrays in a batch stay arrays.

    Args:
        loader: What the framework would iterate over.
        device: Where the framework would move its batches.
        options: From :func:`make_options`.
    """

    def __init__(self, loader: Any, device: torch.device | Device, options: Options) -> None:
        self._is_retired = False
        self._setup(loader, resolve(device), options)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self) if "_shared" not in vars(self) else self._shared.loader.__class__

    @property
    def wrapped(self) -> Any:
        """The loader."""
        return self._shared.loader

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
        return super().__iter__()

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
