"""Tiny batches by the plain loop's way on a real GPU; contracts C1, C2, C5."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.pipeline.plainway import PlainWay
from tests.support import Readings, constants, spin

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("is_pinned", [False, True])
def test_c4_c5_a_buffer_used_again_behind_a_slow_gpu(is_pinned: bool) -> None:
    buffer = torch.empty(64, 64, pin_memory=is_pinned)

    def rows() -> Iterator[torch.Tensor]:
        for index in range(60):
            yield buffer.fill_(index + 1)
        buffer.fill_(-1)

    prefetcher = GPUPrefetcher(rows(), "cuda")
    prefetcher._shared.plain = PlainWay(prefetcher._shared.counters)
    prefetcher._shared.plain.choose("a test")
    readings = Readings("cuda", 60)
    for index, batch in enumerate(prefetcher):
        spin(0.003)
        readings.queue(index, batch)
        del batch
    assert readings.values() == constants(range(1, 61))
    assert prefetcher.stats().plain_bytes > 0
    prefetcher.close()


def test_the_choice_gives_right_batches_either_way() -> None:
    loader = [{"x": torch.full((200, 100), float(index)), "y": torch.tensor(index)} for index in range(400)]
    prefetcher = GPUPrefetcher(loader, "cuda")
    for _ in range(2):
        kept = list(prefetcher)
        assert [(int(batch["x"].sum()) // 20_000, int(batch["y"])) for batch in kept] == [(i, i) for i in range(400)]
    assert prefetcher.stats().path in ("plain", "caller", "thread")
    prefetcher.close()
