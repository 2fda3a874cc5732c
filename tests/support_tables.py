"""Simulated devices for tables: the staged way as it comes, and one whose kernels reach host memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from prefetchpipe.tables.index import PAD
from prefetchpipe.tables.source import NO_KEY
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
        numbers = [None if isinstance(a, torch.Tensor) else a for a in args]  # a kernel keeps no tensor alive

        def kernel(*views: torch.Tensor) -> None:
            rest = iter(views)
            TWINS[name](*(next(rest) if number is None else number for number in numbers))

        with self.use_stream(stream):
            self.launch(kernel, *tensors, seconds=self.kernel_seconds)


def _report(fault: torch.Tensor, value: int, position: int) -> None:
    if not int(fault[0]):
        fault[:] = torch.tensor([2, value, position])


def _pairs(count: int, given: tuple[Any, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tables and their rows, [ids, dim]."""
    return [(given[4 * k], given[4 * k + 1].view(-1, given[4 * k].shape[1])) for k in range(count)]


def _positions(ids: torch.Tensor, order: Any) -> list[int]:
    return list(range(len(ids))) if isinstance(order, int) else order.tolist()


# Arguments as the kernels have them.
# ruff: noqa: PLR0917


def _gather(ids: Any, order: Any, count: int, limit: int, fault: torch.Tensor, tables: int, *given: Any) -> None:
    for table, out in _pairs(tables, given):
        for position in _positions(ids, order):
            row = int(ids[position])
            out[position] = 0
            if 0 <= row < limit:
                out[position] = table[row]
            elif row != PAD:
                _report(fault, row, position)


def _scatter(
    ids: Any, order: Any, count: int, limit: int, fault: torch.Tensor, counts: Any, tables: int, *given: Any
) -> None:
    positions = _positions(ids, order)
    if not isinstance(counts, int):
        counts[ids[(ids >= 0) & (ids < limit)]] += 1
    for table, values in _pairs(tables, given):
        for at, position in enumerate(positions):
            row = int(ids[position])
            if row == PAD:
                continue
            if not 0 <= row < limit:
                _report(fault, row, position)
            elif isinstance(order, int) or at + 1 == count or int(ids[positions[at + 1]]) != row:
                table[row] = values[position]


def _patch(ids: Any, count: int, keys: Any, other_count: int, tables: int, *given: Any) -> None:
    at = {row: place for place, row in reversed(list(enumerate(keys.tolist()))) if row != PAD}
    for rows, others in _pairs(tables, given):
        for place, row in enumerate(ids.tolist()):
            if row in at:
                rows[place] = others[at[row]]


def _add(table: Any, ids: Any, order: Any, values: Any, count: int, width: int, limit: int, fault: Any) -> None:
    values = values.view(-1, width)
    for position in order.tolist():
        row = int(ids[position])
        if 0 <= row < limit:
            table[row] += values[position]
        elif row != PAD:
            _report(fault, row, position)


def _narrow(ids: Any, keys: Any, count: int, limit: int, fault: Any) -> None:
    for position, row in enumerate(ids.tolist()):
        keys[position] = row if 0 <= row < limit else NO_KEY
        if not isinstance(fault, int) and not 0 <= row < limit and row != PAD:
            _report(fault, row, position)


def _place(keys: Any, order: Any, count: int, ids: Any, inverse: Any, spans: Any) -> None:
    ids.fill_(PAD)
    known = keys.tolist()
    for at, key in enumerate(known):
        start = known.index(key)
        inverse.view(-1)[order[at]] = start
        spans[at] = start | start + known.count(key) << 32
        if at == start and key != NO_KEY:
            ids[at] = key


def _parts(values: Any, order: Any, spans: Any, count: int, width: int, parts: Any, out: Any) -> None:
    out.zero_()
    values = values.view(-1, width)
    for at in range(count):
        out[int(spans[at]) & 0xFFFFFFFF] += values[int(order[at])]


TWINS: dict[str, Any] = {
    "gather": _gather,
    "scatter": _scatter,
    "patch": _patch,
    "add": _add,
    "narrow": _narrow,
    "place": _place,
    "parts": _parts,
    "totals": lambda *args: None,
}


def on_device(device: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` in the memory of ``device``, there already."""
    if isinstance(device, SimulatedDevice):
        made = device.empty(tensor.shape, tensor.contiguous().stride(), tensor.dtype)
        device.launch(lambda to: to.copy_(tensor), made)
        device.synchronize()
        return made
    return tensor.to(device)
