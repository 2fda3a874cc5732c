"""Ways to bring batches to the device. A module in here adds contenders by having ``CONTENDERS``, a tuple."""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.contenders.base import Contender, Prepared

__all__ = ["Contender", "Prepared", "all_contenders", "select"]


def all_contenders(variants: tuple[str, ...] = ()) -> list[Contender]:
    """Every contender, peers first.

    Args:
        variants: Options of further prefetchpipe contenders, for example ``"depth=4,fetch=caller"``.
    """
    found: list[Contender] = []
    for module in pkgutil.iter_modules(__path__):
        found.extend(getattr(importlib.import_module(f"{__name__}.{module.name}"), "CONTENDERS", ()))
    from benchmarks.contenders.ours import Ours

    found.extend(Ours.variant_of(text) for text in variants)
    return sorted(found, key=lambda contender: contender.rank)


def select(names: tuple[str, ...], variants: tuple[str, ...] = ()) -> list[Contender]:
    """Contenders by name; empty: all. Variants of ours always take part.

    Raises:
        ValueError: A name is unknown.
    """
    found = all_contenders(variants)
    known = [contender.name for contender in found]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no contender {', '.join(unknown)}; there are {', '.join(known)}")
    return [c for c in found if not names or c.name in names or (c.variant and variants)]
