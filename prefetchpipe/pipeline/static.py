"""``static=True``: batches at fixed device addresses, for CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from prefetchpipe.batch.tree import flatten, unflatten
from prefetchpipe.device.base import Device

__all__ = ["StaticBatches"]


class StaticBatches:
    """One set of tensors per signature; each batch is copied into its set on the consumer's stream.

    The copy is ordered after all work queued on that stream so far, so a graph that still reads the last batch is not
    disturbed. Memory: one batch per signature that occurs.

    Args:
        device: Where batches live.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sets: dict[tuple[object, ...], list[torch.Tensor]] = {}

    def fill(self, batch: Any) -> Any:
        """The same batch, its device tensors replaced by the fixed ones. Runs on the consumer's thread and stream."""
        leaves: list[Any] = []
        spec = flatten(batch, leaves)
        places = [i for i, leaf in enumerate(leaves) if self._fixed(leaf)]
        sources = [leaves[i] for i in places]
        key = tuple(part for leaf in sources for part in (leaf.dtype, leaf.shape, leaf.stride()))
        targets = self._sets.get(key)
        if targets is None:
            with torch.inference_mode(False):  # a later pass may fill them outside inference mode
                targets = self._sets[key] = [torch.empty_like(leaf, requires_grad=False) for leaf in sources]
        if sources:
            self._device.fill(targets, sources)
        for place, target in zip(places, targets, strict=True):
            leaves[place] = target
        return unflatten(spec, leaves)

    def _fixed(self, leaf: Any) -> bool:
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_nested or leaf.requires_grad:
            return False
        return leaf.device == self._device.torch_device
