"""Simulated devices for tables: the staged way as it comes, and one whose kernels reach host memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from prefetchpipe.tables.index import PAD
from prefetchpipe.testing import SimulatedDevice

SLOW = 1e6
"""Bytes a second: a copy takes long next to a call of the host."""


class ZeroCopyDevice(SimulatedDevice):
    """Runs Python twins of the kernels: late, on their stream, over the addresses that the real ones would get."""

    def __init__(self, kernel_seconds: float = 1e-3, **options: Any) -> None:
        super().__init__(**options)
        self.kernel_seconds = kernel_seconds

    def compile_kernels(self, source: str, names: tuple[str, ...]) -> Mapping[str, Any] | None:
        return {name: partial(self._run, name.partition("_")[0]) for name in names}

    def _run(self, name: str, stream: Any, blocks: int, threads: int, args: tuple[Any, ...]) -> None:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        with self.use_stream(stream):
            self.launch(TWINS[name], *tensors, seconds=self.kernel_seconds)


def _report(fault: torch.Tensor, value: int, position: int) -> None:
    if not int(fault[0]):
        fault[:] = torch.tensor([2, value, position])


def _gather(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, fault: torch.Tensor) -> None:
    out = out.view(-1, table.shape[1])
    for position, row in enumerate(ids.tolist()):
        out[position] = 0
        if 0 <= row < len(table):
            out[position] = table[row]
        elif row != PAD:
            _report(fault, row, position)


def _scatter(table: torch.Tensor, ids: torch.Tensor, *rest: torch.Tensor) -> None:
    order, values, fault = rest if len(rest) == 3 else (None, *rest)
    values = values.view(-1, table.shape[1])
    for at, row in enumerate(ids.tolist()):
        position = at if order is None else int(order[at])
        if row == PAD:
            continue
        if not 0 <= row < len(table):
            _report(fault, row, position)
        elif order is None or at + 1 == len(ids) or int(ids[at + 1]) != row:
            table[row] = values[position]


def _add(table: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, *rest: torch.Tensor) -> None:
    values, fault = rest
    values = values.view(-1, table.shape[1])
    for at, row in enumerate(ids.tolist()):
        if 0 <= row < len(table):
            table[row] += values[int(order[at])]
        elif row != PAD:
            _report(fault, row, int(order[at]))


TWINS = {"gather": _gather, "scatter": _scatter, "add": _add}


def on_device(device: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` in the memory of ``device``, there already."""
    if isinstance(device, SimulatedDevice):
        made = device.empty(tensor.shape, tensor.contiguous().stride(), tensor.dtype)
        device.launch(lambda to: to.copy_(tensor), made)
        device.synchronize()
        return made
    return tensor.to(device)
