"""What users need to test their own pipelines on a machine without a GPU."""

from __future__ import annotations

from prefetchpipe.testing.simulated import SimulatedDevice, SimulatedStream

__all__ = ["SimulatedDevice", "SimulatedStream"]
