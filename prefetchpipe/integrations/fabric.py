"""Lightning Fabric: ``loader = prepare(fabric, loader, depth=2)``.

The prefetcher takes the place of the ``DataLoader`` inside Fabric's own loader, which goes on setting the sampler's
epoch.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from prefetchpipe.integrations._standin import StandIn, is_served, make_options, warn_of_world_size
from prefetchpipe.integrations._versions import require
from prefetchpipe.prefetcher import GPUPrefetcher

require("lightning")

from lightning.fabric import Fabric  # noqa: E402 - after the check of its version
from lightning.fabric.wrappers import _FabricDataLoader  # noqa: E402

__all__ = ["prepare"]


def prepare(fabric: Fabric, loader: Any, *, depth: int = 2, **options: Any) -> Any:
    """Set a loader up as ``fabric.setup_dataloaders`` does, and prefetch its batches to Fabric's device.

    Args:
        fabric: The ``lightning.fabric.Fabric``, launched.
        loader: A ``DataLoader``, or what ``fabric.setup_dataloaders`` made of one, which is then changed in place.
        depth: Batches copied ahead of the one in use, at least 1.
        **options: As of :class:`prefetchpipe.GPUPrefetcher`, apart from ``device`` and ``static``.

    Returns:
        Fabric's own loader. Its batches are on the device.

    Raises:
        TypeError: ``fabric`` or ``loader`` is something else, or an option is unknown or has a wrong type.
        ValueError: The loader leaves batches on the host (``move_to_device=False``), Fabric's device is neither a CPU
            nor a CUDA GPU, or an option has a value that is not allowed.

    Example:
        >>> from lightning.fabric import Fabric
        >>> from torch.utils.data import DataLoader
        >>> fabric = Fabric(accelerator="cpu", devices=1)
        >>> loader = prepare(fabric, fabric.setup_dataloaders(DataLoader(range(5), batch_size=2)))
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """
    if not isinstance(fabric, Fabric):
        raise TypeError(
            f"fabric must be a lightning.fabric.Fabric, not a {type(fabric).__name__}: prepare(fabric, loader, depth=2)"
        )
    if issubclass(type(loader), GPUPrefetcher):
        raise TypeError(
            "loader must be the DataLoader itself, not a GPUPrefetcher around it, which Fabric cannot shard: "
            "prepare(fabric, DataLoader(...), depth=2)"
        )
    checked = make_options(depth, options)
    if not isinstance(loader, _FabricDataLoader):
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"loader must be a torch DataLoader, not a {type(loader).__name__}, which Fabric does not shard: for "
                "any other iterable write GPUPrefetcher(loader, fabric.device)"
            )
        loader = fabric.setup_dataloaders(loader)
    if loader.device is None:
        raise ValueError(
            "loader was set up with move_to_device=False, which leaves batches on the host: leave that argument out"
        )
    if not is_served(loader.device):
        raise ValueError(f"the device of fabric must be a CPU or a CUDA GPU, not {loader.device}")
    base = loader._dataloader  # noqa: SLF001 - what Fabric iterates over
    if issubclass(type(base), StandIn):
        base.close()
        base = base.wrapped
    warn_of_world_size(base, fabric.world_size)
    loader._dataloader = StandIn(base, loader.device, checked)  # noqa: SLF001
    return loader
