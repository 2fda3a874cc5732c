"""Accelerate gives the same with a prefetcher as without: batches, flags, sync pattern, what is gathered."""

from __future__ import annotations

import copy
import functools
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, DistributedSampler

from prefetchpipe import GPUPrefetcher, PrefetchWarning
from prefetchpipe.integrations.accelerate import prepare
from tests.integrations import accelerate_loops as loops


@pytest.fixture(autouse=True)
def own_state() -> Any:
    yield
    loops.new_accelerator()


def plain(accelerator: Any, loader: Any) -> Any:
    return loader if hasattr(loader, "gradient_state") else accelerator.prepare(loader)


@pytest.fixture(params=[(1, "auto"), (2, "thread"), (4, "thread"), (4, "caller")], ids=str)
def ours(request: pytest.FixtureRequest) -> Any:
    depth, fetch = request.param
    return partial(prepare, depth=depth, fetch=fetch)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no even batches": {"even_batches": False},
    "drop last": {"data": lambda: loops.loader(drop_last=True)},
    "not seedable": {"use_seedable_sampler": False},
    "seedable": {"use_seedable_sampler": True},
    "own generator": {"data": lambda: loops.loader(shuffle=True, generator=torch.Generator().manual_seed(3))},
    "dispatched": {"dispatch_batches": True},
    "stream": {"data": lambda: DataLoader(loops.Stream(), batch_size=4)},
    "stream, not dispatched": {"data": lambda: DataLoader(loops.Stream(), batch_size=4), "dispatch_batches": False},
    "stateful": {"use_stateful_dataloader": True},
    "one batch": {"data": lambda: loops.loader(3)},
    "empty": {"data": lambda: loops.loader(0)},
    "left early": {"stop": 6, "epochs": 3},
}


@functools.cache
def without(loop: Any, kind: str) -> Any:
    return loop(plain, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same(kind: str, ours: Any) -> None:
    assert loops.train(ours, **KINDS[kind]) == without(loops.train, kind)


@pytest.mark.parametrize("depth", [2, 4])
def test_n2_flags_follow_the_batch_in_use(depth: int) -> None:
    seen = loops.train(partial(prepare, depth=depth, fetch="thread"), epochs=1)[:-1]
    assert [one["end"] for one in seen] == [False] * 9 + [True]
    assert [one["sync"] for one in seen] == [index in (2, 5, 8, 9) for index in range(10)]
    assert sum(len(one["gathered"][0]) for one in seen) == 38


@pytest.mark.parametrize("kind", ["plain", "seedable", "dispatched", "stream", "stream, not dispatched", "drop last"])
def test_skip_first_batches(kind: str, ours: Any) -> None:
    assert loops.skip(ours, **KINDS[kind]) == without(loops.skip, kind)


@pytest.mark.parametrize("kind", ["plain", "seedable", "dispatched"])
def test_nested_loops_and_early_break(kind: str, ours: Any) -> None:
    assert loops.nested(ours, **KINDS[kind]) == without(loops.nested, kind)


def test_what_skip_first_batches_makes_of_a_prefetched_loader_is_right_too(ours: Any) -> None:
    accelerator = loops.new_accelerator()
    rest = skip_first_batches(ours(accelerator, loops.loader()), 7)
    assert [loops.flags(accelerator, batch)["end"] for batch in rest] == [False, False, True]


@pytest.mark.parametrize("options", [{"use_stateful_dataloader": True}, {}], ids=["stateful", "not stateful"])
def test_save_state_and_load_state(tmp_path: Path, options: Any, ours: Any) -> None:
    _save_and_load(tmp_path, options, ours)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_save_state_and_load_state_with_workers(tmp_path: Path, persistent: bool) -> None:
    workers = {"num_workers": 2, "persistent_workers": persistent}
    _save_and_load(tmp_path, {"use_stateful_dataloader": True}, partial(prepare, depth=3), **workers)


def _save_and_load(tmp_path: Path, options: Any, ours: Any, **workers: Any) -> None:
    def run(prepare: Any, folder: Path) -> Any:
        torch.manual_seed(0)
        accelerator = loops.new_accelerator(**options)
        batches = prepare(accelerator, loops.loader(shuffle=True, **workers))
        before = []
        for index, batch in enumerate(batches):
            before.append(loops.flags(accelerator, batch))
            if index == 4:
                accelerator.save_state(folder)
                break
        saved = folder / "dl_state_dict.bin"
        state = repr(torch.load(saved, weights_only=False)) if saved.exists() else None
        torch.manual_seed(1)
        accelerator = loops.new_accelerator(**options)
        batches = prepare(accelerator, loops.loader(shuffle=True, **workers))
        accelerator.load_state(folder)
        return before, state, [loops.flags(accelerator, batch) for batch in batches], torch.rand(()).item()

    assert run(ours, tmp_path / "ours") == run(plain, tmp_path / "plain")


@pytest.mark.slow
def test_workers_that_persist() -> None:
    options = {"data": lambda: loops.loader(shuffle=True, num_workers=1, persistent_workers=True), "stop": 6}
    assert loops.train(partial(prepare, depth=3), **options) == loops.train(plain, **options)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_arrays_stay_arrays(workers: int) -> None:
    accelerator = loops.new_accelerator()
    rows = [{"x": torch.ones(2), "box": np.arange(3)}, {"x": torch.zeros(2), "box": np.arange(4)}]
    batches = prepare(
        accelerator, DataLoader(rows, batch_size=1, collate_fn=lambda samples: samples[0], num_workers=workers)
    )
    got = list(batches)
    assert batches.stats().workers == ("shared" if workers else "none")
    assert [type(batch["box"]) for batch in got] == [np.ndarray, np.ndarray]
    assert [batch["box"].tolist() for batch in got] == [[0, 1, 2], [0, 1, 2, 3]]


def test_the_loader_is_the_one_that_accelerate_made() -> None:
    accelerator = loops.new_accelerator()
    loader = loops.loader()
    batches = accelerator.prepare(loader)
    prefetched = prepare(accelerator, batches, depth=3)
    assert prefetched is batches
    assert accelerator._dataloaders == [batches]
    assert isinstance(prefetched, DataLoader)
    assert len(prefetched) == 10
    assert prefetched.dataset is loader.dataset
    assert prefetched.total_batch_size == 4
    assert accelerator.prepare(prefetched) is prefetched
    assert len(list(prefetched)) == prefetched.stats().batches == 10
    assert prepare(accelerator, prefetched, depth=1).stats().depth == 1
    prefetched.close()
    for other in (copy.deepcopy(prefetched), pickle.loads(pickle.dumps(prefetched))):
        assert [batch[0].tolist() for batch in other] == [batch[0].tolist() for batch in loader]


# Bad input


def test_a_prepared_loader_in_a_bare_prefetcher_is_refused() -> None:
    accelerator = loops.new_accelerator()
    for options in ({}, {"num_workers": 0}):
        with pytest.raises(TypeError, match=r"Write instead: .*loader = prepare\(accelerator, loader, depth=2\)"):
            GPUPrefetcher(accelerator.prepare(loops.loader(**options)), "cpu")
    dispatched = loops.new_accelerator(dispatch_batches=True)
    with pytest.raises(TypeError, match="is a DataLoaderDispatcher that accelerate prepared"):
        GPUPrefetcher(dispatched.prepare(loops.loader()), "cpu")


def test_wrong_order() -> None:
    accelerator = loops.new_accelerator()
    with pytest.raises(TypeError, match=r"accelerator must be an accelerate.Accelerator, not a DataLoader"):
        prepare(loops.loader(), accelerator)
    with pytest.raises(TypeError, match="loader must be the DataLoader itself, not a GPUPrefetcher"):
        prepare(accelerator, GPUPrefetcher(loops.loader(), "cpu"))
    with pytest.raises(TypeError, match=r"not a list, .* write GPUPrefetcher\(loader, accelerator.device\)"):
        prepare(accelerator, [torch.ones(2)])


def test_bad_options() -> None:
    accelerator = loops.new_accelerator()
    with pytest.raises(ValueError, match="depth must be at least 1, not 0"):
        prepare(accelerator, loops.loader(), depth=0)
    with pytest.raises(ValueError, match="static must be False here"):
        prepare(accelerator, loops.loader(), static=True)
    with pytest.raises(TypeError, match="there is no option 'device'"):
        prepare(accelerator, loops.loader(), device="cpu")
    with pytest.raises(ValueError, match=r"leaves batches on the host: write Accelerator\(device_placement=True\)"):
        prepare(loops.new_accelerator(device_placement=False), loops.loader())
    elsewhere = accelerator.prepare(loops.loader())
    elsewhere.device = torch.device("meta")
    with pytest.raises(ValueError, match="must be a CPU or a CUDA GPU, not meta: use the loader as it is"):
        prepare(accelerator, elsewhere)


def test_a_loader_that_is_sharded_already() -> None:
    accelerator: Accelerator = loops.new_accelerator()
    sharded = loops.loader(sampler=DistributedSampler(range(38), num_replicas=2, rank=1))
    with pytest.warns(PrefetchWarning, match=r"num_replicas=2, but its batches go to 1 process"):
        prepare(accelerator, sharded)


@pytest.mark.slow
def test_n3_two_processes(accelerate_ranks: list[Any]) -> None:
    for rank in accelerate_ranks:
        result = rank["accelerate"]
        assert result["prefetched"] == result["plain"]
        first = [one["gathered"][0] for one in result["plain"]["train uneven"] if one.get("epoch") == 0]
        assert sorted(value for batch in first for value in batch) == [float(row) for row in range(37)]
