"""The plain loop's own way for tiny batches, ``leaf.to(device)``, tried and kept where it is quicker (contract 16).

What a batch of some kilobytes costs is Python and calls of the driver, not bytes. For a few windows of batches the two
ways take turns; then the quicker one stays. It is the time of whole steps that counts, with the loop's own work: a
copy that blocks may cost the loop more than it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

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
"""Times the usual way's, when both were tried: the plain way is left if its steps come to take so long."""
_LOOK_EVERY = 64

_MOST_LEAVES = 8
_MOST_BYTES = 4 << 20
_AS_THEY_ARE = frozenset((int, float, str, bool, type(None)))


class PlainWay:
    """Chooses, for one pass.

    Args:
        shared: Keeps the choice for later passes.

    Attributes:
        is_on: The next batch goes the plain way.
        is_trying: The two take turns; nobody else is to change how batches come meanwhile.
        is_over: The pass goes the usual way from here on.
    """

    __slots__ = ("_batches", "_shared", "_since", "_usual", "_window", "_windows", "is_on", "is_over", "is_trying")

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.is_on = False
        self.is_trying = False
        self.is_over = shared.plain_pays is False
        self._batches = 0
        self._window = 0
        self._since = 0.0
        self._windows: list[float] = []
        self._usual = shared.usual_step_seconds

    @classmethod
    def for_pass(cls, shared: Shared, *, suits: bool) -> PlainWay | None:
        """None where it cannot be: whatever wants more of a batch than its bytes."""
        options = shared.options
        if not (suits and options.fetch == "auto" and shared.device.copies_plainly) or shared.plain_pays is False:
            return None
        if options.transform is not None or options.checked or options.static or shared.has_state:
            return None
        return None if shared.has_generators else cls(shared)

    def after(self, now: float, nbytes: int) -> None:
        """A batch was handed out.

        Args:
            now: In seconds.
            nbytes: Of the newest batch that went the usual way.
        """
        self._batches += 1
        if self.is_trying:
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
            if self._shared.plain_pays:
                self._keep()
            else:
                self.is_trying = True

    def give_up(self) -> None:
        """Batches are not of the kind, or things have changed: the usual way from here on, in later passes too."""
        self.is_on = self.is_trying = False
        self.is_over = True
        self._shared.plain_pays = False

    def _next_window(self, now: float) -> None:
        self._windows.append((now - self._since) / _WINDOW)
        self._since, self._window = now, 0
        self.is_on = not self.is_on
        if len(self._windows) < _WINDOWS:
            return
        self.is_trying = False
        usual, plain = min(self._windows[0::2]), min(self._windows[1::2])
        if plain >= _CLEARLY * usual:
            self.give_up()
            return
        self._shared.plain_pays = True
        self._shared.usual_step_seconds = self._usual = usual
        self._shared.plain_reason = (
            f"each leaf by its own .to(), as the plain loop does: {plain * 1e6:.0f} us a step, through pinned memory "
            f"{usual * 1e6:.0f} us"
        )
        self._keep()

    def _keep(self) -> None:
        self.is_on = True
        self._batches = 0
        self._shared.note_path("plain", self._shared.plain_reason)

    def _look(self, now: float) -> None:
        seconds = (now - self._since) / _LOOK_EVERY
        self._since = now
        if seconds > _SLOWER * self._usual:
            self.give_up()


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
    for leaf in leaves:
        if type(leaf) is torch.Tensor:
            if not leaf.is_cpu or leaf.requires_grad or leaf.layout is not torch.strided:
                return -1
            nbytes += leaf.nbytes
        elif type(leaf) not in _AS_THEY_ARE:
            return -1
    return nbytes
