"""A producer whose steps are ranges for profilers; see :mod:`prefetchpipe.ranges`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import record_function

from prefetchpipe.device.base import Device, Stream
from prefetchpipe.pipeline.producer import Producer
from prefetchpipe.pipeline.shared import Shared
from prefetchpipe.pipeline.ticket import Ticket

__all__ = ["RangedProducer"]


class RangedProducer(Producer):
    """As :class:`Producer`, with a range around fetching, sending, and the consumer's wait."""

    def __init__(self, shared: Shared, source: Any) -> None:
        super().__init__(shared, source)
        self._next = _ranged_next(shared.device)  # a function: a method of ours would be a cycle

    def _send(self, batch: Any, stream: Stream) -> Ticket:
        with _Range(self._device, "prefetchpipe: pack and launch"):
            return super()._send(batch, stream)

    def take(self, stream: Stream) -> Ticket:
        """As the producer's."""
        with _Range(self._device, "prefetchpipe: next"):
            return super().take(stream)


def _ranged_next(device: Device) -> Callable[[Any], Any]:
    def fetch(source: Any) -> Any:
        with _Range(device, "prefetchpipe: loader"):
            return next(source)

    return fetch


class _Range:
    """A class, since a generator's context manager would touch the exceptions that pass through."""

    __slots__ = ("_device_range", "_torch_range")

    def __init__(self, device: Device, name: str) -> None:
        self._device_range = device.annotate(name)
        self._torch_range = record_function(name)

    def __enter__(self) -> None:
        self._device_range.__enter__()
        self._torch_range.__enter__()

    def __exit__(self, *error: Any) -> None:  # noqa: PYI036 - handed on as they are
        self._torch_range.__exit__(*error)
        self._device_range.__exit__(*error)
