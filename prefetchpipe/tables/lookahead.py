"""Batches with the rows of the next ones on their way."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.options import whole
from prefetchpipe.prefetcher import GPUPrefetcher
from prefetchpipe.tables.embedding import HostEmbedding, Prepared

__all__ = ["Lookahead"]

_END = object()
_Wanted = tuple[HostEmbedding, Prepared]
_Waiting = tuple[Any, list[_Wanted]]


class Lookahead:
    """Iterates over batches; while one is in use, the rows that the next ones need come to the device.

    The result is that of a loop without it, bit for bit: a row that is on its way and is updated meanwhile arrives with
    its new value. The batches are pulled in the calling thread, ``depth`` ahead of the one handed out.

    Args:
        batches: A :class:`prefetchpipe.GPUPrefetcher` (without ``static``), or any iterable of batches that are not
            written to again.
        ids: For each embedding a callable that gives, out of a batch, the very object that its ``forward`` will be
            called with; a tuple of them where it is called several times.
        depth: Batches ahead, at least 1.

    Raises:
        TypeError: ``depth`` is not a whole number, or an entry of ``ids`` is not callable.
        ValueError: ``depth`` is less than 1, or ``batches`` is a prefetcher with ``static=True``.

    Example:
        >>> import torch
        >>> words, contexts = (HostEmbedding(100, 8, device="cpu") for _ in range(2))
        >>> pairs = [(torch.tensor([1, 2]), torch.tensor([3, 4]))]
        >>> for word, context in Lookahead(pairs, {words: lambda b: b[0], contexts: lambda b: b[1]}):
        ...     score = (words(word) * contexts(context)).sum()
    """

    def __init__(
        self, batches: Iterable[Any], ids: Mapping[HostEmbedding, Callable[[Any], Any]], *, depth: int = 1
    ) -> None:
        whole("depth", depth, minimum=1)
        for embedding, choose in ids.items():
            if not isinstance(embedding, HostEmbedding) or not callable(choose):  # type: ignore[redundant-expr]
                raise TypeError(f"ids must map a HostEmbedding to a callable, not {embedding!r} to {choose!r}")
        if isinstance(batches, GPUPrefetcher) and batches._static is not None:  # noqa: SLF001 - the same package
            raise ValueError(
                "batches is a GPUPrefetcher with static=True: the next batch is written over the one handed out, and "
                "rows ahead need both; use static=False"
            )
        self._batches = batches
        self._ids = dict(ids)
        self._depth = depth
        self._warned = False

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        waiting: deque[_Waiting] = deque()
        source = iter(self._batches)
        error: BaseException | None = None
        going = True
        used: list[_Wanted] = []
        try:
            while True:
                while going and len(waiting) <= self._depth:
                    going, error = self._pull(source, waiting)
                self._finish(used)
                if not waiting:
                    break
                batch, used = waiting.popleft()
                yield batch
                del batch
            if error is not None:
                raise error
        finally:
            for wanted in (used, *(wanted for _, wanted in waiting)):
                _forget(wanted)
            del error

    def _pull(self, source: Iterator[Any], waiting: deque[_Waiting]) -> tuple[bool, BaseException | None]:
        """One more batch; else False, and the error that comes after the batches before it (contract 7)."""
        try:
            batch = next(source, _END)
            if batch is _END:
                return False, None
            waiting.append((batch, self._prepare(batch)))
        except Exception as error:  # noqa: BLE001 - raised again at its place
            return False, error
        return True, None

    def _prepare(self, batch: Any) -> list[_Wanted]:
        wanted: list[_Wanted] = []
        try:
            for embedding, choose in self._ids.items():
                chosen = choose(batch)
                for ids in chosen if isinstance(chosen, tuple) else (chosen,):
                    wanted.append((embedding, embedding.prepare(ids, depth=self._depth)))  # noqa: PERF401 - in case one fails
        except BaseException:
            _forget(wanted)  # this batch is never handed out, so nobody else would
            raise
        return wanted

    def _finish(self, used: list[_Wanted]) -> None:
        """Rows that no forward asked for are given up, with one word about it."""
        left = [embedding for embedding, prepared in used if embedding.forget(prepared)]
        used.clear()
        if left and not self._warned:
            self._warned = True
            warnings.warn(
                "rows were gathered ahead that no forward asked for: call the embedding with the very object that "
                "`ids` gives out of the batch, not with a copy",
                PrefetchWarning,
                stacklevel=3,
            )


def _forget(wanted: list[_Wanted]) -> None:
    for embedding, prepared in wanted:
        embedding.forget(prepared)
