"""What travels from the producer to the consumer: a batch, an error, or the end, in one order (contracts 1 and 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prefetchpipe.device.base import Event, Stream

__all__ = ["Ticket", "end_ticket", "failed_ticket"]


class Ticket:
    """A batch on its way: what the consumer needs to take it over."""

    __slots__ = (
        "batch",
        "check",
        "drawn",
        "error",
        "final",
        "from_source",
        "nbytes",
        "ready",
        "sent_at",
        "state",
        "used_on",
        "uses",
    )

    def __init__(self) -> None:
        self.batch: Any = None
        self.ready: Event = None
        """Passed when the copies and the transform have; None if the device has nothing to wait for."""
        self.uses: Sequence[torch.Tensor] = ()
        """Tensors whose memory the consumer's stream is about to use, one per allocation."""
        self.used_on: Stream = None
        """The stream for which their use is on record already."""
        self.check: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.state: Any = None
        """The loader's state after this batch, where it has one (contract 11)."""
        self.error: BaseException | None = None
        self.final = False
        self.from_source = False
        """Whether the loader stands behind it; other tickets only wake somebody."""
        self.nbytes = 0
        """Bytes copied to the device for it."""
        self.sent_at = 0.0
        """When its copies were launched, in seconds of the counters' clock."""
        self.drawn: Any = None
        """The states of the loader's own random generators after this batch (contract 10)."""


def end_ticket() -> Ticket:
    """The end of the loader."""
    ticket = Ticket()
    ticket.final = True
    return ticket


def failed_ticket(error: BaseException) -> Ticket:
    """An error on its way to the consumer; our own frame tells the user nothing."""
    ticket = end_ticket()
    traceback = error.__traceback__
    if isinstance(error, StopIteration):  # not the loader's end: that one never gets here
        reason = RuntimeError(f"StopIteration was raised outside of the loader: {error!r}")
        reason.__cause__ = error
        error, traceback = reason, None
    if traceback is not None and traceback.tb_next is not None:
        error = error.with_traceback(traceback.tb_next)
    ticket.error = error
    return ticket
