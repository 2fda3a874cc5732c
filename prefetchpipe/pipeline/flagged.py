"""Loaders that say something about the batch they gave last, and so must not be read ahead."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["refuse_flagged"]


def refuse_flagged(loader: Any) -> None:
    """Refuse what ``Accelerator.prepare`` returns: its flags would belong to a batch several ahead of the consumer's.

    Nothing is imported: without Accelerate in the process there is no such loader.

    Raises:
        TypeError: With what to write instead.
    """
    flagged = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderStateMixin", None)
    if isinstance(flagged, type) and issubclass(type(loader), flagged):
        raise TypeError(
            f"loader is a {type(loader).__name__} that accelerate prepared: read ahead, its end_of_dataloader and "
            "remainder would be wrong for the batch in use (accumulate, gather_for_metrics). Write instead: "
            "from prefetchpipe.integrations.accelerate import prepare; loader = prepare(accelerator, loader, depth=2)"
        )
