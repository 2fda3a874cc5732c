"""Batches taken apart and put together: types, values, identity, and what must not be touched."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import gc
import pickle
import sys
import time
import types
import typing
import warnings

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from prefetchpipe.batch import containers, search, tree
from prefetchpipe.batch.search import find_tensors
from prefetchpipe.batch.tree import WalkCache, flatten, register_batch_type, unflatten


def taken(batch, cache=None):
    leaves = []
    return flatten(batch, leaves, cache), leaves


def moved(batch):
    """The batch with every tensor leaf replaced by ten times itself."""
    spec, leaves = taken(batch)
    return unflatten(spec, [leaf * 10 for leaf in leaves])


def ones(*shape):
    return torch.ones(*shape)


def is_ten(tensor):
    return isinstance(tensor, torch.Tensor) and bool((tensor == 10).all())


class Point(typing.NamedTuple):
    x: torch.Tensor
    name: str = "p"


class LabelledPoint(Point):
    """A namedtuple subclass with a __dict__."""


class TaggedTuple(tuple):  # noqa: SLOT001 - the attributes are the point
    """A tuple subclass whose constructor takes something else than its items."""

    def __new__(cls, tag, *items):
        self = super().__new__(cls, items)
        self.tag = tag
        return self


class NoisyList(list):
    """A list subclass that must not be constructed or extended through its own methods."""

    def __init__(self, owner, items):
        super().__init__(items)
        self.owner = owner

    def append(self, item):
        raise AssertionError

    extend = append


class RequiredArgument(dict):
    def __init__(self, meta, **items):
        super().__init__(items)
        self.meta = meta

    def __setitem__(self, key, value):
        raise AssertionError


class Slotted(dict):
    __slots__ = ("__private", "unset", "visible")

    def __init__(self):
        super().__init__(x=ones(1))
        self.visible = "v"
        self.__private = "s"

    def secret(self):
        return self.__private


@dataclasses.dataclass
class Plain:
    x: torch.Tensor
    label: str = "l"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor

    def __post_init__(self):
        assert isinstance(self.x, torch.Tensor)


@dataclasses.dataclass(slots=True)
class WithSlots:
    x: torch.Tensor
    late: torch.Tensor = dataclasses.field(init=False)
    unset: int = dataclasses.field(init=False)


@dataclasses.dataclass
class Inherited(Plain):
    y: torch.Tensor | None = None


@dataclasses.dataclass
class NamedTo:
    """A field called `to` is no method."""

    to: torch.Tensor


@attrs.define
class AttrsSlots:
    x: torch.Tensor
    n: int = 3


@attrs.frozen
class AttrsFrozen:
    x: torch.Tensor


class Encoding(collections.UserDict):
    """Behaves like the output of a tokenizer."""

    def __init__(self, data, encodings):
        super().__init__(data)
        self._encodings = encodings

    def to(self, device):
        raise AssertionError


class BareMapping(collections.abc.Mapping):
    def __init__(self, items):
        self._items = items
        self.note = "n"

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class MovingMapping(BareMapping):
    def __init__(self, items):
        super().__init__(items)
        self.data = items

    def to(self, device):
        raise AssertionError


class PropertyMapping(BareMapping):
    """`data` is computed: nothing that could be set, so its own `.to` is the way."""

    @property
    def data(self):
        return dict(self._items)

    def to(self, device):
        return self


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """Items and attributes mirror each other, as in the outputs of transformers."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                collections.OrderedDict.__setitem__(self, field.name, value)

    def __setitem__(self, key, value):
        raise AssertionError


class Movable:
    def __init__(self):
        self.x = ones(1)

    def to(self, device):
        return self

    def pin_memory(self):
        return self


@dataclasses.dataclass
class MovableDataclass:
    x: torch.Tensor

    def to(self, device):
        return self


class MovableTuple(Point):
    def to(self, device):
        return self


class Color(enum.Enum):
    RED = 1


class AttributeTensor(torch.Tensor):
    pass


def factory():
    return []


@pytest.mark.parametrize(
    "scalar", [None, 0, True, 1.5, 2j, "s", b"b", ..., Color.RED, range(3), slice(1), print, torch]
)
def test_constants_pass_through(scalar):
    spec, leaves = taken(scalar)
    assert leaves == []
    assert unflatten(spec, []) is scalar
    assert moved({"c": scalar})["c"] is scalar


@pytest.mark.parametrize(
    "value",
    [
        decimal.Decimal("1.5"),
        fractions.Fraction(1, 3),
        dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        dt.timedelta(1),
        torch.Size([1, 2]),
        torch.device("cpu"),
        torch.float32,
        torch.Tensor,
        MovableDataclass,
        object(),
        np.float32(1.5),
        np.datetime64("2020-01-01"),
        frozenset((1,)),
        (i for i in ()),
        lambda: None,
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_objects_without_leaves_are_the_same_object(value):
    assert moved([value, ones(1)])[0] is value


def test_plain_containers_nest():
    batch = {"x": ones(2), "l": [ones(1), 3, (ones(1), "s")], "e": [], "t": (), "d": {}}
    out = moved(batch)
    assert list(out) == list(batch)
    assert is_ten(out["x"])
    assert type(out["l"]) is list
    assert out["l"][1] == 3
    assert is_ten(out["l"][0])
    assert type(out["l"][2]) is tuple
    assert out["l"][2][1] == "s"
    assert is_ten(out["l"][2][0])
    assert (out["e"], out["t"], out["d"]) == ([], (), {})
    assert out["e"] is not batch["e"]
    assert bool((batch["x"] == 1).all())


def test_every_call_builds_a_new_batch():
    spec, leaves = taken({"a": [1, 2], "x": ones(1)})
    first, second = unflatten(spec, leaves), unflatten(spec, leaves)
    assert first == second
    assert first is not second
    assert first["a"] is not second["a"]


def test_later_changes_of_the_source_do_not_show():
    inner, names, seen = [ones(1)], ["a"], {1}
    batch = {"inner": inner, "names": names, "raw": bytearray(b"ab"), "seen": seen}
    spec, leaves = taken(batch)
    inner.append(2)
    names[0] = "changed"
    batch["raw"][0] = 0
    seen.add(2)
    batch["new"] = 1
    out = unflatten(spec, leaves)
    assert out == {"inner": [leaves[0]], "names": ["a"], "raw": bytearray(b"ab"), "seen": {1}}


def test_too_few_leaves_are_an_error():
    for batch in ([ones(1), ones(1)], {"a": ones(1), "b": 1}, {"a": ones(1), "b": ones(1)}, ones(1)):
        spec, _ = taken(batch)
        with pytest.raises(ValueError, match="fewer leaves"):
            unflatten(spec, [])


def test_tuples():
    labelled = LabelledPoint(ones(1))
    labelled.extra = "e"
    tagged = TaggedTuple("t", ones(1), 5)
    out = moved([Point(ones(1)), labelled, tagged])
    assert type(out[0]) is Point
    assert is_ten(out[0].x)
    assert out[0].name == "p"
    assert type(out[1]) is LabelledPoint
    assert out[1].extra == "e"
    assert is_ten(out[1].x)
    assert type(out[2]) is TaggedTuple
    assert out[2].tag == "t"
    assert out[2][1] == 5
    assert is_ten(out[2][0])


def test_struct_sequences():
    out = moved(torch.return_types.max((ones(1), ones(1))))
    assert type(out) is torch.return_types.max
    assert is_ten(out.values)
    assert is_ten(out.indices)
    now = time.localtime(0)
    assert moved([now])[0] == now
    assert moved([now])[0].tm_zone == now.tm_zone


def test_list_subclass_keeps_attributes_and_runs_no_method():
    owner = object()
    batch = NoisyList(owner, [ones(1), 2])
    out = moved(batch)
    assert type(out) is NoisyList
    assert out.owner is owner
    assert is_ten(out[0])
    assert out[1] == 2
    assert len(batch) == 2


def test_dict_subclasses():
    required = RequiredArgument({"m": 1}, x=ones(1))
    out = moved(required)
    assert type(out) is RequiredArgument
    assert out.meta is required.meta
    assert is_ten(out["x"])
    slotted = moved(Slotted())
    assert type(slotted) is Slotted
    assert is_ten(slotted["x"])
    assert slotted.visible == "v"
    assert slotted.secret() == "s"
    assert not hasattr(slotted, "unset")


def test_collections():
    ordered = collections.OrderedDict(b=ones(1), a=2)
    default = collections.defaultdict(factory, x=ones(1))
    queue = collections.deque([ones(1), 2], maxlen=5)
    counter = collections.Counter("aab")
    chain = collections.ChainMap({"x": ones(1)}, {"y": 2})
    batch = [
        ordered,
        default,
        queue,
        counter,
        collections.UserDict(x=ones(1)),
        collections.UserList([ones(1)]),
        types.MappingProxyType({"x": ones(1)}),
        chain,
    ]
    out = moved(batch)
    assert [type(o) for o in out] == [type(b) for b in batch]
    assert list(out[0]) == ["b", "a"]
    assert is_ten(out[0]["b"])
    assert out[1].default_factory is factory
    assert out[1]["new"] == []
    assert is_ten(out[1]["x"])
    assert out[2].maxlen == 5
    assert is_ten(out[2][0])
    assert out[3] == counter
    assert out[3] is not counter
    assert is_ten(out[4]["x"])
    assert is_ten(out[5][0])
    assert is_ten(out[6]["x"])
    assert is_ten(out[7]["x"])
    assert out[7].maps[0] is not chain.maps[0]
    assert "new" not in default


def test_dataclasses():
    slots = WithSlots(ones(1))
    slots.late = ones(1)
    plain = Plain(ones(1))
    plain.extra = "kept"
    out = moved([plain, Frozen(ones(1)), slots, Inherited(ones(1), "m", ones(1)), NamedTo(ones(1))])
    assert [type(o) for o in out] == [Plain, Frozen, WithSlots, Inherited, NamedTo]
    assert is_ten(out[0].x)
    assert out[0].label == "l"
    assert out[0].extra == "kept"
    assert is_ten(out[1].x)
    assert is_ten(out[2].x)
    assert is_ten(out[2].late)
    assert not hasattr(out[2], "unset")
    assert is_ten(out[3].y)
    assert out[3].label == "m"
    assert is_ten(out[4].to)
    assert bool((plain.x == 1).all())
    del plain.label
    assert "label" not in moved(plain).__dict__


def test_attrs_classes():
    out = moved([AttrsSlots(ones(1), 4), AttrsFrozen(ones(1))])
    assert [type(o) for o in out] == [AttrsSlots, AttrsFrozen]
    assert is_ten(out[0].x)
    assert out[0].n == 4
    assert is_ten(out[1].x)


def test_packed_sequence_keeps_its_lengths_on_the_cpu():
    packed = pack_sequence([ones(2), ones(3)], enforce_sorted=False)
    spec, leaves = taken(packed)
    assert [leaf is field for leaf, field in zip(leaves, (packed[0], packed[2], packed[3]), strict=True)] == [True] * 3
    out = unflatten(spec, [packed.data * 10, packed.sorted_indices, packed.unsorted_indices])
    assert type(out) is PackedSequence
    assert out.batch_sizes.tolist() == packed.batch_sizes.tolist()
    assert out.batch_sizes is not packed.batch_sizes
    assert is_ten(out.data)
    assert moved(pack_sequence([ones(3), ones(2)])).sorted_indices is None


def test_mappings_with_their_own_to():
    encodings = ["e"]
    encoding = Encoding({"ids": ones(1)}, encodings)
    data = encoding.data
    out = moved(encoding)
    assert type(out) is Encoding
    assert out._encodings is encodings
    assert is_ten(out["ids"])
    assert encoding.data is data
    assert bool((data["ids"] == 1).all())
    bare = moved(BareMapping({"x": ones(1)}))
    assert type(bare) is BareMapping
    assert bare.note == "n"
    assert is_ten(bare["x"])
    moving = MovingMapping({"x": ones(1)})
    out = moved(moving)
    assert type(out) is MovingMapping
    assert is_ten(out.data["x"])
    computed = PropertyMapping({"x": ones(1)})
    assert taken(computed)[1] == [computed]


def test_model_output_items_and_attributes_are_the_same_tensors():
    source = ModelOutput(logits=ones(1))
    spec, leaves = taken(source)
    assert len(leaves) == 1
    out = unflatten(spec, [leaves[0] * 10])
    assert type(out) is ModelOutput
    assert list(out) == ["logits"]
    assert out.logits is out["logits"]
    assert out.loss is None
    assert is_ten(out.logits)


@pytest.mark.parametrize("make", [Movable, lambda: MovableDataclass(ones(1)), lambda: MovableTuple(ones(1))])
def test_objects_that_can_move_themselves_are_leaves(make):
    value = make()
    spec, leaves = taken([value])
    assert leaves[0] is value
    assert unflatten(spec, ["new"]) == ["new"]


def test_tensor_dict_is_no_plain_mapping():
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({"x": torch.ones(3)}, [3])
    assert taken({"td": batch})[1][0] is batch["x"]

    @tensordict.tensorclass
    class Sample:
        x: torch.Tensor

    sample = Sample(x=torch.ones(3), batch_size=[3])
    assert taken([sample])[1][0] is sample.x
    assert any(t is batch["x"] for t in find_tensors(batch))


def test_to_that_is_no_method_is_ignored():
    class Letter:
        to = "someone"

    class Proxy:
        def __getattr__(self, name):
            raise RuntimeError(name)

    class Late:
        pass

    late = Late()
    late.to = lambda device: late
    letter, proxy = Letter(), Proxy()
    spec, leaves = taken([letter, proxy, late, Movable])
    assert leaves == [late]
    out = unflatten(spec, leaves)
    assert out[0] is letter
    assert out[1] is proxy
    assert out[3] is Movable


def test_a_container_that_cannot_be_read_passes_through():
    class Broken(BareMapping):
        def keys(self):
            raise OSError

    broken = Broken({"x": ones(1)})
    spec, leaves = taken([broken, ones(1)])
    assert len(leaves) == 1
    assert unflatten(spec, leaves)[0] is broken


def test_tensors_of_any_kind_are_leaves():
    kinds = [
        torch.nn.Parameter(ones(1)),
        ones(1).as_subclass(AttributeTensor),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        ones(1).to("meta"),
        torch.nested.nested_tensor([ones(1), ones(2)], layout=torch.jagged),
    ]
    _, leaves = taken(kinds)
    assert [a is b for a, b in zip(leaves, kinds, strict=True)] == [True] * len(kinds)


def test_cycles_keep_their_shape():
    loop = [ones(1)]
    loop.append(loop)
    out = moved(loop)
    assert out[1] is out
    assert is_ten(out[0])
    table = {"x": ones(1), "l": [], "q": collections.deque(), "o": collections.OrderedDict(), "n": np.ones(1)}
    table["self"] = table
    table["l"].append(table)
    table["q"].append(table)
    table["o"]["up"] = table
    table["both"] = (table["l"], "s")
    out = moved(table)
    assert out["self"] is out
    assert out["l"][0] is out
    assert out["q"][0] is out
    assert out["o"]["up"] is out
    assert out["both"][0] is out["l"]
    assert is_ten(out["x"])
    assert is_ten(out["n"])
    plain = Plain(ones(1))
    plain.label = plain
    out = moved(plain)
    assert out.label is out
    assert is_ten(out.x)
    assert find_tensors(loop) == [loop[0]]


def test_cycle_through_a_tuple_ends():
    inner = [ones(1)]
    outer = (inner,)
    inner.append(outer)
    out = moved(outer)
    assert type(out) is tuple
    assert is_ten(out[0][0])


def test_cycles_under_a_high_recursion_limit_stay_cheap():
    loop = [1]
    loop.append(loop)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        assert moved(loop)[1][0] == 1
    finally:
        sys.setrecursionlimit(limit)


def test_deep_nesting_without_a_cycle():
    batch = ones(1)
    for _ in range(150):
        batch = [batch, 1]
    out = moved(batch)
    for _ in range(150):
        out = out[0]
    assert is_ten(out)


def test_specs_can_be_pickled():
    batch = {"x": ones(1), "p": Point(ones(1)), "d": Plain(ones(1)), "o": collections.OrderedDict(a=1), "l": [1, 2]}
    spec, leaves = taken(batch)
    out = unflatten(pickle.loads(pickle.dumps(spec)), leaves)
    assert out["x"] is leaves[0]
    assert out["p"].x is leaves[1]
    assert out["d"].x is leaves[2]
    assert (type(out["o"]), out["o"]["a"], out["l"]) == (collections.OrderedDict, 1, [1, 2])


class Box:
    def __init__(self, content):
        self.content = content


@pytest.fixture
def _registry():
    before = dict(tree._registered)
    yield
    tree._registered.clear()
    tree._registered.update(before)
    tree._forget_types()


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize("key", [Box, f"{Box.__module__}.{Box.__qualname__}"])
def test_registered_types(key):
    box = Box(ones(1))
    assert moved(box) is box
    register_batch_type(key, lambda b: ([b.content, {"n": 1}], "aux"), lambda aux, c: Box((aux, *c)))
    out = moved([box])[0]
    assert out.content[0] == "aux"
    assert is_ten(out.content[1])
    assert out.content[2] == {"n": 1}


def test_registration_is_checked():
    with pytest.raises(TypeError, match="3"):
        register_batch_type(3, None, None)
    with pytest.raises(ValueError, match="Tensor"):
        register_batch_type(torch.Tensor, None, None)


def test_many_types_do_not_accumulate(monkeypatch):
    monkeypatch.setattr(tree, "_MAX_CACHED_TYPES", 8)
    for i in range(50):
        cls = type(f"T{i}", (dict,), {})
        assert type(moved(cls(x=ones(1)))) is cls
    assert len(tree._handlers) <= 8


# NumPy


NUMERIC = list("?bBhHiIlLqQefdFD")


@pytest.mark.parametrize("char", NUMERIC)
def test_numeric_arrays_become_tensors_on_the_same_memory(char):
    array = np.ones((2, 3), char)
    _, (tensor,) = taken(array)
    assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name
    assert tensor.data_ptr() == array.ctypes.data
    assert tuple(tensor.shape) == (2, 3)
    assert bool((tensor.to(torch.complex128) == 1).all())


def test_arrays_that_torch_would_warn_about_are_aliased_silently():
    array = np.arange(4)
    array.flags.writeable = False
    filters = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, leaves = taken([array, np.broadcast_to(np.float32(2), (3,)), np.frombuffer(b"\1\2", np.uint8)])
    assert warnings.filters == filters
    assert leaves[0].data_ptr() == array.ctypes.data
    assert leaves[0].tolist() == [0, 1, 2, 3]
    assert leaves[1].tolist() == [2, 2, 2]
    assert leaves[2].tolist() == [1, 2]
    assert not array.flags.writeable


def test_a_read_only_alias_keeps_the_memory_alive():
    array = np.full(1000, 7)
    array.flags.writeable = False
    _, (tensor,) = taken(array)
    del array
    gc.collect()
    assert tensor.eq(7).all()


def test_memory_mapped_arrays(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.int16))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    _, (tensor,) = taken(mapped)
    assert tensor.dtype == torch.int16
    assert tensor.data_ptr() == mapped.ctypes.data
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_layouts_that_torch_lacks_are_copied():
    packed = np.zeros(3, "i1,i4")
    packed["f1"] = [1, 2, 3]
    unaligned = np.frombuffer(bytes(1) + np.arange(3, dtype=np.int32).tobytes(), np.int32, offset=1)
    arrays = [np.arange(4)[::-1], np.arange(4, dtype=">i4"), packed["f1"], unaligned, np.arange(4, dtype=">f8")[::-2]]
    _, leaves = taken(arrays)
    assert [leaf.tolist() for leaf in leaves] == [a.tolist() for a in arrays]
    assert [leaf.dtype for leaf in leaves] == [torch.int64, torch.int32, torch.int32, torch.int32, torch.float64]


def test_shapes_of_arrays():
    arrays = [np.array(2.5), np.zeros((0, 3)), np.arange(6).reshape(2, 3).T, np.ones((1, 2)).view(np.recarray)]
    _, leaves = taken(arrays)
    assert [tuple(leaf.shape) for leaf in leaves] == [(), (0, 3), (3, 2), (1, 2)]
    assert leaves[2].stride() == (1, 3)


def test_ml_dtypes_arrays():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    read_only = np.ones(2, ml_dtypes.bfloat16)
    read_only.flags.writeable = False
    _, leaves = taken([*(np.ones((2, 2), getattr(ml_dtypes, n)).T for n in names), read_only])
    assert [leaf.dtype for leaf in leaves] == [*(getattr(torch, n) for n in names), torch.bfloat16]
    assert all(bool((leaf.float() == 1).all()) for leaf in leaves)
    four_bits = np.ones(2, ml_dtypes.int4)
    assert unflatten(*taken(four_bits)).dtype == four_bits.dtype


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "bc"]),
        np.array([b"a"]),
        np.array([None, "x"], object),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([1], "m8[s]"),
        np.zeros(2, [("a", "i4"), ("b", "f4")]),
        np.ma.array([1, 2], mask=[0, 1]),
        np.ones(2, np.longdouble),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
    ],
    ids=lambda a: str(a.dtype),
)
def test_other_arrays_are_copied_and_stay_arrays(array):
    spec, leaves = taken([array])
    assert leaves == []
    (out,) = unflatten(spec, [])
    assert type(out) is type(array)
    assert out.dtype == array.dtype
    assert out is not array
    assert not np.shares_memory(out, array)
    assert repr(out) == repr(array)


def test_records_do_not_refer_to_the_source():
    table = np.zeros(2, [("a", "i4")])
    spec, _ = taken([table[0]])
    table["a"] = 5
    assert unflatten(spec, [])[0]["a"] == 0


# Long lists


def test_long_scalar_lists_are_handed_on_and_probed_afterwards():
    batch = {"x": ones(1), "ids": list(range(10_000)), "names": ("s",) * 300}
    cache = WalkCache()
    for _ in range(3):
        spec, leaves = taken(batch, cache)
        out = unflatten(spec, leaves)
        assert out["ids"] is batch["ids"]
        assert out["names"] is batch["names"]
    assert unflatten(*taken(batch))["ids"] is batch["ids"]


@pytest.mark.parametrize("place", [0, -1])
def test_probe_notices_tensors_at_the_ends(place):
    cache = WalkCache()
    taken({"ids": list(range(1000))}, cache)
    values = list(range(1000))
    values[place] = ones(1)
    spec, leaves = taken({"ids": values}, cache)
    assert leaves == [values[place]]
    assert unflatten(spec, leaves)["ids"] is not values


def test_another_structure_is_scanned_again():
    cache = WalkCache()
    taken({"ids": list(range(1000))}, cache)
    mixed = list(range(1000))
    mixed[17] = ones(1)
    _, leaves = taken({"x": ones(1), "ids": mixed}, cache)
    assert len(leaves) == 2
    assert len(taken([[ones(1)] * 1000], cache)[1]) == 1000


def test_walk_cache_is_bounded():
    cache = WalkCache()
    values = list(range(300))
    taken([values] * 1000, cache)
    assert len(cache._types) <= WalkCache._MAX_PLACES


def test_walk_of_a_long_list_costs_microseconds():
    batch = {"x": ones(1), "ids": list(range(1_000_000)), "raw": bytes(1_000_000)}
    cache = WalkCache()
    taken(batch, cache)

    def once():
        start = time.perf_counter()
        taken(batch, cache)
        return time.perf_counter() - start

    assert min(once() for _ in range(20)) < 200e-6


# Properties


leaf_values = st.one_of(
    st.none(),
    st.integers(-5, 5),
    st.text(max_size=2),
    st.booleans(),
    st.builds(lambda n: torch.full((1,), n), st.integers(0, 9)),
)


def containers_of(children):
    items = st.lists(children, max_size=4)
    dicts = st.dictionaries(st.text(max_size=2), children, max_size=4)
    return st.one_of(
        items,
        items.map(tuple),
        dicts,
        items.map(lambda x: collections.deque(x, maxlen=7)),
        items.map(lambda x: NoisyList("o", x)),
        items.map(lambda x: TaggedTuple("t", *x)),
        items.map(collections.UserList),
        dicts.map(collections.OrderedDict),
        dicts.map(lambda d: collections.defaultdict(factory, d)),
        dicts.map(collections.UserDict),
        dicts.map(types.MappingProxyType),
        children.map(Point),
        children.map(Plain),
        children.map(AttrsSlots),
    )


batches = st.recursive(leaf_values, containers_of, max_leaves=25)


def parts(value):
    """A comparable picture of a batch: types, keys, values, attributes."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.tolist())
    if isinstance(value, (Plain, AttrsSlots)):
        names = ("x", "label") if isinstance(value, Plain) else ("x", "n")
        return (type(value), [parts(getattr(value, n)) for n in names])
    extra = [getattr(value, name, None) for name in ("tag", "owner", "maxlen", "default_factory")]
    if isinstance(value, collections.abc.Mapping):
        return (type(value), extra, [(k, parts(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple, collections.deque, collections.UserList)):
        return (type(value), extra, [parts(v) for v in value])
    return (type(value), value)


def mutable_containers(value, found):
    if isinstance(value, (Plain, AttrsSlots)):
        found[id(value)] = value
        mutable_containers(value.x, found)
    elif isinstance(value, collections.abc.Mapping):
        found[id(value)] = value
        for item in value.values():
            mutable_containers(item, found)
    elif isinstance(value, (list, tuple, collections.deque, collections.UserList)):
        if not isinstance(value, tuple):
            found[id(value)] = value
        for item in value:
            mutable_containers(item, found)
    return found


@settings(max_examples=200, deadline=None)
@given(batches)
def test_round_trip_equals_and_shares_no_container(batch):
    before = parts(batch)
    spec, leaves = taken(batch)
    out = unflatten(spec, leaves)
    assert parts(out) == before
    assert parts(batch) == before
    kept = mutable_containers(batch, {})
    assert not kept.keys() & mutable_containers(out, {}).keys()
    assert {id(t) for t in find_tensors(batch)} == {id(t) for t in leaves}


@settings(max_examples=50, deadline=None)
@given(batches)
def test_cycle_mode_gives_the_same_batch(batch):
    leaves = []
    spec = tree._CyclicSpec(tree._Walk(leaves, None, {}).child(batch))
    assert parts(unflatten(spec, leaves)) == parts(batch)


# The search for tensors


class Holder:
    __slots__ = ("__dict__", "slot")


def test_find_tensors_reaches_everything():
    t = [torch.full((1,), i) for i in range(12)]
    holder = Holder()
    holder.slot, holder.attribute = t[0], [t[1]]
    array = np.empty(1, object)
    array[0] = {"deep": t[2]}
    structured = np.zeros(1, [("o", object)])
    structured["o"][0] = t[3]
    t[4].hidden = t[5]
    captured = t[6]
    batch = {
        "holder": holder,
        "array": array,
        "structured": structured,
        "tensor": t[4],
        "closure": lambda default=t[7]: captured + default,
        "iterator": iter([t[8]]),
        t[9]: {1, 2},
        "set": {t[10]},
        "twice": [t[11], t[11]],
        "module": torch,
        "bound": t[0].add,
    }
    found = find_tensors(batch)
    assert sorted(int(f) for f in found) == list(range(12))
    assert {id(f) for f in found} == {id(x) for x in t}


def test_find_tensors_of_tensors_without_memory_of_their_own():
    sparse, csr = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    csc = torch.eye(3).to_sparse_csc()
    pointers = {t.data_ptr() for t in find_tensors([sparse, csr, csc])}
    assert pointers >= {
        sparse._indices().data_ptr(),
        sparse._values().data_ptr(),
        csr.crow_indices().data_ptr(),
        csr.col_indices().data_ptr(),
        csr.values().data_ptr(),
        csc.ccol_indices().data_ptr(),
    }
    jagged = torch.nested.nested_tensor([ones(1), ones(2)], layout=torch.jagged)
    found = find_tensors(jagged)
    assert any(t is jagged.values() or t.data_ptr() == jagged.values().data_ptr() for t in found)
    assert all(type(t) is torch.Tensor for t in found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strided = torch.nested.nested_tensor([ones(1), ones(2)])
        quantized = torch.quantize_per_tensor(ones(3), 0.1, 0, torch.qint8)
    assert find_tensors(strided)[0].data_ptr() == strided.values().data_ptr()
    assert find_tensors([quantized])[0].untyped_storage().data_ptr() == quantized.untyped_storage().data_ptr()


def test_find_tensors_of_subclasses_and_gradients():
    sub = ones(1).as_subclass(AttributeTensor)
    sub.mask = [torch.zeros(1)]
    found = find_tensors((sub,))
    assert found[0] is sub
    assert found[1] is sub.mask[0]
    parameter = torch.nn.Parameter(ones(1))
    (parameter * 2).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = find_tensors([parameter, parameter * 2])
    assert found[0] is parameter
    assert any(t is parameter.grad for t in found)
    assert len(found) == 3


def test_find_tensors_is_bounded(monkeypatch):
    monkeypatch.setattr(search, "_MAX_VISITED", 10)
    with pytest.warns(RuntimeWarning, match="ended after"):
        find_tensors([[[]] for _ in range(100)])
    assert find_tensors(list(range(10_000))) == []
    assert find_tensors("text") == []


def test_copies_of_specs_are_not_needed():
    spec, leaves = taken([ones(1)])
    assert copy.copy(containers.LEAF) is containers.LEAF
    assert unflatten(copy.deepcopy(spec), leaves)[0] is leaves[0]
