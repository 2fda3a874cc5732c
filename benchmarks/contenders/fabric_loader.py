"""Lightning Fabric: ``fabric.setup_dataloaders(loader)``, which copies without blocking; the loader pins."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.contenders.base import Contender, Prepared
from benchmarks.environment import Env
from benchmarks.sources import Source

__all__ = ["CONTENDERS"]


class Fabric(Contender):
    """From ``lightning`` or ``lightning-fabric``, whichever is installed."""

    name = "fabric"
    rank = 41
    cpu = True

    def missing(self, env: Env) -> str | None:
        """See :class:`Contender`."""
        try:
            _module()
        except Exception as error:  # a broken installation is a reason, not an end
            return f"neither lightning nor lightning_fabric can be imported: {type(error).__name__}: {error}"
        return None

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        devices: Any = [env.device.index] if env.cuda else 1
        fabric = _module().Fabric(accelerator="cuda" if env.cuda else "cpu", devices=devices)
        return Prepared(fabric.setup_dataloaders(source.dataloader(pin=env.cuda)))


def _module() -> Any:
    try:
        return importlib.import_module("lightning.fabric")
    except ModuleNotFoundError:
        return importlib.import_module("lightning_fabric")


CONTENDERS = (Fabric(),)
