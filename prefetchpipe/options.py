"""Options of a prefetcher: frozen, validated once, at construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prefetchpipe.ranks import usable_cores

__all__ = ["Fetch", "Options", "Workers", "usable_cores", "whole"]

Fetch = Literal["thread", "caller", "auto"]
Workers = Literal["auto", "shared", "plain"]


@dataclass(frozen=True, slots=True)
class Options:
    """What :class:`prefetchpipe.GPUPrefetcher` was asked for.

    Raises:
        TypeError: An option has a wrong type.
        ValueError: An option has a value that is not allowed.
    """

    depth: int = 2
    """Batches copied ahead of the one in use, at least 1."""
    transform: Callable[[Any], Any] | None = None
    fetch: Fetch = "auto"
    workers: Workers = "auto"
    copy_threads: int | None = None
    """Threads used for packing; None: the cores for this process (`usable_cores`)."""
    max_pinned_bytes: int | None = None
    """Upper bound in bytes for the page-locked host memory of one prefetcher."""
    static: bool = False
    checked: bool = False
    keep_arrays: bool = False
    """NumPy arrays stay arrays: for integrations, whose frameworks move tensors only."""

    def __post_init__(self) -> None:
        whole("depth", self.depth, minimum=1)
        if self.transform is not None and not callable(self.transform):
            raise TypeError(f"transform must be a callable or None, not {_shown(self.transform)}")
        _one_of("fetch", self.fetch, get_args(Fetch))
        _one_of("workers", self.workers, get_args(Workers))
        if self.copy_threads is not None:
            whole("copy_threads", self.copy_threads, minimum=1)
        if self.max_pinned_bytes is not None:
            whole("max_pinned_bytes", self.max_pinned_bytes, minimum=0)
        for name in ("static", "checked"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, not {_shown(value)}")


def whole(name: str, value: object, *, minimum: int) -> None:
    """Refuse an option ``name`` that is no whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number of at least {minimum}, not {_shown(value)}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name} must be one of {', '.join(map(repr, allowed))}, not {_shown(value)}")


def _shown(value: object) -> str:
    return f"{value!r} (a {type(value).__name__})"
