"""timm's ``PrefetchLoader``, for batches of images with a target. It also converts and normalizes the images."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contenders.base import Contender, Prepared
from benchmarks.environment import Env
from benchmarks.sources import Source

__all__ = ["CONTENDERS"]


class Timm(Contender):
    """Half precision, and a mean and deviation that leave the values alone: the least work that it can be given."""

    name = "timm"
    rank = 30
    needs = "timm.data.loader"

    def unfit(self, source: Source, example: Any) -> str | None:
        """See :class:`Contender`."""
        fits = isinstance(example, tuple | list) and len(example) == 2
        if not fits or example[0].ndim != 4 or example[0].dtype != torch.uint8:
            return "takes pairs of uint8 images and targets only"
        return None

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        from timm.data.loader import PrefetchLoader

        loader: Any = source.loader(pin=True)
        return Prepared(
            PrefetchLoader(loader, mean=(0.0, 0.0, 0.0), std=(1 / 255,) * 3, device=env.device, img_dtype=torch.float16)
        )


CONTENDERS = (Timm(),)
