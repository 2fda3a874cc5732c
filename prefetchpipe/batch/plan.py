"""Which way each leaf of a batch goes, decided once per signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prefetchpipe.batch.few import FewLeaves
from prefetchpipe.batch.layout import Layout, is_packable
from prefetchpipe.batch.rows import Rows
from prefetchpipe.device.base import Device

__all__ = ["Plan", "PlanCache"]

Key = tuple[object, ...]

_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))

_PINNED_CHECK = 8
"""Every so many batches it is asked whether leaves are still pinned, or not. Either answer gives right batches: the
driver copies pageable memory as well, only slower; and each question costs 2 us."""


class Plan:
    """The ways of the leaves of one signature.

    Attributes:
        packed: Leaves that go through a pinned slot.
        layout: Where those lie; None if there are none.
        pinned: Leaves that the copy engine can read where they are.
        resident: Leaves on the device already.
        moved: Everything else, by its own ``.to``.
    """

    __slots__ = ("largest", "layout", "moved", "packed", "pinned", "resident")

    def __init__(self, leaves: Sequence[Any], resident: list[int], pinned: list[int]) -> None:
        self.resident = resident
        self.pinned = pinned
        taken = {*resident, *pinned}
        self.packed = [i for i, leaf in enumerate(leaves) if i not in taken and is_packable(leaf)]
        taken.update(self.packed)
        self.moved = [i for i in range(len(leaves)) if i not in taken]
        self.layout: Layout | FewLeaves | None = Layout([leaves[i] for i in self.packed]) if self.packed else None
        self.largest = max(self.packed, key=lambda i: leaves[i].numel() * leaves[i].dtype.itemsize, default=-1)

    @classmethod
    def of_few(cls, leaves: Sequence[Any]) -> Plan:
        """For leaves of which none is resident or pinned, and for which :class:`FewLeaves` is enough."""
        plan = cls.__new__(cls)
        plan.resident = plan.pinned = plan.moved = []
        plan.packed = list(range(len(leaves)))
        plan.layout = FewLeaves(leaves)
        plan.largest = 0
        return plan


class PlanCache:
    """Plans by signature, bounded: batches of ever new shapes must not grow it (contract 14).

    Args:
        device: Says what is resident and what is pinned.
    """

    __slots__ = ("_count", "_device", "_plans")

    _LIMIT = 128

    def __init__(self, device: Device) -> None:
        self._device = device
        self._plans: dict[Key, Plan] = {}
        self._count = 0

    def get(self, leaves: Sequence[Any]) -> Plan:
        """The plan for a batch with these leaves."""
        key, storages = self._key(leaves)
        plan = self._plans.get(key)
        self._count += 1
        if plan is None or (self._count % _PINNED_CHECK == 0 and self._pinned_otherwise(plan, leaves)):
            if len(self._plans) >= self._LIMIT:
                self._plans.clear()
            plan = self._plans[key] = self._make(leaves, storages)
        return plan

    def _key(self, leaves: Sequence[Any]) -> tuple[Key, list[int]]:
        """Dtypes, shapes, strides, flags, and which leaves share a storage where."""
        parts: list[object] = []
        storages: list[int] = []
        host_memory = self._device.host_memory
        for leaf in leaves:
            if type(leaf) is torch.Tensor and leaf.is_cpu:
                dtype = leaf.dtype
                try:
                    parts += (dtype, leaf.shape, leaf.stride(), leaf.requires_grad, leaf.is_neg())
                    storages.append(leaf.untyped_storage().data_ptr() or -1 - len(storages))
                except RuntimeError:  # sparse and nested tensors have no strides or no storage
                    parts.append(leaf.layout)
                    storages.append(-1 - len(storages))
                if dtype in _COMPLEX:
                    parts.append(leaf.is_conj())
                if host_memory:
                    parts.append(self._device.is_resident(leaf))
                continue
            storages.append(-1 - len(storages))
            if isinstance(leaf, Rows):
                parts += (Rows, leaf.dtype, leaf.shape)
            else:
                is_here = isinstance(leaf, torch.Tensor) and self._device.is_resident(leaf)
                parts.append((type(leaf), is_here))
        if len(set(storages)) != len(storages):
            first: dict[int, int] = {}
            for i, (leaf, storage) in enumerate(zip(leaves, storages, strict=True)):
                if storage > 0:
                    parts.append((first.setdefault(storage, i), leaf.storage_offset(), leaf.untyped_storage().nbytes()))
        return tuple(parts), storages

    def _pinned_otherwise(self, plan: Plan, leaves: Sequence[Any]) -> bool:
        """Whether what is pinned has changed; the largest packed leaf stands for all."""
        if plan.largest >= 0 and self._device.staged and self._is_pinned(leaves[plan.largest]):
            return True
        return any(not self._device.is_pinned(leaves[i]) for i in plan.pinned)

    def _is_pinned(self, leaf: Any) -> bool:
        return not isinstance(leaf, Rows) and self._device.is_pinned(leaf)

    def _make(self, leaves: Sequence[Any], storages: list[int]) -> Plan:
        device = self._device
        if FewLeaves.suits(leaves, storages) and not any(
            (device.host_memory and device.is_resident(leaf)) or (device.staged and device.is_pinned(leaf))
            for leaf in leaves
        ):
            return Plan.of_few(leaves)
        resident = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and device.is_resident(leaf)]
        pinned = [
            i
            for i, leaf in enumerate(leaves)
            if device.staged and i not in resident and is_packable(leaf) and _is_dense(leaf) and self._is_pinned(leaf)
        ]
        return Plan(leaves, resident, pinned)


def _is_dense(leaf: torch.Tensor | Rows) -> bool:
    """Whether the elements fill one stretch of memory, in any order of dimensions."""
    if leaf.numel() == 0 or isinstance(leaf, Rows):
        return False
    if leaf.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True
