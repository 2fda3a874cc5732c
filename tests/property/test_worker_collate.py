"""Random nested samples through the workers' collate function: what torch's own gives, or torch's error."""

from __future__ import annotations

import collections
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from prefetchpipe import GPUPrefetcher
from prefetchpipe.testing import SimulatedDevice
from tests.described import described
from tests.packed import Workers
from tests.support import settle

pytestmark = pytest.mark.slow


class Pair(NamedTuple):
    one: Any
    other: Any


TORCH = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint8, torch.int64]
NUMPY = ["?", "i2", "i8", "u1", "f2", "f4", "f8", "c8"]

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
leaves = st.one_of(
    st.tuples(st.just("tensor"), st.sampled_from(TORCH), shapes, st.sampled_from(["", "", "t", "expand", "offset"])),
    st.tuples(st.just("array"), st.sampled_from(NUMPY), shapes),
    st.tuples(st.just("scalar"), st.sampled_from(NUMPY)),
    st.tuples(st.sampled_from(["int", "float", "bool", "str", "bytes", "None"])),
)
recipes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["list", "tuple"]), st.lists(inner, max_size=3)),
        st.tuples(st.sampled_from(["dict", "OrderedDict"]), st.lists(inner, max_size=3)),
        st.tuples(st.just("pair"), st.lists(inner, min_size=2, max_size=2)),
    ),
    max_leaves=8,
)


def tensor(chance: random.Random, dtype: torch.dtype, shape: tuple[int, ...], how: str) -> torch.Tensor:
    count = int(np.prod(shape)) + 3
    raw = torch.tensor([chance.randrange(1, 60) for _ in range(count * dtype.itemsize)], dtype=torch.uint8)
    flat = raw.to(torch.bool) if dtype is torch.bool else raw.view(dtype)
    made = flat[3:] if how == "offset" else flat[: count - 3]
    made = made.reshape(shape)
    if how == "t" and made.dim() == 2:
        return made.t()
    return made.expand(2, *shape) if how == "expand" else made


def sample(recipe: Any, chance: random.Random) -> Any:  # noqa: PLR0911 - a list of kinds
    kind, *rest = recipe
    match kind:
        case "tensor":
            return tensor(chance, *rest)
        case "array":
            return np.array(chance.randrange(100) + np.arange(np.prod(rest[1], dtype=int)).reshape(rest[1]), rest[0])
        case "scalar":
            return np.dtype(rest[0]).type(chance.randrange(100))
        case "int" | "float" | "bool" | "str" | "bytes" | "None":
            number = chance.randrange(100)
            options = {"int": number, "float": number / 3, "bool": number % 2 == 0, "str": str(number), "bytes": b"b"}
            return options.get(kind)
    items = [sample(inner, chance) for inner in rest[0]]
    match kind:
        case "list":
            return items
        case "tuple":
            return tuple(items)
        case "pair":
            return Pair(*items)
    made = {"a": dict, "O": collections.OrderedDict}["O" if kind == "OrderedDict" else "a"]
    return made((f"key{index}", item) for index, item in enumerate(items))


def outcome(function: Any) -> Any:
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - whatever torch raises
        return type(error), str(error)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(recipes, st.one_of(st.none(), st.none(), st.none(), recipes), st.integers(1, 4)),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 2**32),
)
def test_c1_the_workers_collate_is_torchs(batches: list[tuple[Any, Any, int]], seed: int) -> None:
    """Some batches end with a sample of another structure. All go through the same slots, one after the other."""
    chance = random.Random(seed)
    rows = []
    for recipe, last, count in batches:
        rows.append([sample(recipe, chance) for _ in range(count)])
        if last is not None:
            rows[-1].append(sample(last, chance))
    expected = [outcome(lambda samples=samples: described(default_collate(samples))) for samples in rows]
    device = SimulatedDevice(bandwidth=1e6)
    for samples, want in zip(rows, expected, strict=True):
        if isinstance(want, tuple) and isinstance(want[0], type):
            assert outcome(lambda samples=samples: Workers(device, [], whole=True).message(samples)) == want
    good = [i for i, want in enumerate(expected) if not (isinstance(want, tuple) and isinstance(want[0], type))]
    workers = Workers(device, [rows[i] for i in good] * 2, whole=True)
    if good:
        kept = list(GPUPrefetcher(workers, device, fetch="caller"))
        settle(device)
        assert [described(batch) for batch in kept] == [expected[i] for i in good] * 2
