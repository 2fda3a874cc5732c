"""The plain loop's own way for tiny batches, ``leaf.to(device)``, tried and kept where it is quicker (contract 16).

What a batch of some kilobytes costs is Python and calls of the driver, not bytes. For a few windows of batches the two
ways take turns; then the quicker one stays. It is the time of whole steps that counts, with the loop's own work: a
copy that blocks may cost the loop more than it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from prefetchpipe.counters import Counters
from prefetchpipe.device.base import Device

if TYPE_CHECKING:
    from prefetchpipe.pipeline.shared import Shared

__all__ = ["NOT_PLAIN", "PlainWay", "copied_plainly"]

NOT_PLAIN: Any = object()
"""In the place of a batch: it has to go the usual way."""

_SETTLED_BATCHES = 6
_WINDOW = 16
_WINDOWS = 4
"""The usual way and the plain one, twice."""
_CLEARLY = 0.97
"""Times the usual way's: what the plain way must stay below to be chosen."""
_SLOWER = 1.5
"""Times the usual way's, when both were tried: the plain way is left if its steps come to take so long, and stay so."""
_LOOK_EVERY = 64
_SLOW_LOOKS = 2
_PASSES = 8
"""Passes too short for a window of the trial: nothing is held up for it any longer."""

_MOST_LEAVES = 8
_MOST_BYTES = 4 << 20
_AS_THEY_ARE = frozenset((int, float, str, bool, type(None)))


class PlainWay:
    """Chooses, for all passes of one prefetcher.

    Args:
        counters: Where the path is noted.

    Attributes:
        is_on: The next batch goes the plain way.
        is_over: This pass goes the usual way from here on.
    """

    __slots__ = (
        "_batches",
        "_counters",
        "_is_trying",
        "_passes",
        "_pays",
        "_reason",
        "_since",
        "_slow",
        "_usual",
        "_window",
        "_windows",
        "is_on",
        "is_over",
    )

    def __init__(self, counters: Counters) -> None:
        self._counters = counters  # not what the passes share: that holds this object (contract 9)
        self._pays: bool | None = None
        self._reason = ""
        self._usual = float("inf")
        self._windows: list[float] = []
        self._passes = 0
        self.pass_begins()

    @classmethod
    def for_pass(cls, shared: Shared, *, suits: bool) -> PlainWay | None:
        """None where it cannot be: whatever wants more of a batch than its bytes."""
        options = shared.options
        if not (suits and options.fetch == "auto" and shared.device.copies_plainly):
            return None
        if options.transform is not None or options.checked or options.static or shared.has_state:
            return None
        if shared.has_generators:
            return None
        if shared.plain is None:
            shared.plain = cls(shared.counters)
        else:
            shared.plain.pass_begins()
        return None if shared.plain.is_over else shared.plain

    def pass_begins(self) -> None:
        """Windows do not reach from one pass into the next; those that are whole count."""
        self._batches = self._window = self._slow = 0
        self._since = 0.0
        self.is_on = self._is_trying = False
        self._passes += 1
        self.is_over = self._pays is False or (not self._windows and self._passes > _PASSES)

    def after(self, now: float, nbytes: int) -> None:
        """A batch was handed out.

        Args:
            now: In seconds.
            nbytes: Of the newest batch that went the usual way.
        """
        self._batches += 1
        if self._is_trying:
            self._window += 1
            if self._window == _WINDOW:
                self._next_window(now)
        elif self.is_on:
            if self._batches % _LOOK_EVERY == 0:
                self._look(now)
        elif nbytes > _MOST_BYTES:
            self.is_over = True
        elif self._batches >= _SETTLED_BATCHES:
            self._since = now
            if self._pays:
                self._keep()
            else:
                self._is_trying = True
                self.is_on = len(self._windows) % 2 == 1

    def give_up(self, why: str) -> None:
        """The usual way from here on."""
        if self.is_on:
            self._counters.path, self._counters.path_reason = "caller", f"the plain loop's way was left: {why}"
        self.is_on = self._is_trying = False
        self.is_over = True

    def is_of_another_kind(self) -> None:
        """A batch that cannot go this way: neither will those of later passes."""
        self._pays = False
        self.give_up("batches are not all of its kind")

    def choose(self, reason: str) -> None:
        """It pays."""
        self._pays, self._reason = True, reason

    def _next_window(self, now: float) -> None:
        self._windows.append((now - self._since) / _WINDOW)
        self._since, self._window = now, 0
        self.is_on = not self.is_on
        if len(self._windows) < _WINDOWS:
            return
        usual, plain = min(self._windows[0::2]), min(self._windows[1::2])
        self._is_trying = False
        if plain >= _CLEARLY * usual:
            self._pays = False
            self.is_on, self.is_over = False, True
            return
        self._usual = usual
        self.choose(
            f"each leaf by its own .to(), as the plain loop does: {plain * 1e6:.0f} us a step, through pinned memory "
            f"{usual * 1e6:.0f} us"
        )
        self._keep()

    def _keep(self) -> None:
        self.is_on = True
        self._batches = 0
        self._counters.path, self._counters.path_reason = "plain", self._reason

    def _look(self, now: float) -> None:
        """Steps that are longer for long; one pause of the loop's says nothing."""
        seconds = (now - self._since) / _LOOK_EVERY
        self._since = now
        self._slow = self._slow + 1 if seconds > _SLOWER * self._usual else 0
        if self._slow == _SLOW_LOOKS:
            self._pays = None
            self._windows.clear()
            self.give_up(f"steps have come to take {seconds * 1e6:.0f} us")


def copied_plainly(batch: Any, device: Device) -> tuple[Any, int]:
    """The batch on ``device`` and its bytes; ``NOT_PLAIN`` where it is no flat tuple, list or dict of plain tensors.

    By blocking copies, so that the loader's memory is its own again (contract 5), pinned or not.
    """
    kind = type(batch)
    if kind is torch.Tensor:
        leaves: Any = (batch,)
    elif kind is tuple or kind is list:
        leaves = batch
    elif kind is dict:
        leaves = batch.values()
    else:
        return NOT_PLAIN, 0
    nbytes = _plain_bytes(leaves)
    if not 0 <= nbytes <= _MOST_BYTES:
        return NOT_PLAIN, 0
    copy = device.plain_copy
    out = [copy(leaf) if type(leaf) is torch.Tensor else leaf for leaf in leaves]
    if kind is list:
        return out, nbytes
    if kind is tuple:
        return tuple(out), nbytes
    return (dict(zip(batch, out, strict=True)) if kind is dict else out[0]), nbytes


def _plain_bytes(leaves: Any) -> int:
    """Of all leaves; -1 where one is not plain, or there are many."""
    if len(leaves) > _MOST_LEAVES:
        return -1
    nbytes: int = 0
    memory = set()
    count = 0
    for leaf in leaves:
        if type(leaf) is torch.Tensor:
            if not leaf.is_cpu or leaf.requires_grad or leaf.layout is not torch.strided:
                return -1
            nbytes += leaf.nbytes
            count += 1
            memory.add(leaf.untyped_storage().data_ptr())
        elif type(leaf) not in _AS_THEY_ARE:
            return -1
    return nbytes if len(memory) == count else -1  # contract 12: leaves that share memory go on sharing it
