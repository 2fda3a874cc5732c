"""Random leaves through layout, plan and device: what arrives is what plain ``.to`` gives, and shares no more."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchpipe import GPUPrefetcher
from prefetchpipe.batch import few
from prefetchpipe.batch import layout as layout_module
from prefetchpipe.batch.layout import ALIGNMENT, Layout
from prefetchpipe.batch.rows import copy_all
from prefetchpipe.pipeline import staging
from prefetchpipe.testing import SimulatedDevice
from tests.support import same_bytes

pytestmark = pytest.mark.slow

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint32,
    torch.int64,
]
STORAGE_BYTES = 4096

moderate = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Recipe:
    """How to make one leaf; the same recipe twice gives equal leaves on other memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int
    """Number of a storage that leaves share; -1 for one of its own."""

    @property
    def extent(self) -> int:
        """Elements from the first to the last one, both included."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) if 0 not in self.shape else 0


@st.composite
def recipes(draw: Any, storages: int) -> Recipe:
    dtype = draw(st.sampled_from(DTYPES))
    storage = draw(st.integers(-1, storages - 1))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.sampled_from(["dense", "dense", "strided", "expanded", "overlapping"]))
    stride = [0] * len(shape)
    step = draw(st.integers(2, 3)) if steps == "strided" else 1
    for dim in order:
        stride[dim] = step
        step *= max(shape[dim], 1)
    if shape and steps in ("expanded", "overlapping"):
        stride[draw(st.integers(0, len(shape) - 1))] = int(steps == "overlapping")
    offset = draw(st.sampled_from([0, 0, 1, 7, 40]))
    return Recipe(dtype, shape, tuple(stride), offset, storage)


@st.composite
def batches(draw: Any, *, shared: bool = True) -> list[Recipe]:
    storages = draw(st.integers(0, 2)) if shared else 0
    return draw(st.lists(recipes(storages), min_size=1, max_size=7))


def build(batch: list[Recipe]) -> list[torch.Tensor]:
    """Storages hold bytes that tell apart every element, and are 0 or 1 so that booleans are valid."""
    generator = torch.Generator().manual_seed(5)
    storages: dict[int, torch.Tensor] = {}
    leaves = []
    for number, recipe in enumerate(batch):
        key = recipe.storage if recipe.storage >= 0 else -1 - number
        if key not in storages:
            nbytes = STORAGE_BYTES if key >= 0 else (recipe.offset + recipe.extent) * recipe.dtype.itemsize
            high = 2 if any(r.dtype is torch.bool for r in batch) else 100
            storages[key] = torch.randint(high, (nbytes,), dtype=torch.uint8, generator=generator)
        leaf = torch.empty(0, dtype=recipe.dtype)
        leaf.set_(storages[key].untyped_storage(), recipe.offset, recipe.shape, recipe.stride)
        leaves.append(leaf)
    return leaves


def arrived(leaves: list[torch.Tensor], kind: str) -> list[torch.Tensor]:
    device: Any = SimulatedDevice(bandwidth=1e6) if kind == "sim" else "cpu"
    batch = next(iter(GPUPrefetcher([leaves], device, fetch="caller")))
    if kind == "sim":
        device.synchronize()
    return batch


def share_a_storage(one: Recipe, other: Recipe) -> bool:
    return one.storage >= 0 and one.storage == other.storage


@pytest.fixture(params=["few", "slab", "large"], autouse=True)
def thresholds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few leaves and small ones are treated like many, and like those of many megabytes."""
    if request.param != "few":
        monkeypatch.setattr(few, "_FEW", 0)
        monkeypatch.setattr(layout_module, "_FEW_LEAVES", 0)
    if request.param == "large":
        monkeypatch.setattr(layout_module, "OWN_BLOCK_BYTES", 64)
        monkeypatch.setattr(staging, "_PIECE_BYTES", 128)


each_device = pytest.mark.parametrize("kind", ["cpu", "sim"])


@each_device
def test_c2_neighbours_in_a_slab_are_no_views(kind: str) -> None:
    out = arrived([torch.ones(3), torch.ones(2, 2), torch.ones(())], kind)
    assert [leaf._is_view() for leaf in out] == [False] * 3
    out[0].add_(1)
    assert [leaf._version for leaf in out[1:]] == [out[2]._version] * 2
    assert out[0]._version > out[1]._version


@each_device
def test_c12_an_expanded_view_beside_what_it_is_a_view_of(kind: str) -> None:
    """Torch refuses to write through such a view, so it arrives with the storage that it shares."""
    column = torch.tensor([[1.0], [2.0]])
    mask, wide = arrived([column, column.expand(2, 3)], kind)
    assert mask.tolist() == [[1], [2]]
    assert wide.tolist() == [[1, 1, 1], [2, 2, 2]]


@each_device
@given(batch=batches())
@moderate
def test_c12_values_dtypes_shapes_and_strides_are_those_of_to(kind: str, batch: list[Recipe]) -> None:
    leaves = build(batch)
    for recipe, leaf, out in zip(batch, leaves, arrived(leaves, kind), strict=True):
        assert type(out) is torch.Tensor
        assert same_bytes(out, leaf)
        allowed = {leaf.to("meta").stride()}
        if any(share_a_storage(recipe, other) for other in batch if other is not recipe):
            allowed.add(leaf.stride())  # where the storage is copied as a whole
        assert out.stride() in allowed
        assert not out.requires_grad
        assert out.storage_offset() >= 0


@each_device
@given(batch=batches())
@moderate
def test_c2_a_change_of_one_leaf_is_no_change_of_its_neighbours(kind: str, batch: list[Recipe]) -> None:
    leaves = build(batch)
    before = [leaf.clone() for leaf in leaves]
    out = arrived(leaves, kind)
    for changed, recipe in enumerate(batch):
        if recipe.stride and 0 in recipe.stride:
            continue  # torch refuses to write to it
        assert not out[changed]._is_view()
        versions = [leaf._version for leaf in out]
        values = [leaf.clone() for leaf in out]
        out[changed].zero_() if not overlaps_itself(recipe) else None
        for number, leaf in enumerate(out):
            if number != changed:
                assert leaf._version == versions[number]
                if not share_a_storage(batch[number], recipe):
                    assert same_bytes(leaf, values[number])
    for leaf, was in zip(leaves, before, strict=True):
        assert same_bytes(leaf, was)


def overlaps_itself(recipe: Recipe) -> bool:
    places = [
        sum(i * s for i, s in zip(index, recipe.stride, strict=True))
        for index in itertools.product(*(range(n) for n in recipe.shape))
    ]
    return len(set(places)) < len(places)


@st.composite
def windows(draw: Any) -> list[Recipe]:
    """Contiguous windows into one storage, close enough that it travels as a whole."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    stride = (shape[1], 1) if len(shape) == 2 else (1,)
    offsets = draw(st.lists(st.integers(0, math.prod(shape)), min_size=2, max_size=4))
    return [Recipe(dtype, shape, stride, offset, 0) for offset in offsets]


@each_device
@given(batch=windows())
@moderate
def test_c12_shared_storages_stay_shared(kind: str, batch: list[Recipe]) -> None:
    """What is written through one leaf is seen in the others, exactly as it is in the loader's."""
    leaves = build(batch)
    out = arrived(leaves, kind)
    assert len({leaf.untyped_storage().data_ptr() for leaf in out}) == 1
    for one, other in zip(leaves, out, strict=True):
        one.zero_()
        other.zero_()
        for expected, actual in zip(leaves, out, strict=True):
            assert same_bytes(actual, expected)


@given(batch=batches())
@moderate
def test_c14_slot_and_blocks_are_exact_aligned_and_apart(batch: list[Recipe]) -> None:
    leaves = build(batch)
    layout = Layout(leaves)
    end = 0
    for block in layout.blocks:
        assert block.slot_offset % ALIGNMENT == 0
        assert end <= block.slot_offset < end + ALIGNMENT
        end = block.slot_offset + block.nbytes
    assert layout.nbytes == end
    spans = sorted(layout.spans, key=lambda span: (span.slot_offset, span.nbytes))
    position = 0
    for span in spans:
        block = layout.blocks[span.block]
        assert span.slot_offset % ALIGNMENT == 0
        assert position <= span.slot_offset
        assert block.slot_offset <= span.slot_offset
        position = span.slot_offset + span.nbytes
        assert position <= block.slot_offset + block.nbytes
    for recipe, place in zip(batch, layout.leaves, strict=True):
        if 0 in recipe.shape:
            continue
        last = sum((n - 1) * s for n, s in zip(place.shape, place.stride, strict=True))
        assert place.offset >= 0
        assert place.offset + (last + 1) * recipe.dtype.itemsize <= layout.blocks[place.block].nbytes
        alone = not any(share_a_storage(recipe, other) for other in batch if other is not recipe)
        assert place.offset % (ALIGNMENT if alone else recipe.dtype.itemsize) == 0
    own = sum(math.prod(recipe.shape) * recipe.dtype.itemsize for recipe in batch)
    assert layout.nbytes <= layout_module._SHARED_SPAN * own + 2 * ALIGNMENT * len(batch)


@given(batch=batches(shared=False))
@moderate
def test_c14_leaves_that_share_nothing_take_their_own_bytes_and_no_more(batch: list[Recipe]) -> None:
    own = [math.prod(recipe.shape) * recipe.dtype.itemsize for recipe in batch]
    layout = Layout(build(batch))
    assert sum(own) <= layout.nbytes <= sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in own)
    assert sum(span.nbytes for span in layout.spans) == sum(own)


@given(batch=batches())
@moderate
def test_c12_packing_and_unpacking_by_hand(batch: list[Recipe]) -> None:
    """The same layout, with plain memory in the place of slot and device."""
    leaves = build(batch)
    layout = Layout(leaves)
    slot = torch.full((layout.nbytes + 1,), 0xEE, dtype=torch.uint8)
    views, pieces = layout.slot_views(slot), layout.pieces(slot)
    copy_all(views, layout.sources(leaves))
    assert int(slot[-1]) == 0xEE
    out, memory = layout.allocate(
        lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype),
        lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
    )
    assert len(memory) == len(layout.blocks)
    for tensor, piece in zip(memory, pieces, strict=True):
        target = torch.empty(0, dtype=torch.uint8).set_(
            tensor.untyped_storage(), tensor.storage_offset() * tensor.dtype.itemsize, (len(piece),), (1,)
        )
        target.copy_(piece)
    for leaf, tensor in zip(leaves, out, strict=True):
        assert same_bytes(tensor, leaf)
