"""Hugging Face Accelerate: ``loader = prepare(accelerator, loader, depth=2)``.

The prefetcher is put *below* Accelerate's own loader, in the place of the ``DataLoader`` that it iterates over.
Sharding, dispatching, the look-ahead by one batch and every flag (``end_of_dataloader``, ``remainder``, the active
loader) stay Accelerate's own code, run in the consumer's thread for the batch that the consumer holds. No collective is
ever called from another thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from prefetchpipe.integrations._standin import StandIn, is_served, make_options, warn_of_world_size
from prefetchpipe.integrations._versions import require
from prefetchpipe.prefetcher import GPUPrefetcher

require("accelerate")

from accelerate import Accelerator  # noqa: E402 - after the check of its version
from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher  # noqa: E402

__all__ = ["device_of", "is_prepared", "prefetch_prepared", "prepare"]


def prepare(accelerator: Accelerator, loader: Any, *, depth: int = 2, **options: Any) -> Any:
    """Prepare a loader as ``accelerator.prepare`` does, and prefetch its batches to the accelerator's device.

    Args:
        accelerator: The ``accelerate.Accelerator``.
        loader: A ``DataLoader``; or one that is prepared already (by ``accelerator.prepare``, or by
            ``skip_first_batches`` from such a one), which is then changed in place.
        depth: Batches copied ahead of the one that Accelerate holds, at least 1. Accelerate itself holds one more than
            the consumer, to know which is the last.
        **options: As of :class:`prefetchpipe.GPUPrefetcher`, apart from ``device`` and ``static``.

    Returns:
        Accelerate's own loader (``DataLoaderShard`` or ``DataLoaderDispatcher``); ``stats()`` and ``close()`` of it are
        those of the prefetcher.

    Raises:
        TypeError: ``accelerator`` or ``loader`` is something else, or an option is unknown or has a wrong type.
        ValueError: The accelerator leaves batches on the host (``device_placement=False``), its device is neither a
            CPU nor a CUDA GPU, or an option has a value that is not allowed.

    Example:
        >>> from accelerate import Accelerator
        >>> from torch.utils.data import DataLoader
        >>> accelerator = Accelerator(cpu=True)
        >>> loader = prepare(accelerator, DataLoader(range(5), batch_size=2), depth=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"accelerator must be an accelerate.Accelerator, not a {type(accelerator).__name__}: "
            "prepare(accelerator, loader, depth=2)"
        )
    if issubclass(type(loader), GPUPrefetcher):
        raise TypeError(
            "loader must be the DataLoader itself, not a GPUPrefetcher around it, which Accelerate cannot shard: "
            "prepare(accelerator, DataLoader(...), depth=2)"
        )
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"loader must be a torch DataLoader, not a {type(loader).__name__}, which Accelerate does not shard: for "
            "any other iterable write GPUPrefetcher(loader, accelerator.device)"
        )
    if not is_prepared(loader):
        warn_of_world_size(loader, processes=1)  # Accelerate shards what the sampler gives, whatever that is
        loader = accelerator.prepare(loader)
    if not is_prepared(loader):
        raise TypeError(
            f"accelerator.prepare gave a {type(loader).__name__}, which cannot be prefetched (DataLoaderShard and "
            "DataLoaderDispatcher can): use it as it is"
        )
    return prefetch_prepared(loader, depth=depth, **options)


def is_prepared(loader: Any) -> bool:
    """Whether ``loader`` is one of Accelerate's own. ``isinstance`` would ask the ``DataLoader`` inside."""
    return issubclass(type(loader), DataLoaderAdapter)


def device_of(loader: Any) -> torch.device | None:
    """Where a prepared loader puts its batches; None if it leaves them on the host."""
    device = loader.state.device if isinstance(loader, DataLoaderDispatcher) else getattr(loader, "device", None)
    return None if device is None else torch.device(device)


def prefetch_prepared(loader: Any, *, depth: int = 2, **options: Any) -> Any:
    """Put a prefetcher below a prepared loader, in place; one that is there already is replaced.

    Args:
        loader: See :func:`is_prepared`.
        depth: As of :func:`prepare`.
        **options: As of :func:`prepare`.

    Returns:
        The same object.

    Raises:
        TypeError: An option is unknown or has a wrong type.
        ValueError: As of :func:`prepare`.
    """
    checked = make_options(depth, options)
    device = device_of(loader)
    if device is None:
        raise ValueError(
            f"loader is a {type(loader).__name__} that leaves batches on the host: write "
            "Accelerator(device_placement=True), or GPUPrefetcher(DataLoader(...), device) without Accelerate"
        )
    if not is_served(device):
        raise ValueError(f"the accelerator's device must be a CPU or a CUDA GPU, not {device}: use the loader as it is")
    base = loader.base_dataloader
    if issubclass(type(base), StandIn):
        base.close()
        base = base.wrapped
    loader.base_dataloader = StandIn(base, device, checked, hands_out_late=True)
    return loader
