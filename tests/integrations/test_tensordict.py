"""TensorDict's containers: same type, same batch sizes, names and locks, packed; contracts C2, C12, C16."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, UnbatchedTensor, lazy_stack, tensorclass
from tensordict.nn import TensorDictParams

from prefetchpipe import GPUPrefetcher
from prefetchpipe.batch import flatten, unflatten
from prefetchpipe.batch.tensordicts import TensorDictSpec
from tests.support import Readings, constants, is_cuda, is_simulated, kernel, same_bytes, settle

pytestmark = pytest.mark.timeout(60)


@tensorclass
class Sample:
    image: torch.Tensor
    name: str
    weight: torch.Tensor | None = None


def full(value: float) -> TensorDict:
    """Everything that a TensorDict can hold, filled with one value."""
    stacked = lazy_stack([TensorDict({"v": torch.full((2,), value)}, []) for _ in range(3)])
    batch = TensorDict(
        {
            "x": torch.full((3, 4), value),
            "nested": {"ids": torch.full((3,), int(value)), "empty": {}},
            "text": "text",
            "words": NonTensorStack("a", "b", "c"),
            "sample": Sample(image=torch.full((3, 2), value), name="cat", batch_size=[3]),
            "stacked": stacked,
            "whole": UnbatchedTensor(torch.full((7,), value)),
        },
        batch_size=[3],
        names=["time"],
    )
    batch["nested"].batch_size = [3]
    return batch.lock_()


def check(out: Any, source: Any, value: float, device: Any) -> None:
    """`out` is `source`, moved: against what `.to` of the library itself gives, on a device without memory."""
    moved = source.to("meta")
    assert type(out) is type(source)
    assert list(out.keys(True)) == list(source.keys(True))
    assert (out.batch_size, out.names, out.is_locked) == (moved.batch_size, moved.names, moved.is_locked)
    for key in source.keys(True):
        one, other = out.get(key), moved.get(key)
        assert type(one) is type(other), key
        assert one.shape == other.shape, key
    leaves = list(out.values(True, True))
    for leaf in leaves:
        data = leaf.data if type(leaf) is UnbatchedTensor else leaf
        assert bool((data == value).all())
        assert data.is_cuda == is_cuda(device)
    if is_cuda(device):
        assert out.device == torch.device("cuda", torch.cuda.current_device())
        assert out["nested"].device == out.device
    else:
        assert out.device == torch.device("cpu")


def test_c12_everything_that_it_can_hold(device: Any, fetch: str) -> None:
    sources = [full(i) for i in range(5)]
    out = list(GPUPrefetcher(sources, device, fetch=fetch))
    settle(device)
    for value, (one, source) in enumerate(zip(out, sources, strict=True)):
        check(one, source, value, device)
        assert one["text"] == "text"
        assert list(one["words"]) == ["a", "b", "c"]
        assert (type(one["sample"]), one["sample"].name, one["sample"].weight) == (Sample, "cat", None)
        assert type(one.get("stacked")) is LazyStackedTensorDict
        assert source.device is None
        assert bool((source["x"] == value).all())


def test_c12_a_tensorclass_alone_and_a_lazy_stack_alone(device: Any) -> None:
    sample = Sample(image=torch.ones(3, 2), name="dog", weight=torch.full((3,), 1.0), batch_size=[3])
    stack = lazy_stack([TensorDict({"v": torch.ones(i + 1)}, []) for i in range(3)])
    one, other = GPUPrefetcher([sample, stack], device)
    settle(device)
    assert (type(one), one.name, one.batch_size) == (Sample, "dog", torch.Size([3]))
    assert one.image.is_cuda == is_cuda(device)
    assert one.weight.tolist() == [1, 1, 1]
    assert type(other) is LazyStackedTensorDict
    assert [len(part["v"]) for part in other.tensordicts] == [1, 2, 3]
    assert all(part["v"].is_cuda == is_cuda(device) for part in other.tensordicts)


def test_c12_a_new_container_every_time(device: Any) -> None:
    source = TensorDict({"x": torch.ones(3)}, [3])
    first, second = GPUPrefetcher([source, source], device)
    first["new"] = first["x"] + 1
    first["x"].zero_()
    settle(device)
    assert list(second.keys()) == ["x"]
    assert second["x"].tolist() == [1, 1, 1]
    assert source["x"].tolist() == [1, 1, 1]
    assert list(source.keys()) == ["x"]


def test_c16_they_are_packed(stream_device: Any) -> None:
    batches = [TensorDict({f"k{k}": torch.full((100,), float(i)) for k in range(20)}, [100]) for i in range(6)]
    prefetcher = GPUPrefetcher(batches, stream_device)
    kept = list(prefetcher)
    settle(stream_device)
    for index, batch in enumerate(kept):
        assert all(bool((batch[f"k{k}"] == index).all()) for k in range(20))
    stats = prefetcher.stats()
    assert stats.staged_bytes >= 6 * 20 * 400
    assert stats.pageable_bytes == 0
    if is_simulated(stream_device):
        assert stream_device.copies == 6  # one slab a batch


def test_c4_v4_a_slow_device_never_sees_another_batch(stream_device: Any, fetch: str) -> None:
    batches = [TensorDict({"a": torch.full((64, 8), i + 1.0), "b": {"c": torch.full((64,), i + 1)}}) for i in range(60)]
    readings = Readings(stream_device, 60)
    for index, batch in enumerate(GPUPrefetcher(batches, stream_device, depth=3, fetch=fetch)):
        kernel(stream_device, lambda: None, seconds=0.005)
        readings.queue(index, batch["a"], batch["b", "c"])
        del batch
    assert readings.values() == constants(range(1, 61))


def moving_by_itself(kind: str, folder: Any) -> Any:
    source = TensorDict({"x": torch.arange(6.0).view(3, 2)}, [3])
    if kind == "memory-mapped":
        return source.memmap(folder)
    if kind == "parameters":
        return TensorDictParams(source)
    return TensorDict({}, [3]) if kind == "empty" else source


@pytest.mark.parametrize("kind", ["memory-mapped", "parameters", "empty"])
def test_c12_kinds_that_move_by_themselves(device: Any, kind: str, tmp_path: Any) -> None:
    source = moving_by_itself(kind, tmp_path)
    (out,) = GPUPrefetcher([source], device)
    settle(device)
    assert type(out) is type(source.to("meta"))
    assert out.batch_size == source.batch_size
    if kind != "empty":
        assert same_bytes(out["x"], torch.arange(6.0).view(3, 2))
        assert out["x"].is_cuda == is_cuda(device)


def test_c12_a_consolidated_one_stays_in_one_storage(device: Any) -> None:
    source = TensorDict({"x": torch.arange(6.0).view(3, 2), "y": {"z": torch.arange(3)}}, [3]).consolidate()
    prefetcher = GPUPrefetcher([source], device)
    (out,) = prefetcher
    settle(device)
    assert same_bytes(out["x"], torch.arange(6.0).view(3, 2))
    assert same_bytes(out["y", "z"], torch.arange(3))
    assert out["x"].untyped_storage().data_ptr() == out["y", "z"].untyped_storage().data_ptr()


def test_c12_inside_other_containers(device: Any) -> None:
    (out,) = GPUPrefetcher([{"td": full(2), "more": [torch.ones(2), full(2)]}], device)
    settle(device)
    check(out["td"], full(2), 2, device)
    check(out["more"][1], full(2), 2, device)


def test_a_spec_can_be_pickled() -> None:
    leaves: list[Any] = []
    source = full(3)
    spec = flatten(source, leaves)
    assert type(spec) is TensorDictSpec
    check(unflatten(pickle.loads(pickle.dumps(spec)), leaves), source, 3, "cpu")
