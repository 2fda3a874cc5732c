"""The short way on a real GPU; contracts C1 to C6."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from prefetchpipe import GPUPrefetcher
from tests.support import Readings, constants, spin

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


SIZES = {"small": 64 * 64, "larger": 1 << 17, "in parts": 1 << 21}


@pytest.mark.parametrize("fetch", ["auto", "caller"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("is_pinned", [False, True])
def test_c2_c3_c4_c5_c6_a_buffer_used_again_behind_a_slow_gpu(is_pinned: bool, size: int, fetch: str) -> None:
    buffer = torch.empty(size, pin_memory=is_pinned)

    def rows() -> Iterator[dict[str, torch.Tensor]]:
        for index in range(60):
            yield {"x": buffer.fill_(index + 1), "y": torch.full((8,), index + 1)}
        buffer.fill_(-1)

    with GPUPrefetcher(rows(), "cuda", fetch=fetch) as prefetcher:
        readings = Readings("cuda", 60)
        for index, batch in enumerate(prefetcher):
            spin(0.003)
            readings.queue(index, *batch.values())
            del batch
        assert readings.values() == constants(range(1, 61))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_c2_kept_batches_of_two_passes(size: int) -> None:
    loader = [{"x": torch.full((size,), float(index)), "y": torch.tensor(index)} for index in range(40)]
    with GPUPrefetcher(loader, "cuda", fetch="caller") as prefetcher:
        for _ in range(2):
            kept = list(prefetcher)
            assert [(float(b["x"].min()), float(b["x"].max()), int(b["y"])) for b in kept] == [
                (i, i, i) for i in range(40)
            ]
        assert prefetcher.stats().path == "caller"


def test_c3_batches_go_to_the_stream_of_the_moment() -> None:
    loader = [torch.full((1 << 17,), float(index)) for index in range(40)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    sums = []
    with GPUPrefetcher(loader, "cuda", fetch="caller") as prefetcher:
        iterator = iter(prefetcher)
        for index in range(40):
            with torch.cuda.stream(streams[index % 2]):
                batch = next(iterator)
                spin(0.002)
                sums.append(batch.sum())
                del batch
    torch.cuda.synchronize()
    assert [float(total) / (1 << 17) for total in sums] == list(range(40))
