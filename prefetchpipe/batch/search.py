"""Every tensor reachable from an object: what a transform returned, or what an object's own ``.to`` made."""

from __future__ import annotations

import gc
import types
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from prefetchpipe.batch.atoms import CONSTANTS

__all__ = ["find_tensors"]

_MAX_VISITED = 1_000_000  # objects that a search for tensors looks at
# Objects of exactly these types lead to no tensor; what the second kind (with subclasses) leads to is not theirs.
_ATOMS = CONSTANTS - {slice, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType}
_NOT_SEARCHED = (type, types.ModuleType, types.FrameType, types.CodeType, str, bytes)


def find_tensors(obj: Any) -> list[torch.Tensor]:
    """Finds every tensor reachable from an object, through containers, attributes, slots, closures and C containers.

    Args:
        obj: Anything; a batch as a transform may return it.

    Returns:
        Each tensor that owns or views device memory, once. In place of tensors without memory of their own (sparse,
        nested, wrapper subclasses) stand the tensors they are made of, and for a quantized one its raw bytes.
    """
    found: list[torch.Tensor] = []
    todo = [obj]
    seen: dict[int, Any] = {}  # holds the objects, so that no id is used twice
    for value in todo:
        cls = type(value)
        if cls in _ATOMS or id(value) in seen:
            continue
        seen[id(value)] = value
        if cls is torch.Tensor:
            if more := _visit_tensor(value, found):
                todo.extend(more)
        elif issubclass(cls, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                todo.extend(_visit_tensor(value, found))
        else:
            todo.extend(_referents(value))
        if len(seen) > _MAX_VISITED:
            warnings.warn(f"search for tensors in {type(obj)!r} ended after {len(seen)} objects", RuntimeWarning, 2)
            break
    return found


def _referents(value: Any) -> Iterable[Any]:
    """Returns what an object that is no tensor refers to, as far as tensors may be behind it."""
    cls = type(value)
    if cls is dict:
        return value.values() if _ATOMS.issuperset(map(type, value)) else (*value, *value.values())
    if cls is list or cls is tuple:
        return () if _ATOMS.issuperset(map(type, value)) else value
    if issubclass(cls, _NOT_SEARCHED):
        return ()
    if cls is types.FunctionType:  # not its globals: they lead to the whole program
        return (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
    found = gc.get_referents(value)
    if issubclass(cls, (np.ndarray, np.void)) and value.dtype.hasobject:  # NumPy hides these from gc
        found.append(value.tolist())
    return found


def _visit_tensor(tensor: torch.Tensor, found: list[torch.Tensor]) -> list[Any]:
    """Adds a tensor to those found; returns what else hangs on it."""
    more: list[Any] = gc.get_referents(tensor)  # its type, and __dict__ and slots where it has any
    if len(more) == 1 and more[0] is torch.Tensor:
        more = []
    if tensor.is_leaf and tensor.grad is not None:
        more.append(tensor.grad)
    layout: Any = tensor.layout
    if layout is torch.strided:
        if tensor.is_quantized:
            found.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()))
        elif tensor.is_nested:
            more.append(tensor.values())
        elif type(tensor) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
            found.append(tensor)
    elif layout is torch.sparse_coo:
        more += (tensor._indices(), tensor._values())  # noqa: SLF001 - indices() wants a coalesced tensor
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        more += (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        more += (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return more
