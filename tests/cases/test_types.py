"""What comes out has the type of what went in: cases T1-T5; contracts C12 (types), C16 (nothing moved twice)."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import pathlib
import re
import time
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import attrs
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from prefetchpipe import GPUPrefetcher
from tests.support import (
    assert_same,
    collect,
    constants,
    is_cuda,
    is_simulated,
    leaves_of,
    same_bytes,
    settle,
    to_plain,
)

pytestmark = pytest.mark.timeout(60)


def through(device: Any, *batches: Any, **options: Any) -> list[Any]:
    """The batches after a pass, and the same again from a second one, settled."""
    prefetcher = GPUPrefetcher(list(batches), device, **options)
    first = list(prefetcher)
    second = list(prefetcher)
    settle(device)
    assert len(first) == len(second) == len(batches)
    assert [type(batch) for batch in first] == [type(batch) for batch in second]
    return first


def assert_on(device: Any, *tensors: torch.Tensor) -> None:
    if is_cuda(device):
        assert all(tensor.is_cuda for tensor in tensors)
    elif not is_simulated(device):
        assert all(tensor.device.type == "cpu" for tensor in tensors)


# Case T1, containers


class Point(NamedTuple):
    x: Any
    y: Any = "default"


class PointWithMethod(Point):
    __slots__ = ()

    def __new__(cls, both: Any) -> Self:
        return super().__new__(cls, both, both)


class NamedList(list):
    def __init__(self, name: str, items: Any) -> None:
        super().__init__(items)
        self.name = name


class NamedTupleLike(tuple):  # noqa: SLOT001  attributes are the point
    def __new__(cls, name: str, items: Any) -> Self:
        made = super().__new__(cls, items)
        made.name = name
        return made


class NamedDict(dict):
    def __init__(self, name: str, /, **items: Any) -> None:
        super().__init__(**items)
        self.name = name


class AttributeDict(dict):
    """Keys are attributes too, as in easydict, addict and argparse-like batches."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class NamedUserDict(collections.UserDict):
    def __init__(self, data: Any, name: str) -> None:
        super().__init__(data)
        self.name = name


@dataclasses.dataclass
class Sample:
    x: Any
    label: str = "cat"


@dataclasses.dataclass
class Inherited(Sample):
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    label: str = "cat"


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    label: str = "cat"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSlotted:
    x: Any
    label: str = "cat"


@dataclasses.dataclass
class PostInit:
    """Made again by its constructor, it would count twice and scale twice."""

    x: Any
    scale: dataclasses.InitVar[float]
    label: str = "cat"
    derived: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self, scale: float) -> None:
        self.x = self.x * scale
        self.derived = self.x + 1


@attrs.define
class Attrs:
    x: Any
    label: str = "cat"


@attrs.frozen
class AttrsFrozen:
    x: Any
    label: str = "cat"


@attrs.define
class AttrsPrivate:
    _x: Any
    label: str = attrs.field(default="cat", init=False)

    @property
    def x(self) -> Any:
        return self._x


X = "the tensor"


def tensor() -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).view(3, 4)


def post_init(x: torch.Tensor) -> PostInit:
    batch = PostInit(x, 2.0)
    batch.x = x
    return batch


def default_dict(x: torch.Tensor) -> Any:
    return collections.defaultdict(list, b=x, a=["s"])


@dataclasses.dataclass(frozen=True)
class Container:
    make: Callable[[torch.Tensor], Any]
    get: Callable[[Any], torch.Tensor]
    rest: Callable[[Any], Any] = lambda batch: None
    """What must be equal before and after, besides the type and the tensor."""


def item(key: Any) -> Callable[[Any], Any]:
    return lambda batch: batch[key]


def labelled(make: Callable[[torch.Tensor], Any]) -> Container:
    return Container(make, lambda batch: batch.x, lambda batch: batch.label)


CONTAINERS: dict[str, Container] = {
    "tensor": Container(lambda x: x, lambda batch: batch),
    "tuple": Container(lambda x: (1, x, "s"), item(1), lambda b: (b[0], b[2], len(b))),
    "tuple of one": Container(lambda x: (x,), item(0), len),
    "list": Container(lambda x: [1, x, None], item(1), lambda b: (b[0], b[2], len(b))),
    "deque": Container(lambda x: collections.deque([x, 1], maxlen=5), item(0), lambda b: (b.maxlen, len(b), b[1])),
    "dict": Container(lambda x: {"b": x, "a": 1}, item("b"), lambda b: (list(b), b["a"])),
    "dict with keys that do not sort": Container(
        lambda x: {"b": 1, 3: x, None: 2, (1, "t"): 4, 2.5: 5}, item(3), lambda b: (list(b), b[None], b[1, "t"])
    ),
    "namedtuple": Container(Point, lambda b: b.x, lambda b: b.y),
    "namedtuple subclass": Container(PointWithMethod, lambda b: b.y, lambda b: b._fields),
    "structseq": Container(lambda x: torch.max(x, 0), lambda b: b.values, lambda b: b.indices.tolist()),
    "list subclass": Container(lambda x: NamedList("n", [x, 1]), item(0), lambda b: (b.name, b[1], len(b))),
    "tuple subclass": Container(lambda x: NamedTupleLike("n", [x, 1]), item(0), lambda b: (b.name, b[1], len(b))),
    "dict subclass": Container(lambda x: NamedDict("n", b=x, a=1), item("b"), lambda b: (b.name, list(b), b["a"])),
    "dict of attributes": Container(lambda x: AttributeDict(x=x, a=1), lambda b: b.x, lambda b: (list(b), b.a)),
    "OrderedDict": Container(lambda x: collections.OrderedDict(b=x, a=1), item("b"), lambda b: (list(b), b["a"])),
    "defaultdict": Container(default_dict, item("b"), lambda b: (b.default_factory, list(b), b["a"])),
    "UserDict": Container(lambda x: collections.UserDict(b=x, a=1), item("b"), lambda b: (list(b), b["a"])),
    "UserDict subclass": Container(lambda x: NamedUserDict({"b": x}, "n"), item("b"), lambda b: (list(b), b.name)),
    "dataclass": labelled(lambda x: Sample(x, "dog")),
    "inherited dataclass": Container(lambda x: Inherited("x", "dog", x), lambda b: b.extra, lambda b: (b.x, b.label)),
    "frozen dataclass": labelled(lambda x: Frozen(x, "dog")),
    "dataclass with slots": labelled(lambda x: Slotted(x, "dog")),
    "frozen dataclass with slots": labelled(lambda x: FrozenSlotted(x=x, label="dog")),
    "dataclass with __post_init__": Container(post_init, lambda b: b.x, lambda b: (b.label, b.derived[0, 1].item())),
    "attrs": labelled(lambda x: Attrs(x, "dog")),
    "frozen attrs": labelled(lambda x: AttrsFrozen(x, "dog")),
    "attrs with private names": labelled(AttrsPrivate),
    "nested": Container(
        lambda x: {"a": [({"b": Point(Sample((x,)))},)], "c": ()},
        lambda b: b["a"][0][0]["b"].x.x[0],
        lambda b: (type(b["a"][0][0]["b"]), type(b["a"][0][0]["b"].x), b["c"]),
    ),
}


@pytest.mark.parametrize("name", list(CONTAINERS))
def test_c12_t1_containers_keep_type_and_attributes(device: Any, fetch: str, name: str) -> None:
    case = CONTAINERS[name]
    source = tensor()
    expected = case.make(source.clone())
    batch = case.make(source)
    held = case.get(batch)
    out = through(device, batch, batch, fetch=fetch)
    for one in out:
        assert type(one) is type(batch)
        assert same_bytes(case.get(one), case.get(expected))
        assert case.rest(one) == case.rest(expected)
        assert_on(device, case.get(one))
    assert case.get(batch) is held
    assert same_bytes(case.get(batch), case.get(expected))
    assert case.rest(batch) == case.rest(expected)
    assert case.get(out[0]).data_ptr() != case.get(out[1]).data_ptr()


@pytest.mark.parametrize("empty", [(), [], {}, [[], {}], {"a": ()}, collections.OrderedDict(), collections.deque()])
def test_c12_t1_empty_containers(device: Any, empty: Any) -> None:
    (out,) = through(device, empty)
    assert out == empty
    assert type(out) is type(empty)


def test_c12_t1_user_attributes_on_a_dict_subclass_instance(device: Any) -> None:
    batch = NamedDict("n", x=tensor())
    batch.source = ("shard", 7)
    (out,) = through(device, batch)
    assert vars(out) == {"name": "n", "source": ("shard", 7)}


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class MyString(str):
    __slots__ = ()


class Opaque:
    def __init__(self) -> None:
        self.x = tensor()


class LooksLikeASequence:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nobody asked for this")

    def __bool__(self) -> bool:
        raise AssertionError("nobody asked for this")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("nobody asked for this")

    __hash__ = None


UNKNOWN: dict[str, Any] = {
    "str": "text",
    "str subclass": MyString("text"),
    "bytes": b"bytes",
    "None": None,
    "bool": True,
    "int": 10**40,
    "float": 1.5,
    "complex": 1j,
    "enum": Color.RED,
    "int enum": Level.HIGH,
    "Decimal": decimal.Decimal("1.10"),
    "Fraction": fractions.Fraction(1, 3),
    "datetime": dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
    "uuid": uuid.UUID(int=5),
    "path": pathlib.PurePosixPath("/a/b"),
    "pattern": re.compile("a"),
    "slice": slice(1, 5),
    "function": tensor,
    "class": Opaque,
    "module": types,
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "generator": torch.Generator(),
    "opaque": Opaque(),
    "sequence-like": LooksLikeASequence(),
    "namespace": types.SimpleNamespace(a=1),
}


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_c12_t1_unknown_objects_pass_through_untouched(device: Any, name: str) -> None:
    unknown = UNKNOWN[name]
    bare, in_dict = through(device, unknown, {"x": tensor(), "unknown": unknown})
    assert bare is unknown
    assert in_dict["unknown"] is unknown
    assert same_bytes(in_dict["x"], tensor())


@pytest.mark.parametrize("value", [torch.Size([2, 3]), range(1, 10, 3), bytearray(b"ab"), {"a", "b"}, frozenset([1])])
def test_c12_t1_values_that_look_like_containers(device: Any, value: Any) -> None:
    bare, in_dict = through(device, value, {"x": tensor(), "value": value})
    for out in (bare, in_dict["value"]):
        assert type(out) is type(value)
        assert out == value


@pytest.mark.parametrize("kind", ["list", "dict", "through a tuple"])
def test_c12_t1_self_references(device: Any, kind: str) -> None:
    batch: Any
    if kind == "list":
        batch = [tensor()]
        batch.append(batch)
    elif kind == "dict":
        batch = {0: tensor()}
        batch[1] = batch
    else:
        batch = [tensor()]
        batch.append((batch, "s"))
    (out,) = through(device, batch)
    assert type(out) is type(batch)
    assert same_bytes(out[0], tensor())
    assert out is not batch
    assert (out[1][0] if kind == "through a tuple" else out[1]) is out
    assert (batch[1][0] if kind == "through a tuple" else batch[1]) is batch


def test_c12_t1_a_cycle_without_tensors(device: Any) -> None:
    notes: list[Any] = ["note"]
    notes.append(notes)
    (out,) = through(device, {"x": tensor(), "notes": notes})
    assert out["notes"][0] == "note"
    assert out["notes"][1][1][1][0] == "note"


def test_c12_t1_one_tensor_in_two_places(device: Any) -> None:
    x = tensor()
    (out,) = through(device, {"a": x, "b": [x]})
    assert same_bytes(out["a"], tensor())
    assert out["b"][0].data_ptr() == out["a"].data_ptr()


def test_c12_t1_packed_sequence(device: Any) -> None:
    rows = [torch.arange(2.0), torch.arange(5.0), torch.arange(3.0)]
    batch = pack_sequence(rows, enforce_sorted=False)
    (out,) = through(device, batch)
    assert type(out) is PackedSequence
    assert_on(device, out.data, out.sorted_indices)
    assert out.batch_sizes.device.type == "cpu"
    padded, lengths = pad_packed_sequence(out, batch_first=True)
    expected, expected_lengths = pad_packed_sequence(batch, batch_first=True)
    assert same_bytes(padded, expected)
    assert same_bytes(lengths, expected_lengths)
    (sorted_out,) = through(device, pack_sequence(sorted(rows, key=len, reverse=True)))
    assert sorted_out.sorted_indices is None


def test_c12_t1_tensordict(device: Any) -> None:
    batch = TensorDict({"a": tensor(), "b": {"c": torch.arange(3)}, "s": "text"}, batch_size=[3])
    (out,) = through(device, batch)
    assert type(out) is TensorDict
    assert out.batch_size == torch.Size([3])
    assert set(out.keys()) == {"a", "b", "s"}
    assert same_bytes(out["a"], tensor())
    assert same_bytes(out["b", "c"], torch.arange(3))
    assert out["s"] == "text"
    assert_on(device, out["a"], out["b", "c"])
    assert batch["a"].device.type == "cpu"


class Boxes(torch.Tensor):
    """A tensor with attributes, which plain `.to` would lose."""

    @classmethod
    def wrap(cls, data: torch.Tensor, canvas: tuple[int, int]) -> Boxes:
        made = data.as_subclass(cls)
        made.canvas = canvas
        return made


def test_c12_t1_tensor_subclass_with_attributes(device: Any) -> None:
    batch = {"boxes": Boxes.wrap(tensor(), (640, 480)), "image": tensor()}
    held = batch["boxes"]
    (out,) = through(device, batch)
    assert type(out["boxes"]) is Boxes
    assert type(out["image"]) is torch.Tensor
    assert out["boxes"].canvas == (640, 480)
    assert same_bytes(out["boxes"].as_subclass(torch.Tensor), tensor())
    assert_on(device, out["boxes"])
    assert batch["boxes"] is held
    assert held.canvas == (640, 480)


class Encoding(collections.UserDict):
    """A mapping with `.data` and a `.to` that writes to itself, as tokenizers return."""

    def __init__(self, data: Any = None, encodings: Any = None, n_sequences: int | None = None) -> None:
        super().__init__(data)
        self.encodings = encodings
        self.n_sequences = n_sequences

    def to(self, device: Any, *, non_blocking: bool = False) -> Encoding:
        self.data = {
            key: value.to(device=device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
            for key, value in self.data.items()
        }
        return self


def test_c12_t1_mapping_with_to_and_data(device: Any) -> None:
    ids = torch.arange(10)
    batch = Encoding({"input_ids": ids, "words": ["a", "b"]}, encodings=["fast"], n_sequences=1)
    (out,) = through(device, batch)
    assert type(out) is Encoding
    assert same_bytes(out["input_ids"], torch.arange(10))
    assert (out["words"], out.encodings, out.n_sequences) == (["a", "b"], ["fast"], 1)
    assert_on(device, out["input_ids"])
    assert batch["input_ids"] is ids
    assert ids.device.type == "cpu"


class Graph:
    """No container that anyone knows, with `.to` and `.pin_memory` of its own."""

    def __init__(self, x: torch.Tensor, name: str) -> None:
        self.x = x
        self.name = name

    def to(self, device: Any, *args: Any, **kwargs: Any) -> Graph:
        return type(self)(self.x.to(device, *args, **kwargs), self.name)

    def pin_memory(self) -> Graph:
        return type(self)(self.x.pin_memory(), self.name)


class GraphWithBareTo(Graph):
    def to(self, device: Any) -> Graph:
        return type(self)(self.x.to(device), self.name)

    pin_memory = None


@pytest.mark.parametrize("kind", [Graph, GraphWithBareTo])
def test_c12_t1_object_with_to(device: Any, kind: type[Graph]) -> None:
    graph = kind(tensor(), "g")
    bare, in_dict = through(device, graph, {"y": tensor(), "graph": graph})
    for out in (bare, in_dict["graph"]):
        assert type(out) is kind
        assert out.name == "g"
        assert same_bytes(out.x, tensor())
        assert_on(device, out.x)
    assert graph.x.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_c5_t1_object_with_to_may_be_reused_by_the_source(fetch: str) -> None:
    graph = Graph(torch.zeros(100), "g")

    def rows() -> Iterator[Graph]:
        for index in range(6):
            graph.x.fill_(index)
            yield graph
        graph.x.fill_(-1)

    kept = list(GPUPrefetcher(rows(), "cuda", depth=3, fetch=fetch))
    settle("cuda")
    assert [(float(out.x.min()), float(out.x.max())) for out in kept] == constants(range(6))


# Case T2, NumPy

NUMERIC = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("code", NUMERIC)
def test_c12_t2_numeric_arrays_become_tensors(device: Any, code: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(code)
    expected = torch.from_numpy(array.copy())
    bare, in_dict = through(device, array, {"a": [array]})
    for out in (bare, in_dict["a"][0]):
        assert type(out) is torch.Tensor
        assert same_bytes(out, expected)
        assert_on(device, out)
    array.fill(0)
    assert same_bytes(bare, expected)


ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "0-d": lambda: np.array(2.5),
    "empty": lambda: np.empty((0, 3), dtype=np.float32),
    "negative strides": lambda: np.arange(12.0).reshape(3, 4)[::-1, ::-1],
    "strided": lambda: np.arange(24.0).reshape(4, 6)[::2, 1::2],
    "fortran": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "transposed": lambda: np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (4, 3)),
    "read-only": lambda: read_only(np.arange(5)),
    "read-only bytes": lambda: np.frombuffer(b"abcdef", dtype=np.uint8),
    "unaligned": lambda: np.frombuffer(b"x" + np.arange(4.0).tobytes(), dtype=np.uint8)[1:].view(np.float64),
    "byte-swapped": lambda: np.arange(5, dtype=">f4"),
    "column of a structured array": lambda: np.array([(1, 2.5), (3, 4.5)], dtype="i2,f8")["f1"],
}


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("name", list(ARRAYS))
def test_c12_t2_arrays_of_every_layout(device: Any, name: str) -> None:
    array = ARRAYS[name]()
    expected = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    bare, in_dict = through(device, array, {"a": array, "x": tensor()})
    for out in (bare, in_dict["a"]):
        assert type(out) is torch.Tensor
        assert same_bytes(out, expected)
    assert same_bytes(in_dict["x"], tensor())


def test_c12_t2_memory_mapped_array(device: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(1000.0))
    mapped = np.load(path, mmap_mode="r")
    bare, part = through(device, mapped, {"a": mapped[10:20]})
    assert same_bytes(bare, torch.arange(1000, dtype=torch.float64))
    assert same_bytes(part["a"], torch.arange(10, 20, dtype=torch.float64))


OTHER_ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "str": lambda: np.array(["a", "bcd"]),
    "bytes": lambda: np.array([b"a", b"bcd"]),
    "object": lambda: np.array([{"a": 1}, None, "s"], dtype=object),
    "datetime": lambda: np.array(["2024-01-02", "NaT"], dtype="datetime64[s]"),
    "timedelta": lambda: np.array([1, 2], dtype="timedelta64[ms]"),
    "structured": lambda: np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "void": lambda: np.array([b"abc"], dtype="V3"),
    "2-d str": lambda: np.array([["a", "b"], ["c", "d"]]),
}


@pytest.mark.parametrize("name", list(OTHER_ARRAYS))
def test_c12_t2_other_arrays_are_copied_and_stay_arrays(device: Any, name: str) -> None:
    array = OTHER_ARRAYS[name]()
    expected = array.tolist()
    bare, in_dict = through(device, array, {"a": array, "x": tensor()})
    for out in (bare, in_dict["a"]):
        assert type(out) is np.ndarray
        assert out.dtype == array.dtype
        assert out.tolist() == expected
        assert not np.shares_memory(out, array)


@pytest.mark.parametrize(
    "scalar",
    [np.float32(1.5), np.int64(3), np.bool_(True), np.str_("a"), np.datetime64("2024-01-02"), np.complex64(1j)],
)
def test_c12_t2_scalars_pass_through(device: Any, scalar: Any) -> None:
    bare, in_dict = through(device, scalar, {"a": scalar, "x": tensor()})
    for out in (bare, in_dict["a"]):
        assert type(out) is type(scalar)
        assert out == scalar


@pytest.mark.filterwarnings("error")
def test_c12_t2_read_only_arrays_give_writable_tensors_without_a_warning(device: Any) -> None:
    array = read_only(np.arange(5.0))
    (out,) = through(device, {"a": array})
    out["a"].add_(1)
    settle(device)
    assert array.tolist() == [0, 1, 2, 3, 4]


# Case T3, tensors

EXTRA_DTYPES = [
    name
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]
DTYPES = [
    *[
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ],
    *["complex32", "complex64", "complex128"],
    *EXTRA_DTYPES,
]


def of_dtype(name: str, count: int = 24) -> torch.Tensor:
    dtype = getattr(torch, name)
    if dtype is torch.bool:
        return torch.arange(count) % 3 == 0
    return torch.arange(1, count * dtype.itemsize + 1, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_c12_t3_every_dtype_bit_for_bit(device: Any, fetch: str, name: str) -> None:
    bare, in_dict = through(
        device,
        of_dtype(name),
        {"odd": of_dtype("uint8", 3), "a": of_dtype(name).view(2, 12), "t": tensor()},
        fetch=fetch,
    )
    assert same_bytes(bare, of_dtype(name))
    assert same_bytes(in_dict["a"], of_dtype(name).view(2, 12))
    assert same_bytes(in_dict["odd"], of_dtype("uint8", 3))
    assert same_bytes(in_dict["t"], tensor())
    assert in_dict["a"].data_ptr() % getattr(torch, name).itemsize == 0
    assert_on(device, bare, in_dict["a"])


def test_c12_t3_all_dtypes_and_odd_sizes_in_one_batch(device: Any, fetch: str) -> None:
    batch = {f"{name} {count}": of_dtype(name, count) for count in (1, 3, 7, 65) for name in DTYPES}
    for out in through(device, batch, batch, fetch=fetch):
        for key, expected in batch.items():
            assert same_bytes(out[key], expected), key
            assert out[key].data_ptr() % expected.dtype.itemsize == 0


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return tensor() + 1


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "empty in the middle": lambda: torch.empty(2, 0, 3, dtype=torch.int16),
    "offset view": lambda: torch.arange(20.0)[3:11],
    "odd offset": lambda: torch.arange(20, dtype=torch.uint8)[3:11],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "scalar expanded": lambda: torch.tensor(7).expand(5),
    "transposed": lambda: tensor().t(),
    "permuted": lambda: torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.arange(240.0).view(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    "strided slice": lambda: torch.arange(40.0).view(5, 8)[::2, 1::3],
    "column": lambda: torch.arange(40.0).view(5, 8)[:, 2],
    "overlapping windows": lambda: torch.arange(10.0).unfold(0, 4, 1),
    "diagonal": lambda: torch.arange(16.0).view(4, 4).diagonal(),
    "conj view": lambda: torch.complex(tensor(), tensor() + 1).conj(),
    "imaginary part": lambda: torch.complex(tensor(), tensor() + 1).imag,
    "imaginary part of a conj view": lambda: torch.complex(tensor(), tensor() + 1).conj().imag,
    "neg view": lambda: torch._neg_view(tensor()),
    "requires grad": lambda: tensor().requires_grad_(),
    "part of a graph": lambda: tensor().requires_grad_() * 2,
    "parameter": lambda: torch.nn.Parameter(tensor()),
    "inference": inference_tensor,
    "read-only": lambda: torch.frombuffer(bytearray(b"abcdefgh"), dtype=torch.uint8),
    "shared memory": lambda: tensor().share_memory_(),
}


def is_dense(source: torch.Tensor) -> bool:
    """Non-overlapping and without gaps, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(source.stride(), source.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_c12_t3_every_layout(device: Any, fetch: str, name: str) -> None:
    source = LAYOUTS[name]()
    before = source.detach().clone()
    outs = through(device, source, {"a": source, "other": tensor()}, fetch=fetch)
    for out in (outs[0], outs[1]["a"]):
        assert isinstance(out, torch.Tensor)
        assert out.dtype == source.dtype
        assert out.shape == source.shape
        assert same_bytes(out, before)
        assert out.requires_grad == source.requires_grad
        if is_dense(source) and source.numel():
            assert out.stride() == source.stride()
        assert_on(device, out)
    assert same_bytes(outs[1]["other"], tensor())
    assert same_bytes(source, before)


def test_c12_t3_memory_mapped_tensor(device: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.pt"
    torch.save(torch.arange(1000.0), path)
    mapped = torch.load(path, mmap=True)
    bare, part = through(device, mapped, {"a": mapped[10:20]})
    assert same_bytes(bare, torch.arange(1000.0))
    assert same_bytes(part["a"], torch.arange(10.0, 20.0))


SHARED: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "overlapping slices": lambda: (base := torch.arange(10.0), (base[:6], base[3:]))[1],
    "a whole and a part": lambda: (base := torch.arange(10.0), (base, base[4:6]))[1],
    "a weight and its transpose": lambda: (base := tensor(), (base, base.t()))[1],
    "two dtypes of one memory": lambda: (base := torch.arange(10.0), (base, base.view(torch.int32)))[1],
    "a part and the whole": lambda: (base := torch.arange(10.0), (base[4:6], base))[1],
}


@pytest.mark.parametrize("name", list(SHARED))
def test_c12_t3_shared_storages_stay_shared(device: Any, name: str) -> None:
    one, other = SHARED[name]()
    batch = {"one": one, "apart": tensor(), "other": [other]}
    (out,) = through(device, batch)
    assert same_bytes(out["one"], one)
    assert same_bytes(out["other"][0], other)
    assert out["one"].stride() == one.stride()
    assert out["other"][0].stride() == other.stride()
    assert out["other"][0].data_ptr() - out["one"].data_ptr() == other.data_ptr() - one.data_ptr()
    one.fill_(123)
    out["one"].fill_(123)
    settle(device)
    assert same_bytes(out["other"][0], other)
    assert same_bytes(out["apart"], tensor())


def test_c12_t3_leaves_that_share_nothing_do_not_after_either(device: Any) -> None:
    batch = [torch.full((count,), float(count)) for count in (1, 2, 3, 5, 8, 13)]
    (out,) = through(device, batch)
    for index in range(len(out)):
        out[index].fill_(-1)
        settle(device)
        for later in range(index + 1, len(out)):
            assert same_bytes(out[later], batch[later])


def test_c12_t3_a_small_view_of_a_large_storage_does_not_move_all_of_it(device: Any) -> None:
    large = torch.arange(1_000_000.0)
    prefetcher = GPUPrefetcher([{"a": large[10:20]}] * 3, device)
    for batch in collect(device, prefetcher):
        assert same_bytes(batch["a"], large[10:20])
    assert prefetcher.stats().copied_bytes < 100_000


SPECIAL: dict[str, Callable[[], torch.Tensor]] = {
    "sparse COO": lambda: torch.eye(4).to_sparse(),
    "sparse COO, not coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 3.0]), (4,), check_invariants=True
    ),
    "sparse CSR": lambda: torch.eye(4).to_sparse_csr(),
    "sparse CSC": lambda: torch.eye(4).to_sparse_csc(),
    "sparse BSR": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", list(SPECIAL))
def test_c12_t3_sparse_tensors(device: Any, name: str) -> None:
    source = SPECIAL[name]()
    bare, in_dict = through(device, source, {"a": source, "x": tensor()})
    for out in (bare, in_dict["a"]):
        assert out.layout == source.layout
        assert same_bytes(out.to_dense(), source.to_dense())
        if source.layout is torch.sparse_coo:
            assert out.is_coalesced() == source.is_coalesced()
        assert_on(device, out)
    assert same_bytes(in_dict["x"], tensor())


def test_c12_t3_jagged_nested_tensor(device: Any) -> None:
    rows = [torch.arange(2.0), torch.arange(5.0), torch.arange(3.0)]
    source = torch.nested.nested_tensor(rows, layout=torch.jagged)
    bare, in_dict = through(device, source, {"a": source, "x": tensor()})
    for out in (bare, in_dict["a"]):
        assert out.is_nested
        assert_same([to_plain(row) for row in out.unbind()], rows)
        assert_on(device, out)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_c12_t3_quantized_tensor(device: Any) -> None:
    source = torch.quantize_per_tensor(tensor(), 0.5, 2, torch.qint8)
    bare, in_dict = through(device, source, {"a": source, "x": tensor()})
    for out in (bare, in_dict["a"]):
        assert out.dtype == torch.qint8
        assert (out.q_scale(), out.q_zero_point()) == (0.5, 2)
        assert same_bytes(out.dequantize(), source.dequantize())


def test_c12_t3_meta_tensor_does_what_plain_to_does(device: Any) -> None:
    source = torch.empty(3, 4, device="meta")
    try:
        source.to("cuda" if is_cuda(device) else "cpu")
    except NotImplementedError:
        try:
            (out,) = through(device, {"a": source})
        except NotImplementedError:
            return
        assert out["a"].is_meta
    else:
        raise AssertionError("torch has learned something new")


def test_c12_t3_grad_flows_nowhere_by_accident(device: Any) -> None:
    """A batch of plain data does not require grad, whatever the mode of this thread."""
    with torch.enable_grad():
        (out,) = through(device, {"a": tensor()})
    assert not out["a"].requires_grad
    assert out["a"].grad_fn is None


# Case T4, leaves that need no copy, or not the whole way


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_c16_t4_leaves_already_on_the_device_are_the_same_objects() -> None:
    there = torch.arange(5.0, device="cuda")
    batch = {"there": there, "here": tensor(), "pinned": tensor().pin_memory(), "nested": [(there,)]}
    (out,) = through("cuda", batch)
    assert out["there"] is there
    assert out["nested"][0][0] is there
    assert_on("cuda", out["here"], out["pinned"])
    assert_same(to_plain(out), to_plain(batch))
    (bare,) = through("cuda", there)
    assert bare is there


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_c12_t4_leaves_on_another_device_are_moved() -> None:
    source = torch.arange(5.0, device="cuda")
    (out,) = through("cpu", {"a": source, "b": tensor()})
    assert out["a"].device.type == "cpu"
    assert_same(to_plain(out), {"a": torch.arange(5.0), "b": tensor()})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_c12_t4_leaves_on_another_cuda_device_are_moved() -> None:
    source = torch.arange(5.0, device="cuda:0")
    (out,) = through("cuda:1", {"a": source, "b": tensor()})
    assert out["a"].device == torch.device("cuda:1")
    assert_same(to_plain(out), {"a": torch.arange(5.0), "b": tensor()})


def test_c16_t4_leaves_of_a_simulated_device_are_not_copied_again(sim: Any) -> None:
    kept: list[Any] = []

    class Inner:
        def __iter__(self) -> Iterator[Any]:
            for batch in GPUPrefetcher([{"a": torch.full((100,), float(i))} for i in range(5)], sim):
                kept.append(batch)
                yield batch

    out = []
    for index, batch in enumerate(GPUPrefetcher(Inner(), sim)):
        assert batch["a"] is kept[index]["a"]
        out.append(batch)
    settle(sim)
    assert [float(b["a"][7]) for b in out] == [0, 1, 2, 3, 4]
    assert sim.copies == 5


@pytest.mark.parametrize("mixed", [False, True], ids=["pinned", "mixed"])
def test_c16_t4_pinned_batches_are_not_staged_again(stream_device: Any, fetch: str, mixed: bool) -> None:
    def pinned(value: float) -> torch.Tensor:
        plain = torch.full((500_000,), value)
        return stream_device.pin_memory(plain) if is_simulated(stream_device) else plain.pin_memory()

    batches = [{"a": pinned(i), "b": torch.full((10,), float(i)) if mixed else "s"} for i in range(6)]
    prefetcher = GPUPrefetcher(batches, stream_device, fetch=fetch)
    kept = list(prefetcher)
    settle(stream_device)
    assert_same([to_plain(batch) for batch in kept], [to_plain(batch) for batch in batches])
    stats = prefetcher.stats()
    assert stats.staged_bytes < 2_000_000 if mixed else stats.staged_bytes == 0
    assert stats.copied_bytes >= 6 * 2_000_000


def test_c16_t4_pageable_batches_are_staged_and_copied_once(stream_device: Any) -> None:
    prefetcher = GPUPrefetcher([torch.full((500_000,), float(i)) for i in range(6)], stream_device)
    assert [float(batch[9]) for batch in collect(stream_device, prefetcher)] == [0, 1, 2, 3, 4, 5]
    stats = prefetcher.stats()
    assert stats.batches == 6
    assert 6 * 2_000_000 <= stats.staged_bytes <= 6 * 2_000_000 * 1.05
    assert 6 * 2_000_000 <= stats.copied_bytes <= 6 * 2_000_000 * 1.05


# Case T5, much that is no tensor


@pytest.mark.slow
def test_c16_t5_a_long_list_is_walked_once(device: Any) -> None:
    """A walk over a million ints takes ten milliseconds in any language; none is made after the first two batches."""
    ids = list(range(10**6))
    raw = bytes(10**6)
    batches = [{"x": torch.full((10,), float(i)), "ids": ids, "raw": raw} for i in range(12)]
    iterator = iter(GPUPrefetcher(batches, device, fetch="caller"))
    seconds = []
    for index in range(12):
        begin = time.perf_counter()
        batch = next(iterator)
        seconds.append(time.perf_counter() - begin)
        assert len(batch["ids"]) == 10**6
        assert batch["ids"][-1] == 10**6 - 1
        assert batch["raw"] == raw
        settle(device)
        assert float(batch["x"][3]) == index
    assert min(seconds[2:]) < 4e-3


def test_c16_t5_many_leaves_keep_their_places(device: Any, fetch: str) -> None:
    def make(index: int) -> dict[str, torch.Tensor]:
        return {f"{k}": torch.full((k % 5 + 1,), index * 1000 + k, dtype=torch.int64) for k in range(500)}

    kept = list(GPUPrefetcher([make(i) for i in range(4)], device, fetch=fetch))
    settle(device)
    for index, batch in enumerate(kept):
        assert list(batch) == list(make(index))
        assert all(same_bytes(a, b) for a, b in zip(leaves_of(batch), leaves_of(make(index)), strict=True))
