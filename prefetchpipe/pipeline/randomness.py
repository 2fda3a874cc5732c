"""Whether the loader draws from this process's global generators (contract 10)."""

from __future__ import annotations

import random

import numpy as np
import torch

from prefetchpipe.device.base import Device

__all__ = ["global_random_state"]


def global_random_state(device: Device) -> tuple[object, ...]:
    """A fingerprint of the global generators: two calls compare equal if nobody drew in between.

    Copies whole states, so it is taken for the first batches of a pass only.
    """
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - it is the global generator that matters
    key = numpy_state["state"]
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        random.getstate(),
        tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in key.values()),
        numpy_state["has_gauss"],
        *(generator.get_state().numpy().tobytes() for generator in device.generators()),
    )
