"""Devices: where batches arrive."""

from __future__ import annotations

import torch

from prefetchpipe.device.base import Device

__all__ = ["Device", "portable", "resolve"]


def portable(device: Device) -> str | Device:
    """What stands for ``device`` in a copy or a pickle, and :func:`resolve` takes: its name, unless it is not ours."""
    is_ours = type(device).__module__.startswith("prefetchpipe.device.")
    return str(device.torch_device) if is_ours else device


def resolve(device: str | torch.device | Device | None) -> Device:
    """The device that ``device`` names, with its index resolved in the calling thread (contract 18).

    Raises:
        TypeError: Not a device at all.
        ValueError: A device that is not there, or of a kind that is not supported.
    """
    if device is None:
        from prefetchpipe.device.cuda import is_available

        device = "cuda" if is_available() else "cpu"
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device must be None, 'cpu', 'cuda' or 'cuda:N', not {device!r}") from error
    if isinstance(device, torch.device):
        if device.type == "cpu":
            from prefetchpipe.device.cpu import cpu_device

            return cpu_device()
        if device.type == "cuda":
            from prefetchpipe.device.cuda import cuda_device

            return cuda_device(device.index)
        raise ValueError(f"device must be None, 'cpu', 'cuda' or 'cuda:N', not {str(device)!r}")
    if isinstance(device, Device):
        return device
    raise TypeError(
        "device must be None, a string such as 'cuda:0', a torch.device or a simulated device, "
        f"not {device!r} (a {type(device).__name__})"
    )
