"""prefetchpipe, and variants of it by their options."""

from __future__ import annotations

import ast
from typing import Any

from benchmarks.contenders.base import Contender, Prepared
from benchmarks.environment import Env
from benchmarks.schema import OURS
from benchmarks.sources import Source

__all__ = ["CONTENDERS", "Ours"]


class Ours(Contender):
    """``GPUPrefetcher(loader)`` with nothing else, or with the options of a variant."""

    name = OURS
    rank = 90
    needs = "prefetchpipe"
    cpu = True
    depths: tuple[int, ...] = (2, 1, 4)

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        if self._options:
            self.name = f"{OURS}({', '.join(f'{key}={value}' for key, value in self._options.items())})"
            self.rank = 91
            self.variant = True
            if "depth" in self._options:
                self.depths = ()

    @classmethod
    def variant_of(cls, text: str) -> Ours:
        """From ``"depth=4,fetch=caller"``; values are Python literals, or strings.

        Raises:
            ValueError: A part has no ``=``.
        """
        options = {}
        for part in text.split(","):
            key, sign, value = part.partition("=")
            if not sign:
                raise ValueError(f"a variant is option=value[,option=value...], got {text!r}")
            try:
                options[key.strip()] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                options[key.strip()] = value
        return cls(options)

    def missing(self, env: Env) -> str | None:
        """See :class:`Contender`."""
        reason = super().missing(env)
        if reason is None:
            try:
                from prefetchpipe import GPUPrefetcher  # noqa: F401
            except ImportError as error:
                return f"prefetchpipe cannot be used: {error}"
        return reason

    def prepare(self, source: Source, env: Env, *, depth: int | None = None, transform: Any = None) -> Prepared:
        """See :class:`Contender`."""
        from prefetchpipe import GPUPrefetcher

        options = dict(self._options)
        if depth is not None:
            options["depth"] = depth
        if transform is not None:
            options["transform"] = transform
        prefetcher = GPUPrefetcher(source.loader(pin=False), env.device, **options)
        return Prepared(prefetcher, close=prefetcher.close, stats=prefetcher.stats)


CONTENDERS = (Ours(),)
