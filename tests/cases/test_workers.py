"""Worker processes that pack into shared memory give what the plain DataLoader gives; every option of it works."""

from __future__ import annotations

import collections
import copy
import decimal
import functools
import gc
import itertools
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from prefetchpipe import GPUPrefetcher
from prefetchpipe.errors import IteratorClosedError, PrefetchWarning
from prefetchpipe.pipeline.shared import Shared
from prefetchpipe.pipeline.twins import Twins
from prefetchpipe.testing import SimulatedDevice
from tests.cases import test_types
from tests.described import described
from tests.support import TIMEOUT, Surroundings, Thread, is_simulated, settle

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]


def shared(device: Any, loader: Any, **options: Any) -> list[Any]:
    """All batches, described; the pass is checked to have taken the worker path, and to leave nothing behind."""
    with GPUPrefetcher(loader, device, workers="shared", **options) as prefetcher:
        kept = list(prefetcher)
        settle(device)
        stats = prefetcher.stats()
    assert stats.workers == "shared", stats.workers_reason
    if is_simulated(device):
        assert device.pinned_bytes == 0
    return [described(batch) for batch in kept]


def plain(loader: Any) -> list[Any]:
    return [described(batch) for batch in loader]


def first(samples: list[Any]) -> Any:
    return samples[0]


class Made(Dataset):
    """Item `(name, number)` is made by a function of that name, in the worker."""

    def __init__(self, functions: dict[str, Callable[[int], Any]]) -> None:
        self.functions = functions

    def __getitem__(self, key: tuple[str, int]) -> Any:
        torch.manual_seed(key[1])
        return self.functions[key[0]](key[1])


def one_batch_each(functions: dict[str, Callable[[int], Any]], size: int = 3) -> list[list[tuple[str, int]]]:
    return [[(name, number) for number in range(size)] for name in functions]


def assert_equal_by_name(names: Any, got: list[Any], want: list[Any]) -> None:
    for name, one, other in zip(names, got, want, strict=True):
        assert one == other, name


# Equality: torch's own collate rules


class Point(NamedTuple):
    x: Any
    y: Any


class MyDict(dict):
    pass


class MyList(list):
    pass


class Boxes(torch.Tensor):
    pass


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(1, 100, (count,), dtype=torch.uint8).view(dtype).view(shape)


BASE = torch.arange(30.0)
DTYPES = [getattr(torch, name) for name in test_types.DTYPES]

COLLATED: dict[str, Callable[[int], Any]] = {
    **{f"{dtype}": functools.partial(lambda i, dtype: of(dtype, 3, 5), dtype=dtype) for dtype in DTYPES},
    **{f"0-d {dtype}": functools.partial(lambda i, dtype: of(dtype, 1)[0], dtype=dtype) for dtype in DTYPES[:9]},
    "int": lambda i: i,
    "large int": lambda i: 2**40 + i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "int and float": lambda i: (1, 2.5, 3)[i],
    "float and int": lambda i: (1.5, 2, 3)[i],
    "str": lambda i: "abc"[i],
    "bytes": lambda i: b"abc"[i : i + 1],
    "empty": lambda i: torch.empty(0, 4),
    "large": lambda i: torch.full((700, 400), float(i)),
    "expanded": lambda i: torch.tensor([float(i)]).expand(4, 3),
    "transposed": lambda i: torch.rand(3, 4).t(),
    "channels_last": lambda i: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "strided": lambda i: torch.rand(8, 8)[::2, 1::3],
    "view of one storage": lambda i: BASE[i : i + 5],
    "the same object": lambda i: BASE,
    "subclass": lambda i: torch.rand(3).as_subclass(Boxes),
    "inference": lambda i: torch.inference_mode()(lambda: torch.rand(3) + 1)(),
    "promoted dtypes": lambda i: torch.rand(3).to((torch.float32, torch.float64, torch.float16)[0]),
    **{
        f"array {code}": functools.partial(lambda i, code: np.arange(i, i + 6).astype(code), code=code)
        for code in test_types.NUMERIC
    },
    "array 0-d": lambda i: np.array(i + 0.5),
    "array Fortran": lambda i: np.asfortranarray(np.random.default_rng(i).random((3, 4))),
    "array strided": lambda i: np.random.default_rng(i).random((6, 8))[::2, ::3],
    "array empty": lambda i: np.empty((0, 3), np.float32),
    "scalar float32": np.float32,
    "scalar int64": np.int64,
    "scalar bool": lambda i: np.bool_(i % 2),
    "tuple": lambda i: (torch.rand(2), i, "s"),
    "tuple of one": lambda i: (torch.rand(2),),
    "empty tuple": lambda i: (),
    "list": lambda i: [torch.rand(2), i / 2, b"b"],
    "list subclass": lambda i: MyList([torch.rand(2), i]),
    "namedtuple": lambda i: Point(torch.rand(2), {"z": np.arange(i, i + 3)}),
    "dict": lambda i: {"b": torch.rand(2), "a": i, 3: "s"},
    "empty dict": lambda i: {},
    "dict of other order": lambda i: dict([("a", torch.rand(2)), ("b", i)][:: 1 - 2 * (i % 2)]),
    "dict with more keys later": lambda i: {"a": torch.rand(2), **({"b": 1} if i else {})},
    "dict subclass": lambda i: MyDict(x=torch.rand(2), i=i),
    "OrderedDict": lambda i: collections.OrderedDict(b=torch.rand(2), a=i),
    "defaultdict": lambda i: collections.defaultdict(list, b=torch.rand(2), a=i),
    "Counter": lambda i: collections.Counter(a=i, b=2),
    "UserDict": lambda i: collections.UserDict(x=torch.rand(2)),
    "nested": lambda i: {"a": [(torch.rand(2), {"b": Point(torch.rand(1), (i, [i]))})], "c": {"d": ((np.arange(2),),)}},
    "41 tensors": lambda i: {f"x{j}": torch.full((j + 1,), float(i)) for j in range(41)},
    "mixed tuple and list": lambda i: ((torch.rand(2), i), [torch.rand(2), i])[i % 2],
    "range": lambda i: range(i, i + 3),
    "Size": lambda i: torch.Size([1, i]),
}


@pytest.mark.parametrize("workers", [1, 2])
def test_c1_torchs_collate_rules(device: Any, workers: int) -> None:
    loader = DataLoader(Made(COLLATED), batch_sampler=one_batch_each(COLLATED), num_workers=workers)
    assert_equal_by_name(COLLATED, shared(device, loader), plain(loader))


ERRORS: dict[str, Callable[[int], Any]] = {
    "lists of differing lengths": lambda i: [0.0] * (i + 1),
    "tuples of differing lengths": lambda i: (torch.rand(2),) * (i + 1),
    "tensors of differing shapes": lambda i: torch.rand(i + 1),
    "tensors of differing dtypes": lambda i: torch.zeros(3, dtype=(torch.int64, torch.float32, torch.bool)[i]),
    "arrays of differing shapes": lambda i: np.zeros(i + 1),
    "a key that is missing": lambda i: {"a": 1} if i else {"a": 1, "b": torch.rand(1)},
    "None": lambda i: None,
    "an object": decimal.Decimal,
    "a set": lambda i: {i},
    "array of str": lambda i: np.array(["a"]),
    "array of objects": lambda i: np.array([None]),
    "requires grad": lambda i: torch.rand(3).requires_grad_(),
    "sparse": lambda i: torch.eye(3).to_sparse(),
    "quantized": lambda i: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8),
}


def last_line(error: Exception) -> Any:
    """The type and the last line of an error that torch brings over from a worker."""
    return type(error), str(error).strip().splitlines()[-1]


def test_c7_what_torch_cannot_collate_gives_torchs_error() -> None:
    batches = one_batch_each(ERRORS)
    iterator = iter(DataLoader(Made(ERRORS), batch_sampler=batches, num_workers=1))
    for name, batch in zip(ERRORS, batches, strict=True):
        with pytest.raises(Exception) as expected:
            next(iterator)  # torch's own iterator goes on after an error
        loader = DataLoader(Made(ERRORS), batch_sampler=[batch], num_workers=1)
        with GPUPrefetcher(loader, "cpu", workers="shared") as prefetcher, pytest.raises(type(expected.value)) as got:
            next(iter(prefetcher))
        assert last_line(got.value) == last_line(expected.value), name
        expected.value.__traceback__ = got.value.__traceback__ = None
        del expected, got


# Equality: batches of every type, from a collate function of the user's


def sendable(value: Any) -> bool:
    """Whether torch's queue takes it. It would lose any other one, and wait for ever."""
    try:
        ForkingPickler.dumps(value)
    except Exception:  # noqa: BLE001
        return False
    return True


def anew(function: Callable[..., Any], *args: Any) -> Callable[[int], Any]:
    return lambda _: function(*args)


NOT_TORCHS = ("namedtuple subclass", "tuple subclass")
"""Containers whose constructors cannot be called as pickle does."""

BATCHES: dict[str, Callable[[int], Any]] = {
    **{
        f"container {name}": anew(lambda c: c.make(test_types.tensor()), c)
        for name, c in test_types.CONTAINERS.items()
        if name not in NOT_TORCHS
    },
    **{f"layout {name}": anew(function) for name, function in test_types.LAYOUTS.items() if sendable(function())},
    **{f"shared {name}": anew(function) for name, function in test_types.SHARED.items()},
    **{f"array {name}": anew(function) for name, function in test_types.ARRAYS.items()},
    **{f"array {name}": anew(function) for name, function in test_types.OTHER_ARRAYS.items() if name != "object"},
    **{
        f"with {name}": anew(lambda v: {"x": test_types.tensor(), "v": v}, value)
        for name, value in test_types.UNKNOWN.items()
        if sendable(value) and name not in ("sequence-like", "generator", "opaque")
    },
    "opaque": lambda i: [torch.rand(3), test_types.GraphWithBareTo(torch.rand(2), "g").name],
    "packed sequence": lambda i: pack_sequence([torch.rand(4), torch.rand(2)], enforce_sorted=False),
    "packed sequence of a tuple": lambda i: (pack_sequence([torch.rand(4), torch.rand(2)]), torch.rand(3)),
    "tensordict": lambda i: {"t": TensorDict({"a": torch.rand(3, 2), "b": torch.arange(3)}, [3]), "x": torch.rand(2)},
    "subclass with attributes": lambda i: {"b": test_types.Boxes.wrap(torch.rand(3), (640, 480)), "x": torch.rand(3)},
    "sparse COO": lambda i: (torch.eye(4).to_sparse(), torch.rand(3)),
    "sparse CSR": lambda i: (torch.eye(4).to_sparse_csr(), torch.rand(3)),
    "ragged list": lambda i: [torch.rand(n) for n in (3, 1, 4)],
    "None": lambda i: None,
    "zero": lambda i: 0,
    "empty list": lambda i: [],
    "only strings": lambda i: {"ids": ["a", "b"]},
    "only an empty tensor": lambda i: torch.empty(0, 3),
    "an empty and a full one": lambda i: (torch.empty(0, 3), torch.rand(2)),
    "frozen set beside a tensor": lambda i: (torch.rand(2), frozenset([1])),
    "a long list of ints": lambda i: {"x": torch.rand(3), "ids": list(range(5000))},
    "cycle": lambda i: {"x": torch.rand(3), "y": [1, 2]},
    "dataclass in attrs": lambda i: test_types.Attrs(test_types.Sample(torch.rand(3)), "dog"),
    "large and small": lambda i: [torch.full((600, 600), 3.0), torch.tensor(4), torch.full((300, 1024), 5.0)],
    "9 MB": lambda i: [torch.arange(2_300_000, dtype=torch.float32), torch.tensor(4)],
}


@pytest.mark.parametrize("convert", ["collate_fn", "batch_size=None"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # torch, unpickling
def test_c12_batches_of_every_type(device: Any, convert: str) -> None:
    names = list(BATCHES)
    if convert != "collate_fn":  # default_convert refuses these
        names = [name for name in names if not name.startswith(("array ", "tensordict"))]
    keys = [(name, 0) for name in names]
    if convert == "collate_fn":
        loader = DataLoader(Made(BATCHES), batch_sampler=[[key] for key in keys], collate_fn=first, num_workers=1)
    else:
        loader = DataLoader(Made(BATCHES), batch_size=None, sampler=keys, num_workers=1)
    got = shared(device, loader)
    with GPUPrefetcher(loader, device, workers="plain") as prefetcher:
        through_torch = list(prefetcher)
        settle(device)
    for name, one, other in zip(names, got, through_torch, strict=True):
        # Pickle writes such an array in C order; packed, it keeps its strides, as without workers.
        assert one == described(other) or name == "array transposed", name
    for name, one, other in zip(names, got, plain(loader), strict=True):
        # What `.to` changes, and the rules for arrays, are the prefetcher's; the values are torch's.
        assert one == other or name.startswith(("layout ", "array ", "subclass ")), name


def test_c12_memory_that_leaves_share_is_shared_after() -> None:
    def batch(_: int) -> Any:
        base = torch.arange(20.0)
        return {"one": base, "part": base[4:8], "t": torch.rand(3)}

    loader = DataLoader(Made({"a": batch}), batch_size=None, sampler=[("a", 0)], num_workers=1)
    (out,) = GPUPrefetcher(loader, "cpu", workers="shared")
    out["one"].fill_(7)
    assert out["part"].tolist() == [7.0] * 4


def unpicklable(samples: list[Any]) -> Any:
    return {"x": torch.rand(3), "function": lambda: None} if samples[0] == 2 else torch.rand(3)


def unpicklable_alone(samples: list[Any]) -> Any:
    return (lambda: None) if samples[0] == 2 else torch.rand(3)


@pytest.mark.parametrize("collate_fn", [unpicklable, unpicklable_alone])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_c7_what_cannot_be_pickled_raises(collate_fn: Any, persistent: bool) -> None:
    loader = DataLoader(range(5), collate_fn=collate_fn, num_workers=1, persistent_workers=persistent)
    with GPUPrefetcher(loader, "cpu") as prefetcher:
        for _ in range(2):
            iterator = iter(prefetcher)
            assert next(iterator).shape == next(iterator).shape == (3,)
            with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
                next(iterator)
            with pytest.raises(StopIteration):
                next(iterator)


# Options of the DataLoader


class Range(Dataset):
    def __init__(self, count: int = 24, length: int = 8) -> None:
        self.count = count
        self.length = length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((self.length,), float(index)), "i": index}


class Drawn(Range):
    """Draws in the workers, from every generator that torch seeds there."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), random.random(), int(torch.randint(100, ())), np.random.rand(2)  # noqa: NPY002


class Shards(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id, 10 + 3 * info.id, info.num_workers):
            yield torch.tensor([index, info.id])


def seed_everything(worker: int) -> None:
    torch.manual_seed(100 + worker)
    random.seed(worker)
    np.random.seed(worker)  # noqa: NPY002


def backwards(count: int) -> list[list[int]]:
    return [[i, i - 1] for i in range(count - 1, 0, -2)]


OPTIONS: dict[str, Callable[..., DataLoader]] = {
    "two workers": lambda **more: DataLoader(Range(), batch_size=4, num_workers=2, **more),
    "a short last batch": lambda **more: DataLoader(Range(22), batch_size=4, num_workers=2, **more),
    "drop_last": lambda **more: DataLoader(Range(22), batch_size=4, num_workers=2, drop_last=True, **more),
    "batch_size=None": lambda **more: DataLoader(Range(), batch_size=None, num_workers=2, **more),
    "batch_sampler": lambda **more: DataLoader(Range(), batch_sampler=backwards(24), num_workers=2, **more),
    "sampler": lambda **more: DataLoader(Range(), sampler=[5, 3, 3, 7], batch_size=2, num_workers=2, **more),
    "prefetch_factor=1": lambda **more: DataLoader(Range(), 4, num_workers=2, prefetch_factor=1, **more),
    "prefetch_factor=4": lambda **more: DataLoader(Range(), 2, num_workers=1, prefetch_factor=4, **more),
    "timeout": lambda **more: DataLoader(Range(), batch_size=4, num_workers=2, timeout=30, **more),
    "pin_memory": lambda **more: DataLoader(Range(), batch_size=4, num_workers=2, pin_memory=True, **more),
    "shards": lambda **more: DataLoader(Shards(), batch_size=2, num_workers=2, **more),
    "shards, batch_size=None": lambda **more: DataLoader(Shards(), batch_size=None, num_workers=2, **more),
    "shuffle with a generator": lambda **more: DataLoader(
        Range(), batch_size=4, num_workers=2, shuffle=True, generator=torch.Generator().manual_seed(4), **more
    ),
    "worker_init_fn": lambda **more: DataLoader(
        Drawn(), batch_size=4, num_workers=2, worker_init_fn=seed_everything, **more
    ),
    "more workers than batches": lambda **more: DataLoader(Range(2), batch_size=2, num_workers=2, **more),
    "empty": lambda **more: DataLoader(Range(0), batch_size=2, num_workers=1, **more),
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_c1_options_of_the_dataloader(device: Any, name: str) -> None:
    make = OPTIONS[name]
    assert shared(device, make()) == plain(make())


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_c1_ways_to_start_workers(method: str) -> None:
    rows = TensorDataset(torch.arange(24.0).view(8, 3), torch.arange(8))  # a new process imports no tests for it
    loader = DataLoader(rows, 2, num_workers=1, multiprocessing_context=method)
    assert shared(SimulatedDevice(), loader) == plain(DataLoader(rows, 2))


def test_c10_draws_in_the_workers_are_the_plain_loaders() -> None:
    loader = DataLoader(Drawn(), batch_size=4, shuffle=True, num_workers=2)
    torch.manual_seed(5)
    expected = plain(loader)
    torch.manual_seed(5)
    assert shared("cpu", loader, depth=4) == expected


def test_c1_in_order_false_loses_nothing(device: Any) -> None:
    loader = DataLoader(Range(), batch_size=2, num_workers=2, in_order=False)
    assert sorted(shared(device, loader)) == sorted(plain(loader))


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_c1_persistent_workers_keep_their_slots(device: Any, depth: int) -> None:
    loader = DataLoader(Range(), batch_size=2, num_workers=2, persistent_workers=True)
    expected = plain(loader)
    with GPUPrefetcher(loader, device, depth=depth, workers="shared") as prefetcher:
        for _ in range(2):
            kept = list(prefetcher)
            settle(device)
            assert [described(batch) for batch in kept] == expected
        allocations = prefetcher.stats().pinned_allocations
        for _ in range(3):
            list(prefetcher)
        assert prefetcher.stats().pinned_allocations <= max(allocations, 2 * 3)
        assert prefetcher.stats().shared_bytes == prefetcher.stats().copied_bytes
    loader._iterator._shutdown_workers()


@pytest.mark.parametrize("sizes", ["growing", "shrinking", "random"])
@pytest.mark.parametrize("limit", [None, 3 * 4096 * 8, 4096, 100], ids=["", "some fit", "one fits", "none fits"])
@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
def test_c14_sizes_and_limits(device: Any, sizes: str, limit: int | None) -> None:
    lengths = [1 + 600 * i for i in range(12)]
    lengths = {"growing": lengths, "shrinking": lengths[::-1], "random": random.Random(3).sample(lengths, 12)}[sizes]
    functions = {"row": lambda i: torch.full((lengths[i],), float(i))}
    loader = DataLoader(Made(functions), batch_size=None, sampler=[("row", i) for i in range(12)], num_workers=1)
    assert shared(device, loader, max_pinned_bytes=limit) == plain(loader)


@pytest.mark.parametrize("pinned_limit", [0, 4096, 3 * 4096])
@pytest.mark.parametrize("transform", [None, lambda batch: {**batch, "y": batch["x"] + 1}], ids=["", "transform"])
@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
def test_c15_registration_is_refused(pinned_limit: int, transform: Any) -> None:
    device = SimulatedDevice(pinned_limit=pinned_limit)
    loader = DataLoader(Range(), batch_size=2, num_workers=2)
    with GPUPrefetcher(loader, device, transform=transform) as prefetcher:
        kept = list(prefetcher)
        settle(device)
    expected = [transform(batch) if transform else batch for batch in loader]
    assert [described(batch) for batch in kept] == [described(batch) for batch in expected]


@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
def test_c15_device_memory_is_short() -> None:
    device = SimulatedDevice(memory_limit=2 * 8192)
    loader = DataLoader(Range(12, 1024), batch_size=1, num_workers=2)
    seen = []
    with GPUPrefetcher(loader, device, depth=4, fetch="thread") as prefetcher:
        for batch in prefetcher:
            settle(device)
            seen.append((batch["x"].min().item(), batch["x"].max().item()))
            del batch
    assert seen == [(float(i), float(i)) for i in range(12)]


@pytest.mark.parametrize("options", [{"checked": True}, {"static": True}, {"fetch": "thread"}, {"fetch": "caller"}])
@pytest.mark.parametrize("depth", [1, 3])
def test_c1_options_of_the_prefetcher(device: Any, options: dict[str, Any], depth: int) -> None:
    loader = DataLoader(Range(), batch_size=4, num_workers=2)
    with GPUPrefetcher(loader, device, depth=depth, workers="shared", **options) as prefetcher:
        seen = []
        for batch in prefetcher:
            settle(device)
            seen.append(described(batch))
    assert seen == plain(loader)


# Passes


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_c9_left_at_every_point(persistent: bool) -> None:
    device = SimulatedDevice(bandwidth=1e6)
    before = Surroundings(device)
    loader = DataLoader(Range(12, 256), batch_size=2, num_workers=2, persistent_workers=persistent)
    expected = [[2 * i, 2 * i + 1] for i in range(6)]
    with GPUPrefetcher(loader, device) as prefetcher:
        for taken in range(7):
            kept = list(itertools.islice(prefetcher, taken))
            settle(device)
            assert [b["i"].tolist() for b in kept] == expected[:taken]
            assert [b["x"][:, 5].tolist() for b in kept] == expected[:taken]
            del kept
        kept = list(prefetcher)
        settle(device)
        assert [b["x"][:, 5].tolist() for b in kept] == expected
    del kept, prefetcher
    gc.collect()
    before.assert_restored()


def test_c1_two_live_passes(device: Any) -> None:
    loader = DataLoader(Range(8, 1024), batch_size=1, num_workers=2)
    with GPUPrefetcher(loader, device) as prefetcher:
        pairs = list(zip(prefetcher, prefetcher, strict=True))
        settle(device)
        assert [(int(a["x"][0, 7]), int(b["x"][0, 9])) for a, b in pairs] == [(i, i) for i in range(8)]
        assert prefetcher.stats().shared_bytes == prefetcher.stats().copied_bytes


def test_c1_two_prefetchers_and_the_plain_loop_over_one_loader(device: Any) -> None:
    loader = DataLoader(Range(6), batch_size=1, num_workers=1)
    with GPUPrefetcher(loader, device) as one, GPUPrefetcher(loader, device, workers="plain") as other:
        rows = list(zip(one, other, one, loader, strict=True))
        settle(device)
    assert [[int(batch["x"][0, 3]) for batch in row] for row in rows] == [[i] * 4 for i in range(6)]


def test_c9_a_newer_pass_takes_persistent_workers_over() -> None:
    loader = DataLoader(Range(8), batch_size=1, num_workers=2, persistent_workers=True)
    with GPUPrefetcher(loader, "cpu", workers="shared") as prefetcher:
        older = iter(prefetcher)
        held = next(older)
        assert [int(batch["i"]) for batch in prefetcher] == list(range(8))
        with pytest.raises(IteratorClosedError):
            next(older)
        assert held["x"].tolist() == [[0.0] * 8]


def test_c9_copies_of_the_prefetcher_carry_the_configuration() -> None:
    loader = DataLoader(Range(8), batch_size=2, num_workers=1, collate_fn=default_collate)
    with GPUPrefetcher(loader, "cpu", workers="shared", depth=3) as prefetcher:
        iterator = iter(prefetcher)
        next(iterator)
        for twin in (copy.deepcopy(prefetcher), pickle.loads(pickle.dumps(prefetcher)), copy.copy(prefetcher)):
            with twin:
                assert [described(batch) for batch in twin] == plain(loader)
        assert len(list(iterator)) == 3
    assert "collate" not in repr(vars(loader)["collate_fn"]).replace("default_collate", "")


def test_c9_a_fork_in_the_body() -> None:
    """The child's exit takes nothing from the parent: neither slots nor segments."""
    device = SimulatedDevice(bandwidth=1e6)
    loader = DataLoader(Range(16, 1024), batch_size=1, num_workers=2)
    seen = []
    with GPUPrefetcher(loader, device, workers="shared") as prefetcher:
        for index, batch in enumerate(prefetcher):
            if index in (2, 5):
                child = os.fork()
                if not child:
                    try:
                        prefetcher.close()
                        del batch, prefetcher
                        gc.collect()
                    finally:
                        os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
            settle(device)
            seen.append(batch["x"].mean().item())
    assert seen == [float(i) for i in range(16)]


class OwnIter(DataLoader):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield {**batch, "mine": batch["x"] + 1}


class OwnCollate(DataLoader):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, collate_fn=lambda samples: {"n": len(samples), **default_collate(samples)}, **kwargs)
        self.extra = "kept"


def test_c1_subclasses_of_the_dataloader(device: Any) -> None:
    loader = OwnCollate(Range(), batch_size=4, num_workers=1)
    assert shared(device, loader) == plain(loader)
    loader = OwnIter(Range(), batch_size=4, num_workers=1)
    with GPUPrefetcher(loader, device) as prefetcher:
        kept = list(prefetcher)
        settle(device)
        assert [described(batch) for batch in kept] == plain(loader)
        assert prefetcher.stats().workers == "plain"
        assert "__iter__" in prefetcher.stats().workers_reason
    with GPUPrefetcher(loader, device, workers="shared") as prefetcher, pytest.warns(PrefetchWarning, match="OwnIter"):
        list(prefetcher)


def test_c13_the_users_loader_stays_as_it_was() -> None:
    loader = DataLoader(Range(), batch_size=4, num_workers=1, pin_memory=True)
    before = dict(vars(loader))
    shared("cpu", loader)
    assert vars(loader) == before


# torchdata's StatefulDataLoader


def stateful(**options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(Range(20), **{"batch_size": 2, "num_workers": 2, **options})


STATEFUL = {
    "two workers": {},
    "one worker": {"num_workers": 1},
    "persistent": {"persistent_workers": True},
    "snapshots": {"snapshot_every_n_steps": 3},
    "shuffle": {"shuffle": True},
}


def indices(iterable: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in iterable]


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        *itertools.product(["two workers"], ["before iter", 1, 4, 10, "after the end"]),
        *itertools.product(["one worker", "persistent", "snapshots", "shuffle"], [4]),
        ("persistent", "after the end"),
        ("snapshots", 10),
    ],
)
def test_c11_resume(name: str, moment: Any) -> None:
    def saved(loader: Any) -> tuple[Any, list[list[int]]]:
        """The state, and what was seen up to it."""
        if moment == "before iter":
            return loader.state_dict(), []
        iterator = iter(loader)
        seen = indices(iterator if moment == "after the end" else itertools.islice(iterator, moment))
        return pickle.loads(pickle.dumps(loader.state_dict())), seen

    def run(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(3)
        made = wrap(stateful(**STATEFUL[name]))
        state, head = saved(made)
        rest = indices(made) if moment in ("before iter", "after the end") else []
        fresh = wrap(stateful(**STATEFUL[name]))
        fresh.load_state_dict(state)
        tails = [indices(fresh), indices(fresh)]
        made.load_state_dict(state)  # also in the object that has workers already
        tails.append(indices(made))
        for one in (made, fresh):
            if isinstance(one, GPUPrefetcher):
                assert one.stats().workers == "shared", one.stats().workers_reason
                one.close()
        return head, rest, tails

    expected = run(lambda loader: loader)
    assert run(lambda loader: GPUPrefetcher(loader, "cpu", depth=3)) == expected


def test_c11_a_live_pass_goes_on_when_a_state_is_loaded_for_the_next_one() -> None:
    def run(loader: Any) -> Any:
        older = iter(loader)
        head = indices(itertools.islice(older, 3))
        loader.load_state_dict(loader.state_dict())
        newer = iter(loader)
        return head, indices(itertools.islice(newer, 2)), indices(older), indices(newer)

    expected = run(stateful())
    with GPUPrefetcher(stateful(), "cpu") as prefetcher:
        assert run(prefetcher) == expected


def test_c1_two_threads_start_passes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own workers and slots, whichever of them is the newest."""
    both = threading.Barrier(2, timeout=TIMEOUT)
    bind = Twins.bind

    def bound(self: Any, source: Any, iterable: Any) -> None:
        both.wait()
        bind(self, source, iterable)

    monkeypatch.setattr(Twins, "bind", bound)
    with GPUPrefetcher(DataLoader(Range(8), batch_size=1, num_workers=1), "cpu") as prefetcher:
        threads = [Thread(lambda: [int(batch["i"]) for batch in prefetcher]) for _ in range(2)]
        assert [thread.result() for thread in threads] == [list(range(8))] * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_c11_a_pass_whose_workers_run_already_is_asked_itself(persistent: bool) -> None:
    """As Accelerate does: the state is asked for before anything is iterated over."""

    def run(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(3)
        inner = stateful(shuffle=True, persistent_workers=persistent)
        inner.state_dict()
        loader = wrap(inner)
        seen = []
        for batch in loader:
            seen.append(batch["i"].tolist())
            if len(seen) == 4:
                state = pickle.loads(pickle.dumps(loader.state_dict()))
        seen += indices(loader)
        fresh = wrap(stateful(shuffle=True, persistent_workers=persistent))
        fresh.load_state_dict(state)
        return seen, torch.rand(()).item(), indices(fresh)

    expected = run(lambda loader: loader)
    assert run(lambda loader: GPUPrefetcher(loader, "cpu", depth=3)) == expected


def test_c10_workers_that_the_loader_has_started_itself_go_on() -> None:
    def run(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(3)
        inner = DataLoader(Range(20), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
        next(iter(inner))
        return [indices(wrap(inner)) for _ in range(2)], torch.rand(()).item()

    def wrap(loader: Any) -> GPUPrefetcher:
        prefetchers.append(GPUPrefetcher(loader, "cpu"))
        return prefetchers[-1]

    prefetchers: list[GPUPrefetcher] = []
    assert run(wrap) == run(lambda loader: loader)
    assert prefetchers[0].stats().workers_reason.startswith("its persistent workers run already")


def test_c11_an_older_pass_makes_no_iterator_while_a_newer_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the older pass is met while the newer one is starting its workers."""
    making, asked = threading.Event(), threading.Event()
    makers: list[str] = []
    inner_make, inner_capture = StatefulDataLoader._get_iterator, Shared.capture_state

    def make(self: Any) -> Any:
        makers.append(threading.current_thread().name)
        if len(makers) == 2:
            making.set()
            assert asked.wait(20)
        return inner_make(self)

    def capture(self: Shared, producer: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return inner_capture(self, producer)
        if captured := next(captures) == 9:
            assert making.wait(20)
        try:
            return inner_capture(self, producer)
        finally:
            if captured:
                asked.set()

    captures = itertools.count()
    monkeypatch.setattr(StatefulDataLoader, "_get_iterator", make)
    monkeypatch.setattr(Shared, "capture_state", capture)
    with GPUPrefetcher(stateful(), "cpu", fetch="thread", depth=3) as prefetcher:
        older = iter(prefetcher)
        assert len(indices(itertools.islice(older, 9))) == 9
        assert len(indices(prefetcher)) == 10
    assert makers == ["MainThread"] * 2
