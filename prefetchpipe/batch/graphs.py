"""PyTorch Geometric's graphs: ``Data``, ``HeteroData``, ``TemporalData``, their subclasses, and batches of all of them.

A graph keeps its values in storages that refer back to it. What a storage holds under public names is walked like a
dict, as PyG's own ``.to`` does; all else (slices for ``to_data_list``, increments, numbers of nodes) stays as it is.
Nothing here imports PyG.
"""
# ruff: noqa: D102 - build, allocate and fill mean the same in every spec

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from prefetchpipe.batch.composed import walk_composed
from prefetchpipe.batch.containers import DictSpec, Handler, Spec, Walker, native_base, walk_dict

__all__ = ["GraphSpec", "graph_handler"]

_BASE = "torch_geometric.data.data.BaseData"
_STORES = frozenset(("_store", "_global_store"))
_STORES_BY_TYPE = frozenset(("_node_store_dict", "_edge_store_dict"))


def graph_handler(cls: Any, otherwise: Handler) -> Handler | None:  # noqa: ARG001 - every library's has both
    """Makes the handler of a class of graphs; None for anything else, and for a class that moves itself its own way."""
    if _BASE not in {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}:
        return None
    apply = getattr(cls, "apply", None)  # what its `.to` calls
    if not str(getattr(apply, "__module__", "")).startswith("torch_geometric.") or native_base(cls) is not object:
        return None
    return _walk_graph


class _StorageSpec(Spec):
    """One storage: its values, and its private attributes by reference."""

    __slots__ = ("cached", "cls", "mapping", "private")

    def __init__(self, cls: Any, mapping: Spec, private: dict[str, Any], cached: dict[Any, frozenset[str]]) -> None:
        self.cls = cls
        self.mapping = mapping
        self.private = private
        self.cached = cached

    def build(self, leaves: Iterator[Any]) -> Any:
        new = object.__new__(self.cls)
        attributes = new.__dict__
        attributes["_mapping"] = self.mapping.build(leaves)
        attributes.update(self.private)
        if self.cached:  # which names are about nodes and which about edges; written to by every question for it
            attributes["_cached_attr"] = defaultdict(set, {kind: set(names) for kind, names in self.cached.items()})
        return new


class GraphSpec(Spec):
    """A graph or a batch of graphs.

    Args:
        cls: Its class.
        kept: Attributes by reference.
        stores: Name to storage.
        by_type: Name to storages by node or edge type.
    """

    __slots__ = ("by_type", "cls", "kept", "stores")

    def __init__(
        self,
        cls: Any,
        kept: dict[str, Any],
        stores: dict[str, _StorageSpec],
        by_type: dict[str, dict[Any, _StorageSpec]],
    ) -> None:
        self.cls = cls
        self.kept = kept
        self.stores = stores
        self.by_type = by_type

    def build(self, leaves: Iterator[Any]) -> Any:
        new = self.allocate()
        self.fill(new, leaves)
        return new

    def allocate(self) -> Any:
        return object.__new__(self.cls)

    def fill(self, new: Any, leaves: Iterator[Any]) -> None:
        parent = weakref.ref(new)

        def adopted(spec: _StorageSpec) -> Any:
            store = spec.build(leaves)
            store.__dict__["_parent"] = parent
            return store

        attributes = new.__dict__
        attributes.update(self.kept)
        for name, spec in self.stores.items():
            attributes[name] = adopted(spec)
        for name, specs in self.by_type.items():
            attributes[name] = {kind: adopted(spec) for kind, spec in specs.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        # The class of a batch is made while the program runs, so it travels as its instances do: as what makes one.
        make, arguments = self.allocate().__reduce_ex__(2)[:2]
        return _restored, (make, arguments, self.kept, self.stores, self.by_type)


def _restored(make: Callable[..., Any], arguments: tuple[Any, ...], *rest: Any) -> GraphSpec:
    return GraphSpec(type(make(*arguments)), *rest)


def _walk_graph(obj: Any, walk: Walker) -> Spec:
    kept: dict[str, Any] = {}
    stores: dict[str, _StorageSpec] = {}
    by_type: dict[str, dict[Any, _StorageSpec]] = {}
    # Storages by type come after the others, here and in `fill`: leaves are taken in the order of the walk.
    for name, value in obj.__dict__.items():
        if name in _STORES:
            stores[name] = _walk_storage(value, walk)
        elif name not in _STORES_BY_TYPE:
            kept[name] = value
    for name in obj.__dict__:
        if name in _STORES_BY_TYPE:
            by_type[name] = {kind: _walk_storage(store, walk) for kind, store in obj.__dict__[name].items()}
    if not stores:
        raise TypeError("a graph without a storage")
    return GraphSpec(type(obj), kept, stores, by_type)


def _walk_storage(store: Any, walk: Walker) -> _StorageSpec:
    attributes = dict(store.__dict__)
    mapping = attributes.pop("_mapping")
    if type(mapping) is not dict:
        raise TypeError("a storage around something else than a dict")
    attributes.pop("_parent", None)
    cached = {kind: frozenset(names) for kind, names in attributes.pop("_cached_attr", {}).items()}
    return _StorageSpec(type(store), _walk_values(mapping, walk), attributes, cached)


def _walk_values(mapping: dict[str, Any], walk: Walker) -> Spec:
    """As a dict; adjacency matrices and indices that are made of tensors are taken apart too."""
    if not any(map(_is_composed, mapping.values())):
        return walk_dict(mapping, walk)
    return DictSpec(
        tuple(mapping),
        tuple((walk_composed(v, walk) if _is_composed(v) else None) or walk.child(v) for v in mapping.values()),
    )


def _is_composed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (type(value) is not torch.Tensor or value.layout is not torch.strided)
