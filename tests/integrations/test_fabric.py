"""Fabric gives the same with a prefetcher inside of its loaders as without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from prefetchpipe import GPUPrefetcher
from prefetchpipe.integrations.fabric import prepare


def new_fabric(**options: Any) -> Fabric:
    fabric = Fabric(**({"accelerator": "cpu", "devices": 1} | options))
    fabric.launch()
    return fabric


def loader(rows: int = 22, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(float(rows))[:, None]), batch_size=3, **options)


def plain(fabric: Fabric, data: Any) -> Any:
    return fabric.setup_dataloaders(data)


def train(setup: Any, *, stop: int = 1000, **options: Any) -> Any:
    """Batches, losses, weights and what is left of the random numbers."""
    torch.manual_seed(0)
    fabric = new_fabric(**options)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(1, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    batches = setup(fabric, loader(shuffle=True))
    seen: list[Any] = [len(batches)]
    for _ in range(3):
        for index, (x,) in enumerate(batches):
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            seen.append([x.tolist(), loss.item()])
            if index == stop:
                break
    return [*seen, [parameter.tolist() for parameter in model.parameters()], torch.rand(()).item()]


@pytest.mark.parametrize("fetch", ["auto", "thread", "caller"])
@pytest.mark.parametrize("stop", [1000, 3])
def test_training_is_the_same(fetch: str, stop: int) -> None:
    def one_line(fabric: Fabric, data: Any) -> Any:
        return prepare(fabric, data, depth=3, fetch=fetch)

    def after_setup(fabric: Fabric, data: Any) -> Any:
        return prepare(fabric, fabric.setup_dataloaders(data), depth=3, fetch=fetch)

    expected = train(plain, stop=stop)
    assert train(one_line, stop=stop) == expected
    assert train(after_setup, stop=stop) == expected


def test_a_bare_prefetcher_around_fabrics_loader_is_right_too() -> None:
    def naive(fabric: Fabric, data: Any) -> Any:
        return GPUPrefetcher(fabric.setup_dataloaders(data), fabric.device)

    assert train(naive) == train(plain)


def test_preparing_twice_changes_the_depth() -> None:
    fabric = new_fabric()
    batches = prepare(fabric, loader(), depth=2)
    assert prepare(fabric, batches, depth=5) is batches
    assert batches._dataloader.stats().depth == 5
    assert len(list(batches)) == 8
    assert batches._dataloader.stats().batches == 8


def test_arrays_stay_arrays() -> None:
    rows = [{"x": torch.ones(2), "box": np.arange(3)}]
    (batch,) = prepare(new_fabric(), DataLoader(rows, batch_size=1, collate_fn=lambda samples: samples[0]))
    assert type(batch["box"]) is np.ndarray


def test_bad_input() -> None:
    fabric = new_fabric()
    with pytest.raises(TypeError, match=r"fabric must be a lightning.fabric.Fabric, not a DataLoader"):
        prepare(loader(), fabric)
    with pytest.raises(TypeError, match="loader must be the DataLoader itself, not a GPUPrefetcher"):
        prepare(fabric, GPUPrefetcher(loader(), "cpu"))
    with pytest.raises(TypeError, match=r"not a list, .* write GPUPrefetcher\(loader, fabric.device\)"):
        prepare(fabric, [torch.ones(2)])
    with pytest.raises(ValueError, match="leaves batches on the host: leave that argument out"):
        prepare(fabric, fabric.setup_dataloaders(loader(), move_to_device=False))
    with pytest.raises(ValueError, match="static must be False here"):
        prepare(fabric, loader(), static=True)


@pytest.mark.slow
def test_two_processes(lightning_ranks: list[Any]) -> None:
    results = [rank["fabric"] for rank in lightning_ranks]
    for result in results:
        assert result["prefetched"] == result["plain"]
        assert result["plain"][0] == 4
    assert results[0]["plain"][1] != results[1]["plain"][1]
