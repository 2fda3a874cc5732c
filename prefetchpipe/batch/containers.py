"""What is kept of each kind of container, and how a new one is made from it.

A `Spec` is what is left of a batch when its leaves are taken out. Specs are never changed once made; they can be
pickled when the constants and types in them can, so that a worker process may send one. No constructor of a user's
class is called: a new object is allocated by the built-in base, then its items and attributes are filled in.
"""
# ruff: noqa: ARG001, ARG002, D102 - build, allocate and fill mean the same in every spec, and so do a handler's arguments

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

Children = int | tuple["Spec", ...]
"""What the items of a container are: that many leaves and nothing else, or one spec for each."""

LONG = 256
"""Length beyond which a collection without leaves is handed on by reference instead of copied."""

NATIVE_CONTAINERS = frozenset((list, tuple, dict, OrderedDict, defaultdict, deque))

# The descriptors themselves: a subclass may have hidden the names.
_DEFAULT_FACTORY: Any = vars(defaultdict)["default_factory"]
_MAXLEN: Any = vars(deque)["maxlen"]


class Walker(Protocol):
    """The side of the walk that a container calls back."""

    def children(self, values: list[Any]) -> Children: ...
    def child(self, value: Any) -> Spec: ...
    def all_scalars(self, values: list[Any] | tuple[Any, ...]) -> bool: ...


Handler = Callable[[Any, Any], "Spec"]


class Spec:
    """One node of a batch's structure."""

    __slots__ = ()

    def build(self, leaves: Iterator[Any]) -> Any:
        """Makes a new object, taking its leaves from the iterator in the order in which the walk found them."""
        new = self.allocate()
        self.fill(new, leaves)
        return new

    def allocate(self) -> Any:
        """Makes the empty object, for specs of mutable containers: a cycle refers to it before it is filled."""
        raise NotImplementedError

    def fill(self, new: Any, leaves: Iterator[Any]) -> None:
        """Fills what `allocate` made."""
        raise NotImplementedError


class LeafSpec(Spec):
    """A place where a leaf goes. There is one instance, `LEAF`."""

    __slots__ = ()

    def build(self, leaves: Iterator[Any]) -> Any:
        return next(leaves)

    def __reduce__(self) -> str:
        return "LEAF"


LEAF = LeafSpec()


class Constant(Spec):
    """A value handed on as the same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def build(self, leaves: Iterator[Any]) -> Any:
        return self.value


class ScalarListSpec(Spec):
    """A short list of plain scalars."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def build(self, leaves: Iterator[Any]) -> Any:
        return list(self.values)


class ListSpec(Spec):
    """Exactly ``list``."""

    __slots__ = ("children",)

    def __init__(self, children: Children) -> None:
        self.children = children

    def build(self, leaves: Iterator[Any]) -> Any:
        return take(self.children, leaves)

    def allocate(self) -> Any:
        return []

    def fill(self, new: Any, leaves: Iterator[Any]) -> None:
        new.extend(take(self.children, leaves))


class TupleSpec(Spec):
    """Exactly ``tuple``."""

    __slots__ = ("children",)

    def __init__(self, children: Children) -> None:
        self.children = children

    def build(self, leaves: Iterator[Any]) -> Any:
        return tuple(take(self.children, leaves))


class DictSpec(Spec):
    """Exactly ``dict``."""

    __slots__ = ("children", "keys")

    def __init__(self, keys: tuple[Any, ...], children: Children) -> None:
        self.keys = keys
        self.children = children

    def build(self, leaves: Iterator[Any]) -> Any:
        return dict(zip(self.keys, take(self.children, leaves), strict=True))

    def allocate(self) -> Any:
        return {}

    def fill(self, new: Any, leaves: Iterator[Any]) -> None:
        new.update(zip(self.keys, take(self.children, leaves), strict=True))


class StructSequenceSpec(Spec):
    """A C struct sequence such as ``torch.return_types.max``; its fields beyond the sequence are kept."""

    __slots__ = ("children", "cls", "hidden")

    def __init__(self, cls: Any, children: Children, hidden: dict[str, Any]) -> None:
        self.cls = cls
        self.children = children
        self.hidden = hidden

    def build(self, leaves: Iterator[Any]) -> Any:
        return self.cls(take(self.children, leaves), self.hidden)


class _Item:
    """An attribute that is the same object as one of the container's items (``output.logits is output["logits"]``)."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Attributes:
    """Instance attributes: those in slots first, the others in the order of ``__dict__``."""

    __slots__ = ("names", "slots", "values")

    def __init__(self, names: tuple[str, ...], slots: int, values: tuple[Spec | _Item, ...]) -> None:
        self.names = names
        self.slots = slots
        self.values = values

    def apply(self, new: Any, items: list[Any], leaves: Iterator[Any]) -> None:
        """Sets them on a new object that has the given items."""
        values = [items[v.index] if type(v) is _Item else v.build(leaves) for v in self.values]  # type: ignore[union-attr]
        for name, value in zip(self.names[: self.slots], values, strict=False):
            object.__setattr__(new, name, value)
        if self.slots < len(values):
            # Past any __setattr__ (frozen classes) and any property of the same name.
            new.__dict__.update(zip(self.names[self.slots :], values[self.slots :], strict=True))


class ItemsSpec(Spec):
    """A subclass of a built-in container, or one of the built-in ones in ``collections``.

    ``extra`` is the factory of a ``defaultdict`` or the ``maxlen`` of a ``deque``.
    """

    __slots__ = ("attributes", "base", "children", "cls", "extra", "keys")

    def __init__(  # noqa: PLR0917 - one caller, in this file
        self, cls: Any, base: Any, keys: tuple[Any, ...], children: Children, extra: Any, attributes: Attributes | None
    ) -> None:
        self.cls = cls
        self.base = base
        self.keys = keys
        self.children = children
        self.extra = extra
        self.attributes = attributes

    def build(self, leaves: Iterator[Any]) -> Any:
        if self.base is not tuple:
            return super().build(leaves)
        items = take(self.children, leaves)
        new = tuple.__new__(self.cls, items)
        if self.attributes is not None:
            self.attributes.apply(new, items, leaves)
        return new

    def allocate(self) -> Any:
        if self.base is tuple:
            raise NotImplementedError
        return self.base.__new__(self.cls)

    def fill(self, new: Any, leaves: Iterator[Any]) -> None:
        # Methods of the built-in base, so that an overriding method of the class does not run.
        base, items = self.base, take(self.children, leaves)
        if base is list:
            list.extend(new, items)
        elif base is deque:
            deque.__init__(new, items, self.extra)
        elif base is OrderedDict:
            for key, item in zip(self.keys, items, strict=True):
                OrderedDict.__setitem__(new, key, item)
        else:
            if base is defaultdict:
                defaultdict.__init__(new, self.extra)
            dict.update(new, zip(self.keys, items, strict=True))
        if self.attributes is not None:
            self.attributes.apply(new, items, leaves)


class ObjectSpec(Spec):
    """An object whose content is in its attributes: a dataclass, an attrs class, a wrapper around a dict."""

    __slots__ = ("attributes", "cls")

    def __init__(self, cls: Any, attributes: Attributes) -> None:
        self.cls = cls
        self.attributes = attributes

    def allocate(self) -> Any:
        return object.__new__(self.cls)

    def fill(self, new: Any, leaves: Iterator[Any]) -> None:
        self.attributes.apply(new, [], leaves)


def take(children: Children, leaves: Iterator[Any]) -> list[Any]:
    """Builds the items of a container."""
    if type(children) is int:
        items = list(islice(leaves, children))
        if len(items) != children:
            raise StopIteration
        return items
    return [next(leaves) if child is LEAF else child.build(leaves) for child in children]  # type: ignore[union-attr]


def walk_list(obj: list[Any], walk: Walker) -> Spec:
    """Handles exactly ``list``."""
    if walk.all_scalars(obj):
        return Constant(obj) if len(obj) > LONG else ScalarListSpec(tuple(obj))
    return ListSpec(walk.children(obj.copy()))


def walk_tuple(obj: tuple[Any, ...], walk: Walker) -> Spec:
    """Handles exactly ``tuple``; one of scalars cannot change and is handed on."""
    return Constant(obj) if walk.all_scalars(obj) else TupleSpec(walk.children(list(obj)))


def walk_dict(obj: dict[Any, Any], walk: Walker) -> Spec:
    """Handles exactly ``dict``."""
    return DictSpec(tuple(obj), walk.children(list(obj.values())))


def walk_struct_sequence(obj: Any, walk: Walker) -> Spec:
    """Handles C struct sequences."""
    cls, (items, hidden) = obj.__reduce__()
    return StructSequenceSpec(cls, walk.children(list(items)), hidden)


def walk_set(obj: Any, walk: Walker) -> Spec:
    """Handles mutable collections without leaves: a short one is copied, a long one handed on like a long list."""
    return Constant(obj if len(obj) > LONG else obj.copy())


def native_base(cls: type) -> type:
    """Returns the C class whose memory layout ``cls`` has: the one that can allocate an instance of it."""
    base: type | None = cls
    while base is not None:
        if isinstance(vars(base).get("__new__"), types.BuiltinMethodType):
            return base
        base = base.__base__
    return object


def field_names(cls: Any) -> frozenset[str]:
    """Names of the dataclass or attrs fields of a class."""
    names = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    attrs_fields = getattr(cls, "__attrs_attrs__", None)
    if isinstance(attrs_fields, tuple):
        names.update(field.name for field in attrs_fields)
    return frozenset(names)


def items_handler(cls: Any, base: Any) -> Handler:
    """Makes the handler of a class built on the native container ``base``."""
    fields, slots = field_names(cls), _slots(cls)

    def handle(obj: Any, walk: Walker) -> Spec:
        keys: tuple[Any, ...] = ()
        extra = None
        if issubclass(base, dict):
            keys, values = tuple(base.keys(obj)), list(base.values(obj))
            if base is defaultdict:
                extra = _DEFAULT_FACTORY.__get__(obj)
        else:
            values = list(base.__iter__(obj))
            if base is deque:
                extra = _MAXLEN.__get__(obj)
        children = walk.children(values)
        return ItemsSpec(cls, base, keys, children, extra, _attributes(obj, slots, fields, values, walk))

    return handle


def object_handler(cls: Any, walked: frozenset[str]) -> Handler:
    """Makes the handler of a class whose batch is in the attributes named by ``walked``; the others are kept."""
    slots = _slots(cls)

    def handle(obj: Any, walk: Walker) -> Spec:
        return ObjectSpec(cls, _attributes(obj, slots, walked, (), walk) or Attributes((), 0, ()))

    return handle


def mapping_handler(cls: Any, otherwise: Handler) -> Handler:
    """Makes the handler of a mapping that is not a dict and has to keep its content in one somewhere.

    Args:
        cls: The class. If it has a ``.to``, only a content named ``data`` counts.
        otherwise: Handler of instances where no such content is found.
    """
    slots = _slots(cls)
    has_to = callable(getattr(cls, "to", None))

    def handle(obj: Any, walk: Walker) -> Spec:
        attributes = _read(obj, slots)
        data = attributes.get("data")
        if has_to:
            names = ["data"] if isinstance(data, Mapping) else []
        else:
            keys = obj.keys()
            names = [name for name, value in attributes.items() if isinstance(value, dict) and value.keys() == keys]
        if not names:
            return otherwise(obj, walk)
        found = _attributes(obj, slots, frozenset(names), (), walk)
        return otherwise(obj, walk) if found is None else ObjectSpec(cls, found)

    return handle


def _slots(cls: Any) -> tuple[Any, ...]:
    """Slot descriptors of the Python classes in the MRO (their names are the mangled ones)."""
    return tuple(
        member
        for base in cls.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    )


def _read(obj: Any, slots: tuple[Any, ...]) -> dict[str, Any]:
    found = {}
    for slot in slots:
        try:
            found[slot.__name__] = slot.__get__(obj)
        except AttributeError:  # never assigned: stays so in the copy
            continue
    return found | getattr(obj, "__dict__", {})


def _attributes(
    obj: Any, slots: tuple[Any, ...], walked: frozenset[str], items: Any, walk: Walker
) -> Attributes | None:
    found = _read(obj, slots)
    if not found:
        return None
    in_slots = len(found) - len(getattr(obj, "__dict__", ()))
    places = {id(item): index for index, item in enumerate(items)}
    values: list[Spec | _Item] = []
    for name, value in found.items():
        index = places.get(id(value))
        if index is not None:
            values.append(_Item(index))
        else:
            values.append(walk.child(value) if name in walked else Constant(value))
    return Attributes(tuple(found), in_slots, tuple(values))
