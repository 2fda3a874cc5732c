"""Batches taken apart into leaves and a spec, and put together again.

One walk per batch. What to do with an object is decided once per type and looked up afterwards; containers whose items
are all tensors, and lists of scalars, never reach the per-item loop.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from prefetchpipe.batch import containers
from prefetchpipe.batch.atoms import CONSTANTS, SCALARS
from prefetchpipe.batch.containers import LEAF, LONG, Children, Constant, Handler, Spec
from prefetchpipe.batch.move import array_to_tensor
from prefetchpipe.batch.rows import Gathered, Stacked

_BUILT_IN_HANDLERS: dict[type, Handler] = {
    list: containers.walk_list,
    tuple: containers.walk_tuple,
    dict: containers.walk_dict,
    set: containers.walk_set,
    bytearray: containers.walk_set,
}
_MAX_CACHED_TYPES = 4096  # programs that make a new class per batch must not grow without bound
_MAX_DEPTH = 64  # nesting at which the walk starts to look for cycles
_BASE_LEAF_TYPES = frozenset((torch.Tensor, torch.nn.Parameter, Gathered, Stacked))
# Python classes that keep their content in one attribute.
_WRAPPERS: dict[type, str] = {
    collections.UserDict: "data",
    collections.UserList: "data",
    collections.ChainMap: "maps",
}
_handlers: dict[type, Handler] = {}
_leaf_types: set[type] = set(_BASE_LEAF_TYPES)
_registered: dict[type | str, tuple[Callable[[Any], tuple[list[Any], Any]], Callable[[Any, list[Any]], Any]]] = {}


class WalkCache:
    """What a prefetcher remembers between batches: the places where long lists of plain scalars were found.

    At such a place a later list is only probed (first, last and some in the middle) before it is handed on.
    """

    __slots__ = ("_types",)
    _MAX_PLACES = 256

    def __init__(self) -> None:
        self._types: dict[tuple[int, int, type], set[type]] = {}

    def is_plain(self, place: tuple[int, int, type], values: list[Any] | tuple[Any, ...]) -> bool:
        """Says whether a long sequence holds nothing but scalars: by probing at a known place, else by a full scan."""
        known = self._types.get(place)
        if known is not None and known.issuperset(map(type, (values[-1], *values[:: len(values) // 32]))):
            return True
        found = set(map(type, values))
        if found <= SCALARS:
            if len(self._types) >= self._MAX_PLACES:
                self._types.clear()
            self._types[place] = found
            return True
        self._types.pop(place, None)
        return False


class _TooDeepError(Exception):
    """The nesting may be a cycle."""


class _Walk:
    """One walk through one batch."""

    __slots__ = ("arrays", "cache", "depth", "leaves", "long_seen", "seen")

    def __init__(
        self,
        leaves: list[Any],
        cache: WalkCache | None,
        seen: dict[int, tuple[int, Any]] | None = None,
        *,
        arrays: bool = True,
    ) -> None:
        self.arrays = arrays
        self.leaves = leaves
        self.cache = cache
        self.seen = seen  # id -> number and object; None while cycles are not looked for
        self.depth = 0
        self.long_seen = 0

    def children(self, values: list[Any]) -> Children:
        if _leaf_types.issuperset(map(type, values)):
            self.leaves.extend(values)
            return len(values)
        specs: list[Spec] = []
        for value in values:
            cls = type(value)
            if cls in _leaf_types:
                self.leaves.append(value)
                specs.append(LEAF)
            elif cls in CONSTANTS:
                specs.append(Constant(value))
            else:
                specs.append(self.child(value))
        return tuple(specs)

    def child(self, value: Any) -> Spec:
        handler = _handlers.get(type(value)) or _resolve(type(value))
        if self.seen is not None:
            return self._child_of_cycle(value, handler)
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _TooDeepError
        spec = handler(value, self)
        self.depth -= 1
        return spec

    def _child_of_cycle(self, value: Any, handler: Handler) -> Spec:
        seen = self.seen
        assert seen is not None
        if isinstance(value, (torch.Tensor, np.ndarray)) or type(value) in CONSTANTS:
            return handler(value, self)
        if id(value) in seen:
            return _Again(*seen[id(value)])
        number = len(seen)
        seen[id(value)] = (number, value)
        return _Numbered(number, handler(value, self))

    def all_scalars(self, values: list[Any] | tuple[Any, ...]) -> bool:
        if len(values) <= LONG:
            return SCALARS.issuperset(map(type, values))
        place = (self.long_seen, len(self.leaves), type(values))
        self.long_seen += 1
        return (self.cache or WalkCache()).is_plain(place, values)


class _Numbered(Spec):
    """A container that another part of the batch refers back to."""

    __slots__ = ("number", "spec")

    def __init__(self, number: int, spec: Spec) -> None:
        self.number = number
        self.spec = spec

    def build(self, leaves: Any) -> Any:
        try:
            new = self.spec.allocate()
        except NotImplementedError:
            new = None
        if new is None:
            new = leaves.made[self.number] = self.spec.build(leaves)
        else:
            leaves.made[self.number] = new
            self.spec.fill(new, leaves)
        return new


class _Again(Spec):
    """A second mention of a container. One that cannot exist before its items do stays the original object."""

    __slots__ = ("number", "original")

    def __init__(self, number: int, original: Any) -> None:
        self.number = number
        self.original = original

    def build(self, leaves: Any) -> Any:
        return leaves.made.get(self.number, self.original)


class _CyclicSpec(Spec):
    """The root of a spec with numbered containers."""

    __slots__ = ("spec",)

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def build(self, leaves: Any) -> Any:
        return self.spec.build(_LeavesAndMade(leaves))


class _LeavesAndMade:
    def __init__(self, leaves: Any) -> None:
        self.leaves = leaves
        self.made: dict[int, Any] = {}

    def __iter__(self) -> _LeavesAndMade:
        return self

    def __next__(self) -> Any:
        return next(self.leaves)


class _RegisteredSpec(Spec):
    __slots__ = ("aux", "children", "cls")

    def __init__(self, cls: type, children: Children, aux: Any) -> None:
        self.cls = cls
        self.children = children
        self.aux = aux

    def build(self, leaves: Any) -> Any:
        _, unflatten_fn = _registration(self.cls)
        return unflatten_fn(self.aux, containers.take(self.children, leaves))


def flatten(batch: Any, leaves: list[Any], cache: WalkCache | None = None, *, arrays: bool = True) -> Spec:
    """Takes a batch apart.

    Args:
        batch: Any object. It is not changed, and apart from long lists of scalars (more than 256 items), which are
            handed on by reference, changing its containers later does not show in the spec.
        leaves: The leaves are appended here: tensors, numeric NumPy arrays as CPU tensors on the same memory, and
            objects with a callable ``.to`` that are no containers.
        cache: Kept by the caller between batches; makes long lists of scalars cheap.
        arrays: Whether numeric NumPy arrays are leaves; otherwise they are copied, like all other arrays.

    Returns:
        The structure without the leaves, for `unflatten`.

    Example:
        >>> leaves = []
        >>> spec = flatten({"x": torch.ones(2), "name": "a"}, leaves)
        >>> unflatten(spec, [leaf * 2 for leaf in leaves])
        {'x': tensor([2., 2.]), 'name': 'a'}
    """
    if type(batch) in _leaf_types:
        leaves.append(batch)
        return LEAF
    start = len(leaves)
    try:
        return _Walk(leaves, cache, arrays=arrays).child(batch)
    except (_TooDeepError, RecursionError):
        del leaves[start:]
    return _CyclicSpec(_Walk(leaves, cache, {}, arrays=arrays).child(batch))


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Builds a new batch.

    Args:
        spec: From `flatten`.
        leaves: As many leaves as the spec has places, in the same order.

    Returns:
        A batch of the types of the one that was taken apart; every call makes new containers.

    Raises:
        ValueError: There are fewer leaves than places.
    """
    try:
        return spec.build(iter(leaves))
    except StopIteration:
        raise ValueError("fewer leaves than the spec has places") from None


def register_batch_type(
    cls: type | str,
    flatten_fn: Callable[[Any], tuple[list[Any], Any]],
    unflatten_fn: Callable[[Any, list[Any]], Any],
) -> None:
    """Teaches the walk about a container type, as the registries of pytree libraries do.

    Args:
        cls: The exact type (subclasses need their own entry), or its qualified name ``"module.Class"`` when the module
            is not to be imported yet. A later registration replaces an earlier one, and any built-in handling.
        flatten_fn: Called with an object; returns the list of its children and whatever else is needed to rebuild it.
        unflatten_fn: Called with that second value and the list of new children; returns a new object.

    Raises:
        TypeError: ``cls`` is neither a type nor a string.
        ValueError: ``cls`` is a type of leaf or of immutable values.

    Example:
        >>> register_batch_type("mylib.Graph", lambda g: ([g.x, g.edges], g.name), lambda name, c: Graph(*c, name=name))
    """
    if not isinstance(cls, (type, str)):
        raise TypeError(f"cls must be a type or a qualified name, got {cls!r}")
    if cls in CONSTANTS or cls in _BASE_LEAF_TYPES:
        raise ValueError(f"cls must be a container type, got {cls!r}, which has its fixed meaning")
    _registered[cls] = (flatten_fn, unflatten_fn)
    _forget_types()


def _resolve(cls: type) -> Handler:
    if len(_handlers) >= _MAX_CACHED_TYPES:
        _forget_types()
    handler = _handlers[cls] = _handler_of(cls)
    return handler


def _handler_of(cls: Any) -> Handler:  # noqa: C901, PLR0911, PLR0912 - one decision, read from top to bottom
    if _registration(cls) is not None:
        return _walk_registered
    if cls in _BUILT_IN_HANDLERS:
        return _BUILT_IN_HANDLERS[cls]
    if issubclass(cls, torch.Tensor):
        _leaf_types.add(cls)
        return _walk_leaf
    if issubclass(cls, (np.ndarray, np.void)):
        return _walk_array
    if cls in CONSTANTS or issubclass(cls, (type, types.ModuleType, np.generic)):
        return _walk_constant
    native = containers.native_base(cls)
    # An object that can move itself does so. A mapping around its own dict (as tokenizers return it) is walked instead,
    # since its ``.to`` changes the object it is called on.
    if callable(getattr(cls, "to", None)):
        wrapper = native is object and issubclass(cls, Mapping)
        return _guarded(containers.mapping_handler(cls, _walk_opaque)) if wrapper else _walk_opaque
    if native is cls and issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields"):
        return _guarded(containers.walk_struct_sequence)
    base = next((c for c in cls.__mro__ if c in containers.NATIVE_CONTAINERS), None)
    if base is not None and native is containers.native_base(base):
        return _guarded(containers.items_handler(cls, base))
    if native is object:
        for wrapper_class, name in _WRAPPERS.items():
            if issubclass(cls, wrapper_class):
                return _guarded(containers.object_handler(cls, containers.field_names(cls) | {name}))
        if fields := containers.field_names(cls):
            return _guarded(containers.object_handler(cls, fields))
        if issubclass(cls, Mapping):
            return _guarded(containers.mapping_handler(cls, _walk_opaque))
    return _walk_opaque


def _guarded(handler: Handler) -> Handler:
    """A class that behaves as nobody expects passes through; a batch is never refused for it."""

    def handle(obj: Any, walk: _Walk) -> Spec:
        leaves, depth = len(walk.leaves), walk.depth
        try:
            return handler(obj, walk)
        except (_TooDeepError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - whatever the class's own code raises
            del walk.leaves[leaves:]
            walk.depth = depth
            return Constant(obj)

    return handle


def _walk_leaf(obj: Any, walk: _Walk) -> Spec:
    walk.leaves.append(obj)
    return LEAF


def _walk_constant(obj: Any, walk: _Walk) -> Spec:  # noqa: ARG001 - a handler
    return Constant(obj)


def _walk_array(obj: Any, walk: _Walk) -> Spec:
    tensor = array_to_tensor(obj) if walk.arrays and isinstance(obj, np.ndarray) else None
    if tensor is None:
        return Constant(obj.copy())
    walk.leaves.append(tensor)
    return LEAF


def _walk_opaque(obj: Any, walk: _Walk) -> Spec:
    try:
        has_to = callable(obj.to)
    except Exception:  # noqa: BLE001 - attribute access is the object's own code
        has_to = False
    return _walk_leaf(obj, walk) if has_to else Constant(obj)


def _walk_registered(obj: Any, walk: _Walk) -> Spec:
    flatten_fn, _ = _registration(type(obj))
    children, aux = flatten_fn(obj)
    return _RegisteredSpec(type(obj), walk.children(list(children)), aux)


def _registration(cls: type) -> Any:
    return _registered.get(cls) or _registered.get(f"{cls.__module__}.{cls.__qualname__}")


def _forget_types() -> None:
    _handlers.clear()
    _leaf_types.intersection_update(_BASE_LEAF_TYPES)


def _pack_sequence(batch_sizes: torch.Tensor, children: list[Any]) -> PackedSequence:
    data, sorted_indices, unsorted_indices = children
    return tuple.__new__(PackedSequence, (data, batch_sizes, sorted_indices, unsorted_indices))


register_batch_type(types.MappingProxyType, lambda p: ([dict(p)], None), lambda _, c: types.MappingProxyType(c[0]))
# The lengths of a packed sequence stay on the CPU: torch's recurrent layers read them there.
register_batch_type(
    PackedSequence,
    lambda p: ([p.data, p.sorted_indices, p.unsorted_indices], p.batch_sizes.clone()),
    _pack_sequence,
)
