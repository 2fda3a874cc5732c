"""The frameworks on a GPU: the same with prefetching as without, and batches that come through pinned memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from prefetchpipe.integrations import accelerate, fabric
from prefetchpipe.integrations.lightning import GPUPrefetch
from tests.integrations import accelerate_loops as loops
from tests.integrations import test_accelerate, test_fabric, test_transformers
from tests.integrations.lightning_models import HookRecorder, Recorder, loader
from tests.integrations.support import lightning_warnings, quiet_framework
from tests.integrations.test_lightning import SCENARIOS, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    *(pytest.mark.filterwarnings(text) for text in lightning_warnings),
]
quiet_framework("lightning.pytorch", "lightning.fabric", "transformers")


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("fetch", ["auto", "thread"])
def test_lightning(tmp_path: Path, scenario: str, fetch: str) -> None:
    arguments, options = SCENARIOS[scenario]()
    expected = fit(tmp_path, *arguments, accelerator="gpu", **options)
    arguments, options = SCENARIOS[scenario]()
    train, val, *callbacks = (*arguments, None)[: max(2, len(arguments))]
    prefetch = GPUPrefetch(depth=3, fetch=fetch)
    assert fit(tmp_path, train, val, *callbacks, prefetch, accelerator="gpu", **options) == expected
    if scenario != "empty":
        assert all(stats.device.startswith("cuda") for stats in prefetch.stats())
        assert sum(stats.copied_bytes for stats in prefetch.stats()) > 0


def test_lightning_hooks_see_the_host_or_the_device(tmp_path: Path) -> None:
    def hooks(*callbacks: Any) -> Any:
        return fit(tmp_path, loader(), None, *callbacks, model=HookRecorder, accelerator="gpu")["hooks"]

    plain = hooks()
    assert hooks(GPUPrefetch()) == plain
    ahead = hooks(GPUPrefetch(transfer_hooks="device"))
    assert ahead["before 0 cuda"] == ahead["transfer 0 cuda"] == ahead["after 0"] == plain["before 0 cpu"]


def test_lightning_hook_after_the_transfer(tmp_path: Path) -> None:
    class After(Recorder):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.hooks[f"after {batch[0].device.type}"] += 1
            return [leaf + torch.rand((), device=leaf.device) for leaf in batch]

    options = {"model": After, "accelerator": "gpu"}
    prefetch = GPUPrefetch()
    assert fit(tmp_path, loader(), None, prefetch, **options) == fit(tmp_path, loader(), None, **options)
    assert prefetch.stats()[0].batches == 16


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops of the CPU tests on the first GPU."""
    new = loops.new_accelerator
    monkeypatch.setattr(loops, "new_accelerator", partial(new, cpu=False))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", test_accelerate.KINDS)
@pytest.mark.parametrize("depth", [1, 4])
def test_accelerate_training(kind: str, depth: int) -> None:
    options = test_accelerate.KINDS[kind]
    expected = loops.train(test_accelerate.plain, **options)
    assert loops.train(partial(accelerate.prepare, depth=depth, fetch="thread"), **options) == expected


@pytest.mark.usefixtures("on_gpu")
def test_accelerate_batches_are_copied_by_us() -> None:
    batches = accelerate.prepare(loops.new_accelerator(), loops.loader(), depth=2)
    assert all(batch[0].is_cuda for batch in batches)
    assert batches.stats().copied_bytes == 38 * 4


@pytest.mark.usefixtures("on_gpu")
def test_accelerate_the_stream_changes_between_steps() -> None:
    """Accelerate holds a batch back; the stream that gets it is not the one that it was delivered to."""
    rows = [torch.full((1 << 20,), float(index)) for index in range(40)]
    data = torch.utils.data.DataLoader(rows, batch_size=None)
    batches = iter(accelerate.prepare(loops.new_accelerator(), data, depth=2, fetch="thread"))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = torch.empty(len(rows), 2, device="cuda")
    torch.cuda.synchronize()
    for index in range(len(rows)):
        with torch.cuda.stream(streams[index % 2]):
            batch = next(batches)
            torch.cuda._sleep(2_000_000)
            results[index, 0], results[index, 1] = batch.amin(), batch.amax()
            del batch
    torch.cuda.synchronize()
    assert results.tolist() == [[float(index)] * 2 for index in range(len(rows))]


@pytest.mark.parametrize("fetch", ["auto", "thread"])
def test_fabric_training(fetch: str) -> None:
    expected = test_fabric.train(test_fabric.plain, accelerator="gpu")
    assert test_fabric.train(partial(fabric.prepare, depth=3, fetch=fetch), accelerator="gpu") == expected


@pytest.mark.parametrize("scenario", test_transformers.SCENARIOS)
@pytest.mark.parametrize("pin_memory", [False, True])
def test_transformers_training(tmp_path: Path, scenario: str, pin_memory: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(loops, "new_accelerator", lambda: None)  # the trainer makes its own, on the GPU
    options = test_transformers.SCENARIOS[scenario] | {"use_cpu": False, "dataloader_pin_memory": pin_memory}

    def run(cls: type[Any]) -> Any:
        for state in (loops.AcceleratorState, loops.PartialState, loops.GradientState):
            state._reset_state()
        trainer = test_transformers.make_trainer(cls, tmp_path, **options)
        trainer.train()
        return test_transformers.outcome(trainer)

    assert run(test_transformers.prefetching("auto")) == run(Trainer)
