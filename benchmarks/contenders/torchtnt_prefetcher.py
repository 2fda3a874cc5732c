"""torchtnt's ``CudaDataPrefetcher``; its documentation recommends a loader with pinned memory."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders.base import Contender, Prepared
from benchmarks.environment import Env
from benchmarks.sources import Source

__all__ = ["CONTENDERS"]


class Torchtnt(Contender):
    """Two batches ahead, as in its docstring."""

    name = "torchtnt"
    rank = 20
    needs = "torchtnt.utils.data"
    depths = (2, 1, 4)

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        from torchtnt.utils.data import CudaDataPrefetcher

        return Prepared(CudaDataPrefetcher(source.loader(pin=True), env.device, depth or 2))


CONTENDERS = (Torchtnt(),)
