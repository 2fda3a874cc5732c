"""Hugging Face Accelerate: ``accelerator.prepare(loader)`` with ``non_blocking`` copies from pinned memory."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders.base import Contender, Prepared
from benchmarks.environment import Env
from benchmarks.sources import Source

__all__ = ["CONTENDERS"]


class Accelerate(Contender):
    """As its documentation has it: ``pin_memory=True`` in the loader, ``non_blocking=True`` in the configuration."""

    name = "accelerate"
    rank = 40
    needs = "accelerate"
    cpu = True

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        configuration = DataLoaderConfiguration(non_blocking=True)
        accelerator = Accelerator(cpu=not env.cuda, dataloader_config=configuration)
        return Prepared(accelerator.prepare(source.dataloader(pin=env.cuda)))


CONTENDERS = (Accelerate(),)
