"""Leaves that take the plain way: NumPy arrays seen as tensors, and what cannot be packed moved by its own ``.to``."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

# The NumPy dtypes that torch has too, as number -> fixed-width dtype: two C types may share a width, and torch knows
# only one of them. ``longdouble`` (g) and its complex twin (G) it has not at all.
_TORCH_DTYPES = {dtype.num: np.dtype(f"{dtype.kind}{dtype.itemsize}") for dtype in map(np.dtype, "?bBhHiIlLqQefdFD")}
# Dtypes of the ml_dtypes package, by name, so that it need not be imported.
_ML_DTYPES = {
    name: getattr(torch, name)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}
_PLAIN_CONTAINERS = frozenset((dict, list))
_FIRST_USER_DTYPE = 256  # numpy/dtype numbers: a dtype registered by another package counts from NPY_USERDEF


class _WritableAlias:
    """Presents the memory of a read-only array as writable, and keeps its owner alive.

    ``torch.from_numpy`` warns about a read-only array, and silencing that would touch the process-wide warning filters.
    Nothing here ever writes through the alias.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array


def array_to_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Views a numeric NumPy array as a CPU tensor.

    Args:
        array: Any array. A read-only or memory-mapped one is aliased too.

    Returns:
        A tensor of the same dtype and shape on the array's own memory; on a copy where torch cannot express the layout
        (negative or odd strides, foreign byte order, unaligned). None where torch has no such dtype, or where the
        array says more than its values (a masked array).
    """
    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            return None
        array = array.view(np.ndarray)
    dtype = array.dtype
    known = _TORCH_DTYPES.get(dtype.num)
    if known is not None:
        flags = array.flags
        if not (dtype.isnative and flags.aligned):
            array = array.astype(dtype.newbyteorder("="), order="C")
        elif not flags.writeable:
            array = np.asarray(_WritableAlias(array))
        if known.num != dtype.num:
            array = array.view(known)
        try:
            return torch.from_numpy(array)
        except ValueError:  # strides that torch lacks
            return torch.from_numpy(array.copy(order="C"))
    target = _ML_DTYPES.get(dtype.name) if dtype.num >= _FIRST_USER_DTYPE else None
    if target is None:
        return None
    raw = array_to_tensor(array.view(f"u{dtype.itemsize}"))
    return None if raw is None else raw.view(target)


def move(leaf: Any, device: torch.device) -> Any:
    """Moves one leaf the way ``leaf.to(device)`` does, without the surprises of it.

    Args:
        leaf: A tensor of any kind, or an object with a callable ``.to``. It is not changed.
        device: Target device.

    Returns:
        The leaf on ``device``. A tensor that is already there is returned as it is, but on the CPU as a copy that owns
        its bytes. A tensor subclass keeps its type and its instance attributes.

    Raises:
        Exception: Whatever the leaf's own ``.to`` raises.

    Example:
        >>> move(torch.ones(2).to_sparse(), torch.device("cpu")).to_dense()
        tensor([1., 1.])
    """
    if isinstance(leaf, torch.Tensor):
        return _move_tensor(leaf, device)
    return _move_object(leaf, device)


def _move_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    current = tensor.device
    if device.type == "cpu" and current.type == "cpu":
        moved = _clone(tensor)
    elif current == device:
        return tensor
    else:
        moved = tensor.to(device)
    cls = type(tensor)
    if cls is torch.Tensor:
        return moved
    if type(moved) is not cls and not hasattr(cls, "__tensor_flatten__"):
        moved = moved.as_subclass(cls)
    # A wrapper's own inner tensors have moved already and are not to be replaced by the old ones.
    attributes = moved.__dict__
    for name, value in tensor.__dict__.items():
        attributes.setdefault(name, value)
    return moved


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    try:
        # clone() resolves lazy views; ``.to`` keeps their flags.
        if tensor.is_conj():
            return _clone(tensor.conj()).conj()
        if tensor.is_neg():
            return torch._neg_view(_clone(torch._neg_view(tensor)))  # noqa: SLF001 - there is no public name for it
        return tensor.clone()
    except Exception:  # noqa: BLE001 - what cannot be cloned (uninitialized parameters) still has its ``.to``
        return tensor.to(torch.device("cpu"))


def _move_object(leaf: Any, device: torch.device) -> Any:
    """Calls ``.to`` on a copy: many such methods change the object they are called on."""
    twin = None
    if device.type == "cpu":
        try:
            twin = copy.deepcopy(leaf)
        except Exception:  # noqa: BLE001 - open files, tensors inside a graph, locks: the shallow way is left
            twin = None
    if twin is None:
        twin = _shallow_copy(leaf)
    moved = twin.to(device)
    # A ``.to`` without a result has changed the object it was called on.
    return twin if moved is None else moved


def _shallow_copy(leaf: Any) -> Any:
    try:
        twin = copy.copy(leaf)
    except Exception:  # noqa: BLE001 - not made to be copied
        return leaf
    attributes = getattr(twin, "__dict__", None)
    if twin is leaf or attributes is None or attributes is leaf.__dict__:
        return twin
    copies: dict[int, Any] = {}
    for name, value in attributes.items():
        if type(value) is dict or type(value) is list:
            attributes[name] = _own_containers(value, copies)
    return twin


def _own_containers(value: Any, copies: dict[int, Any]) -> Any:
    """Copies nested plain dicts and lists, not what is in them, so that assigning into them stays in the copy."""
    known = copies.get(id(value))
    if known is not None:
        return known
    twin = copies[id(value)] = value.copy()
    nested = twin.values() if type(twin) is dict else twin
    if not _PLAIN_CONTAINERS.isdisjoint(map(type, nested)):
        for key, item in twin.items() if type(twin) is dict else enumerate(twin):
            if type(item) in _PLAIN_CONTAINERS:
                twin[key] = _own_containers(item, copies)
    return twin
