"""Looking a batch up in its distinct rows, and summing its gradients by row."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from prefetchpipe.device.base import Device
from prefetchpipe.tables.distinct import Distinct
from prefetchpipe.tables.kernels import RowKernels

__all__ = ["look_up", "sum_by_row"]


def look_up(rows: torch.Tensor, distinct: Distinct, shape: tuple[int, ...], device: Device) -> torch.Tensor:
    """``rows`` [ids, dim] for every position of a batch of ``shape``; its gradient is summed by row.

    torch's own backward sorts the batch once more; where the distinct ids were found by kernels it is sorted already.
    """
    inverse = distinct.inverse
    if inverse.shape != shape:
        inverse = inverse.view(shape)
    if inverse.device != rows.device:
        inverse = inverse.to(rows.device)
    kernels = _kernels(rows, distinct, device) if rows.requires_grad else None
    if kernels is None:
        return F.embedding(inverse, rows)
    found: torch.Tensor = _LookUp.apply(rows, inverse, distinct, device, kernels)  # type: ignore[no-untyped-call]
    return found


def sum_by_row(grad: torch.Tensor, distinct: Distinct, device: Device) -> torch.Tensor:
    """One gradient for each distinct row, out of one for each position, [ids, dim]."""
    kernels = _kernels(grad, distinct, device)
    if kernels is not None:
        assert distinct.places is not None
        return kernels.total(grad.contiguous(), distinct.places, device=device)
    return _torch_sum(grad, distinct.inverse.view(-1).to(grad.device), len(distinct.index))


def _torch_sum(grad: torch.Tensor, inverse: torch.Tensor, count: int) -> torch.Tensor:
    total: torch.Tensor = torch.ops.aten.embedding_dense_backward(grad, inverse, count, -1, False)
    return total


def _kernels(values: torch.Tensor, distinct: Distinct, device: Device) -> RowKernels | None:
    if distinct.places is None or not RowKernels.can_total(values.dtype):
        return None
    return RowKernels.of(device)


class _LookUp(torch.autograd.Function):
    """``F.embedding`` whose backward knows the sorted positions."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd's signature
        ctx: Any, rows: torch.Tensor, inverse: torch.Tensor, distinct: Distinct, device: Device, kernels: RowKernels
    ) -> Any:
        ctx.save_for_backward(inverse)
        ctx.given = distinct.places, device, kernels
        return torch.embedding(rows, inverse)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        places, device, kernels = ctx.given
        if torch.is_grad_enabled():  # create_graph=True: this one has a derivative of its own
            return _torch_sum(grad, inverse, inverse.numel()), None, None, None, None
        device.before_kernels()
        total = kernels.total(grad.contiguous(), places, device=device)
        device.before_kernels()  # what autograd does with it next are torch's own kernels
        return total, None, None, None, None
