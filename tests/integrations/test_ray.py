"""Ray Data as a source: the batches of the plain loop, packed out of the object store; contracts C1, C7, C9, C12."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefetchpipe import GPUPrefetcher
from tests.support import Thread, assert_same, collect, is_cuda, leaves_of, settle

ray = pytest.importorskip("ray")
RayTaskError = ray.exceptions.RayTaskError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data() -> Iterator[Any]:
    """100 rows of a tensor, a number and a text, in blocks of 25."""
    cpus = 2 + torch.cuda.device_count()  # the example has a worker for each GPU
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, configure_logging=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    rows = [{"x": np.full((2, 3), i, dtype=np.float32), "id": i, "name": f"row {i}"} for i in range(100)]
    yield ray.data.from_items(rows, override_num_blocks=4).materialize()
    ray.shutdown()


def test_c1_the_batches_of_the_plain_loop_pass_after_pass(device: Any, data: Any) -> None:
    loader = data.iter_batches(batch_size=16, batch_format="numpy")
    plain = list(loader)
    assert not plain[0]["x"].flags.writeable  # as they lie in the object store
    prefetcher = GPUPrefetcher(loader, device)
    for _ in range(2):
        kept = list(prefetcher)
        settle(device)
        assert len(kept) == len(plain) == 7
        for out, expected in zip(kept, plain, strict=True):
            assert list(out) == list(expected)
            assert_same({k: out[k].cpu() for k in ("x", "id")}, {k: expected[k] for k in ("x", "id")})
            assert out["name"].tolist() == expected["name"].tolist()
            assert all(leaf.is_cuda == is_cuda(device) for leaf in leaves_of(out))


def test_c1_torch_batches_and_a_local_shuffle(device: Any, data: Any) -> None:
    options = {"batch_size": 10, "drop_last": True, "local_shuffle_buffer_size": 20, "local_shuffle_seed": 3}
    loader = data.select_columns(["x", "id"]).iter_torch_batches(device="cpu", **options)
    assert_same(collect(device, GPUPrefetcher(loader, device)), list(loader))


def test_c16_arrays_are_packed(stream_device: Any, data: Any) -> None:
    prefetcher = GPUPrefetcher(data.iter_batches(batch_size=20, batch_format="numpy"), stream_device)
    for _ in prefetcher:
        pass
    stats = prefetcher.stats()
    assert stats.batches == 5
    assert stats.staged_bytes >= 100 * (6 * 4 + 8)
    assert stats.pageable_bytes == 0


def test_c9_leaving_early_and_starting_again(device: Any, data: Any) -> None:
    prefetcher = GPUPrefetcher(data.iter_batches(batch_size=5, batch_format="numpy"), device)
    for batch in prefetcher:
        settle(device)
        assert batch["id"].tolist() == [0, 1, 2, 3, 4]
        break
    assert sum(len(batch["id"]) for batch in prefetcher) == 100


def test_c7_an_error_in_a_task(data: Any) -> None:
    def fail(batch: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("row 2")

    loader = data.map_batches(fail, batch_format="numpy").iter_batches(batch_size=5)
    with pytest.raises(RayTaskError, match="row 2") as plain:
        list(loader)
    with pytest.raises(RayTaskError, match="row 2") as ours:
        list(GPUPrefetcher(loader, "cpu"))
    assert type(ours.value).__name__ == type(plain.value).__name__  # Ray makes a class for each


def test_c1_each_of_two_consumers_has_its_split(data: Any) -> None:
    def read(split: Any) -> list[int]:
        return [
            int(i)
            for batch in GPUPrefetcher(split.iter_batches(batch_size=8, batch_format="numpy"), "cpu")
            for i in batch["id"]
        ]

    consumers = [Thread(lambda split=split: read(split)) for split in data.streaming_split(2, equal=True)]
    one, other = (consumer.result(60) for consumer in consumers)
    assert len(one) == len(other) == 50
    assert sorted(one + other) == list(range(100))


def test_a_dataset_is_no_loader_and_the_message_says_what_is(data: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)iterable of batches, .*; pass what its iter_batches\(\) gives"):
        GPUPrefetcher(data.iterator(), "cpu")
    with pytest.raises(TypeError, match=r"iter_batches\(\)"):  # Ray's own words
        iter(GPUPrefetcher(data, "cpu"))


def test_the_example(data: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """In the Ray instance of this module: starting another one takes longer than the example."""
    runpy.run_path(str(ROOT / "examples" / "ray_data.py"), run_name="example")["main"]()
    lines = {line[:16].strip(): line[16:] for line in capsys.readouterr().out.splitlines()}
    assert int(lines["rows a worker"]) == 1797 // max(1, torch.cuda.device_count())
    assert float(lines["accuracy"]) > 0.85


def test_tensors_of_the_object_store_are_not_handed_on(data: Any) -> None:
    """On the CPU a batch is a copy: writing to it must not reach, or fail on, Ray's read-only memory."""
    (batch,) = GPUPrefetcher(data.iter_batches(batch_size=100, batch_format="numpy"), "cpu")
    batch["x"].zero_()
    (again,) = data.iter_batches(batch_size=100, batch_format="numpy")
    assert torch.from_numpy(again["x"].copy()).sum() == sum(range(100)) * 6
