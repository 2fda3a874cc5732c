"""SPDL: ``transfer_tensor`` (``transfer_tensor_h2d`` from 0.8 on) in a pipeline stage with a thread of its own.

It pins by itself, so it gets batches that are not pinned. Its documentation gives the stage a ``ThreadPoolExecutor``
with one thread, so that there is one copy stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.contenders.base import Contender, Prepared
from benchmarks.environment import Env
from benchmarks.sources import Source

__all__ = ["CONTENDERS"]


class _Passes:
    """A pipeline is good for one pass, so every pass builds one; the thread stays."""

    def __init__(self, source: Any, depth: int) -> None:
        self._source, self._depth = source, depth
        self._executor = ThreadPoolExecutor(max_workers=1)

    def __iter__(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        builder = PipelineBuilder().add_source(self._source).pipe(_transfer(), executor=self._executor)
        pipeline = builder.add_sink(self._depth).build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline

    def close(self) -> None:
        self._executor.shutdown()


class Spdl(Contender):
    """Two batches in the sink."""

    name = "spdl"
    rank = 21
    needs = "spdl.io"
    depths = (2, 1, 4)

    def missing(self, env: Env) -> str | None:
        """See :class:`Contender`."""
        reason = super().missing(env)
        if reason is None:
            try:
                import spdl.pipeline  # noqa: F401

                _transfer()
            except Exception as error:  # a broken installation is a reason, not an end
                return f"spdl cannot be used: {type(error).__name__}: {error}"
        return reason

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        passes = _Passes(source.loader(pin=False), depth or 2)
        return Prepared(passes, close=passes.close)


def _transfer() -> Any:
    import spdl.io

    return getattr(spdl.io, "transfer_tensor_h2d", None) or spdl.io.transfer_tensor


CONTENDERS = (Spdl(),)
