"""The choice between ids as they come and sorted ids: by times that are there, for large tables and many ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefetchpipe import HostTable
from prefetchpipe.tables import ways
from prefetchpipe.tables.ways import LEAST_BYTES, LEAST_IDS, Ways
from prefetchpipe.testing import SimulatedDevice
from tests.support_tables import ZeroCopyDevice, on_device

ROWS, DIM = 40, 3


class Loop:
    """Calls that take given times on the device, one after the other."""

    def __init__(self, plain: float, ordered: float, nbytes: int = LEAST_BYTES) -> None:
        self.device = SimulatedDevice()
        self.seconds = {"plain": plain, "sorted": ordered}
        self.ways = Ways(self.device, nbytes)
        self.calls: list[str] = []

    def call(self, what: str = "gather", count: int = LEAST_IDS) -> str:
        self.ways.run(
            what, count, self.device.default_stream, lambda: self._move("plain"), lambda: self._move("sorted")
        )
        return self.calls[-1]

    def _move(self, way: str) -> None:
        self.calls.append(way)
        self.device.launch(lambda: None, seconds=self.seconds[way])


@pytest.mark.parametrize(("plain", "ordered", "best"), [(2.0, 1.0, "sorted"), (1.0, 2.0, "plain"), (1.0, 1.0, "plain")])
def test_the_faster_way_is_kept(plain: float, ordered: float, best: str) -> None:
    loop = Loop(plain, ordered)
    for _ in range(6):
        loop.call()
        loop.device.synchronize()
    assert loop.calls == ["plain", "sorted"] * 3
    assert {loop.call() for _ in range(5)} == {best}


def test_nobody_waits_for_the_times() -> None:
    loop = Loop(2.0, 1.0)
    assert [loop.call() for _ in range(10)] == ["plain", "sorted"] * 3 + ["plain"] * 4
    assert loop.device.now < 1
    loop.device.synchronize()
    assert loop.call() == "sorted"


def test_sizes_and_calls_are_measured_apart() -> None:
    loop = Loop(2.0, 1.0)
    for _ in range(6):
        loop.call()
    loop.device.synchronize()
    assert loop.call() == "sorted"
    assert loop.call(count=LEAST_IDS + 1) == "sorted"
    assert loop.call("scatter") == "plain"
    assert loop.call(count=4 * LEAST_IDS) == "plain"


@pytest.mark.parametrize(("nbytes", "count"), [(LEAST_BYTES - 1, LEAST_IDS), (LEAST_BYTES, LEAST_IDS - 1)])
def test_small_tables_and_few_ids_go_as_they_come(nbytes: int, count: int) -> None:
    loop = Loop(2.0, 1.0, nbytes)
    assert [loop.call(count=count) for _ in range(8)] == ["plain"] * 8


def test_both_ways_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "LEAST_BYTES", 0)
    monkeypatch.setattr(ways, "LEAST_IDS", 1)
    orders: list[Any] = []
    device = ZeroCopyDevice()
    model = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    table = HostTable(ROWS, DIM, device=device, init=model)
    kernels = table._mover._kernels  # type: ignore[attr-defined]
    gather = kernels.gather

    def watched(tables: Any, ids: Any, order: Any, outs: Any, **more: Any) -> None:
        orders.append(order)
        gather(tables, ids, order, outs, **more)

    monkeypatch.setattr(kernels, "gather", watched)
    draw = torch.Generator().manual_seed(1)
    for number in range(12):
        ids = torch.randint(0, ROWS, (9,), generator=draw)
        rows = table.gather(on_device(device, ids))
        distinct = torch.randperm(ROWS, generator=draw)[:9]
        values = torch.full((9, DIM), float(number)) + torch.arange(9)[:, None]
        device.synchronize()
        assert torch.equal(rows, model[ids])
        table.scatter(on_device(device, distinct), on_device(device, values), unique=True)
        model[distinct] = values
    assert torch.equal(table.host_tensor(), model)
    assert [order is None for order in orders[:6]] == [True, False] * 3


@pytest.mark.parametrize("turn", [0, 1])
def test_a_bad_id_is_told_with_its_position_either_way(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    monkeypatch.setattr(ways, "LEAST_BYTES", 0)
    monkeypatch.setattr(ways, "LEAST_IDS", 1)
    device = ZeroCopyDevice()
    table = HostTable(ROWS, DIM, device=device, init=torch.ones(ROWS, DIM))
    for _ in range(turn):
        table.gather([1, 2, 3, 4])
    rows = table.gather(on_device(device, torch.tensor([7, 9, ROWS, 1])))
    with pytest.raises(IndexError, match=f"index {ROWS} at position 2 "):
        table.synchronize()
    assert rows.sum(1).tolist() == [DIM, DIM, 0, DIM]
