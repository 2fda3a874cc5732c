"""Frameworks that hold a batch back (contracts 3 and 4), on the simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from prefetchpipe.integrations._standin import StandIn, make_options
from prefetchpipe.testing import SimulatedDevice
from tests.integrations import accelerate_loops
from tests.support import Readings, constants

COUNT = 16


class Rows:
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1024,), float(index + 1))


def prepared(device: SimulatedDevice, fetch: str) -> Any:
    """A loader of Accelerate's, whose batches go to the simulated device."""
    loader = accelerate_loops.new_accelerator().prepare(DataLoader(Rows(), batch_size=None))
    options = make_options(2, {"fetch": fetch})
    loader.base_dataloader = StandIn(loader.base_dataloader, device, options, hands_out_late=True)
    return loader


@pytest.fixture(params=[True, False], ids=["streams change", "one stream"])
def changes(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_c3_the_stream_of_the_moment_waits(fetch: str, changes: bool) -> None:
    device = SimulatedDevice(bandwidth=1e6)
    readings = Readings(device, COUNT)
    batches = iter(prepared(device, fetch))
    for index in range(COUNT):
        with device.use_stream(device.new_stream() if changes else device.current_stream()):
            readings.queue(index, next(batches))
    assert readings.values() == constants(range(1, COUNT + 1))


def test_c4_memory_is_kept_for_the_stream_of_the_moment(fetch: str, changes: bool) -> None:
    device = SimulatedDevice()
    readings = Readings(device, COUNT)
    batches = iter(prepared(device, fetch))
    streams = [device.new_stream(), device.new_stream()]
    for index in range(COUNT):
        with device.use_stream(streams[index % 2 if changes else 0]):
            batch = next(batches)
            device.launch(lambda: None, seconds=0.05)
            readings.queue(index, batch)
            del batch
    assert readings.values() == constants(range(1, COUNT + 1))
