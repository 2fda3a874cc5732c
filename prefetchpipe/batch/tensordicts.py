"""TensorDict's containers: ``TensorDict``, lazy stacks and tensorclasses, taken apart by the walk of their own ``.to``.

Nothing here imports tensordict.
"""
# ruff: noqa: SLF001 - that walk is _fast_apply: the public one checks every value

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from prefetchpipe.batch.containers import Children, Handler, Spec, Walker, take

__all__ = ["TensorDictSpec", "tensordict_handler"]

_CLASSES = frozenset(("tensordict._td.TensorDict", "tensordict._lazy.LazyStackedTensorDict"))

_HOLE = torch.empty(0, device="cpu")
"""Stands where a tensor was. One object for all, so that a pickled structure holds it once."""


def tensordict_handler(cls: Any, otherwise: Handler) -> Handler | None:
    """Makes the handler of a class; None for the kinds that are views, files or modules, which move themselves.

    Args:
        cls: The class.
        otherwise: Handler of instances in memory-mapped files, and of those without any tensor.
    """
    is_tensorclass = getattr(cls, "_is_tensorclass", False) is True
    if f"{cls.__module__}.{cls.__qualname__}" not in _CLASSES and not is_tensorclass:
        return None

    def handle(obj: Any, walk: Walker) -> Spec:
        if obj.is_memmap():
            return otherwise(obj, walk)
        tensors: list[torch.Tensor] = []

        def take_out(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return _HOLE

        structure = obj._fast_apply(take_out, filter_empty=False, propagate_lock=True)
        if not tensors:
            return otherwise(obj, walk)
        return TensorDictSpec(structure, walk.children(list(tensors)))

    return handle


class TensorDictSpec(Spec):
    """What is left without the tensors: the nesting, batch sizes, names, locks, and everything that is no tensor.

    That the tensors of a consolidated one lie in one storage is kept, but not the mark that says so.
    """

    __slots__ = ("children", "structure")

    def __init__(self, structure: Any, children: Children) -> None:
        self.structure = structure
        self.children = children

    def build(self, leaves: Iterator[Any]) -> Any:
        """Makes a new object; its ``device`` is set as ``.to`` would set it."""
        tensors = take(self.children, leaves)
        rest = iter(tensors)
        device = tensors[0].device
        return self.structure._fast_apply(lambda _: next(rest), device=device, filter_empty=False, propagate_lock=True)
