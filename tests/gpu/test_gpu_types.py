"""Batches of other libraries, several ranks and several GPUs, on real devices; contracts C4, C6, C12, C16, C18.

The tests in tests/integrations run on CUDA too where there is a device; here is what only CUDA has.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.errors import PrefetchWarning
from tests.support import Readings, constants, spin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

ROOT = Path(__file__).resolve().parents[2]
COUNT = 60


def graphs(value: float) -> Any:
    from torch_geometric.data import Batch, Data

    one = Data(x=torch.full((4000, 16), value), edge_attr=torch.full((999,), value), z=torch.full((7,), int(value)))
    return Batch.from_data_list([one, one, one])


def tensordict(value: float) -> Any:
    from tensordict import TensorDict

    return TensorDict({"a": torch.full((1000, 64), value), "b": {"c": torch.full((1000,), int(value))}}, [1000])


def encoding(value: float) -> Any:
    from transformers import BatchEncoding

    ids = torch.full((64, 512), int(value))
    return BatchEncoding({"input_ids": ids, "attention_mask": ids.clone(), "labels": ids.clone()})


MAKERS = {"torch_geometric": graphs, "tensordict": tensordict, "transformers": encoding}


def leaves(batch: Any) -> list[torch.Tensor]:
    if hasattr(batch, "edge_attr"):
        return [batch.x, batch.edge_attr, batch.z]
    if hasattr(batch, "batch_size"):
        return list(batch.values(True, True))
    return list(batch.values())


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Any:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}")
    return MAKERS[request.param]


@pytest.mark.parametrize("depth", [1, 3])
def test_c4_v4_a_slow_gpu_never_sees_another_batch(make: Any, fetch: str, depth: int) -> None:
    batches = [make(float(i + 1)) for i in range(COUNT)]
    readings = Readings("cuda", COUNT)
    for index, batch in enumerate(GPUPrefetcher(batches, "cuda", depth=depth, fetch=fetch)):
        spin(0.02)
        readings.queue(index, *leaves(batch))
        del batch
    assert readings.values() == constants(range(1, COUNT + 1))


def test_c16_packed_and_none_of_it_pageable(make: Any) -> None:
    batches = [make(float(i + 1)) for i in range(8)]
    prefetcher = GPUPrefetcher(batches, "cuda", fetch="thread")
    out = list(prefetcher)
    assert all(leaf.is_cuda for batch in out for leaf in leaves(batch))
    assert {type(batch) for batch in out} == {type(batches[0])}
    stats = prefetcher.stats()
    assert stats.staged_bytes >= sum(leaf.nbytes for batch in batches for leaf in leaves(batch))
    assert stats.pageable_bytes == 0


def test_c12_the_same_as_by_its_own_to(make: Any) -> None:
    source = make(3.0)
    (out,) = GPUPrefetcher([make(3.0)], "cuda")
    expected = source.to("cuda")
    assert type(out) is type(expected)
    for one, other in zip(leaves(out), leaves(expected), strict=True):
        assert (one.device, one.dtype, one.stride()) == (other.device, other.dtype, other.stride())
        assert torch.equal(one, other)
    if hasattr(expected, "device"):
        assert out.device == leaves(out)[0].device


@pytest.mark.skipif(importlib.util.find_spec("torch_geometric") is None, reason="needs torch_geometric")
def test_c16_graphs_pinned_by_the_loader_are_not_staged_again() -> None:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    data = [Data(x=torch.full((20_000, 16), float(i))) for i in range(12)]
    prefetcher = GPUPrefetcher(DataLoader(data, batch_size=2, pin_memory=True), "cuda")
    values = [sorted(set(batch.x[:, 0].tolist())) for batch in prefetcher]
    assert values == [[2.0 * i, 2.0 * i + 1] for i in range(6)]
    stats = prefetcher.stats()
    assert stats.direct_bytes >= 12 * 20_000 * 16 * 4
    assert stats.staged_bytes < 12 * 20_000 * 16 * 4


@needs_two
def test_c18_the_second_gpu(make: Any) -> None:
    reserved = torch.cuda.memory_reserved(0)
    for batch in GPUPrefetcher([make(float(i + 1)) for i in range(8)], "cuda:1"):
        assert {leaf.device for leaf in leaves(batch)} == {torch.device("cuda:1")}
    assert torch.cuda.memory_reserved(0) == reserved


@needs_two
@pytest.mark.parametrize("device", [None, "cuda"])
def test_c18_a_rank_whose_device_was_never_set_is_warned(monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with torch.cuda.device(0), pytest.warns(PrefetchWarning, match=r"torch.cuda.set_device\(1\)"):
        GPUPrefetcher([], device)
    with torch.cuda.device(1), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert GPUPrefetcher([], device).stats().device == "cuda:1"


@needs_two
@pytest.mark.parametrize("script", ["tests/integrations/ddp_rank.py", "examples/ddp.py"])
def test_two_ranks_over_nccl(script: str) -> None:
    from tests.integrations.test_ddp import torchrun

    said = torchrun(ROOT / script, PYTHONWARNINGS="default")
    if script.startswith("examples"):
        assert said.splitlines()[0] == "processes       2, on cuda"
    else:
        assert sorted(said.splitlines()) == ["RIGHT rank 0 of 2 on cuda", "RIGHT rank 1 of 2 on cuda"]


@needs_two
def test_the_row_for_two_gpus_runs(tmp_path: Path) -> None:
    from benchmarks import schema
    from benchmarks.cli import main

    out = tmp_path / "two.json"
    assert main(["--quick", "--rows", "two-gpus", "--quiet", "--out", str(out)]) == 0
    (row,) = schema.load(out).rows
    assert [value.name.partition(",")[0] for value in row.values] == ["transfer", "balanced", "compute", "link"]
    assert all(min(value.raw) > 0 for value in row.values)
