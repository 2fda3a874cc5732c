"""Tensors that are made of tensors: sparse ones, and PyG's indices, taken apart so that their parts are packed.

The parts are put together again without being looked at: they may not have arrived yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from prefetchpipe.batch.containers import Children, Spec, Walker, take

__all__ = ["walk_composed"]

_SPARSE = frozenset((torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))
_BY_COLUMN = frozenset((torch.sparse_csc, torch.sparse_bsc))


def walk_composed(tensor: torch.Tensor, walk: Walker) -> Spec | None:
    """Takes a CPU tensor apart; None for one that has to move by itself."""
    if not tensor.is_cpu or tensor.requires_grad:
        return None
    if type(tensor) is torch.Tensor:
        return _walk_sparse(tensor, walk) if tensor.layout in _SPARSE else None
    cls = type(
        tensor
    )  # others with this protocol (nested, distributed tensors) say more of the device than its parts do
    is_index = cls.__module__.startswith("torch_geometric.") and hasattr(cls, "__tensor_flatten__")
    return _walk_wrapper(tensor, walk) if is_index else None


class _SparseSpec(Spec):
    __slots__ = ("children", "is_coalesced", "layout", "size")

    def __init__(
        self, layout: torch.layout, size: torch.Size, children: Children, *, is_coalesced: bool | None
    ) -> None:
        self.layout = layout
        self.size = size
        self.children = children
        self.is_coalesced = is_coalesced

    def build(self, leaves: Iterator[Any]) -> Any:
        parts = take(self.children, leaves)
        options = {"dtype": parts[-1].dtype, "layout": self.layout, "device": parts[-1].device}
        # The operators themselves: torch's constructors switch a process-wide check off and on (contract 13).
        if self.layout is torch.sparse_coo:
            return torch.ops.aten._sparse_coo_tensor_unsafe(  # noqa: SLF001 - as above
                *parts, self.size, is_coalesced=self.is_coalesced, **options
            )
        return torch.ops.aten._sparse_compressed_tensor_unsafe(*parts, self.size, **options)  # noqa: SLF001 - as above


class _WrapperSpec(Spec):
    """By the protocol of ``__tensor_flatten__`` and ``__tensor_unflatten__`` (torch's, for traceable subclasses)."""

    __slots__ = ("children", "cls", "context", "names", "size", "stride")

    def __init__(self, tensor: torch.Tensor, names: list[str], context: Any, children: Children) -> None:
        self.cls: Any = type(tensor)
        self.names = tuple(names)
        self.context = context
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.children = children

    def build(self, leaves: Iterator[Any]) -> Any:
        parts = dict(zip(self.names, take(self.children, leaves), strict=True))
        return self.cls.__tensor_unflatten__(parts, self.context, self.size, self.stride)


def _walk_sparse(tensor: torch.Tensor, walk: Walker) -> Spec:
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]  # noqa: SLF001 - the public ones want a coalesced tensor
    elif tensor.layout in _BY_COLUMN:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    is_coalesced = tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None
    return _SparseSpec(tensor.layout, tensor.size(), walk.children(parts), is_coalesced=is_coalesced)


def _walk_wrapper(tensor: Any, walk: Walker) -> Spec | None:
    names, context = tensor.__tensor_flatten__()
    others = [value for name, value in vars(tensor).items() if name not in names]
    if any(_holds_tensor(value) for value in others):
        return None  # a cache that the protocol does not name would be lost, and made again on the device
    return _WrapperSpec(tensor, names, context, walk.children([getattr(tensor, name) for name in names]))


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and any(map(_holds_tensor, value)))
