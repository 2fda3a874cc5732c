"""Tables that live in host memory: rows come to the device by index, are trained there, and go back."""

from __future__ import annotations

from prefetchpipe.tables.embedding import HostEmbedding
from prefetchpipe.tables.lookahead import Lookahead
from prefetchpipe.tables.optimizer import RowOptimizer
from prefetchpipe.tables.table import HostTable

__all__ = ["HostEmbedding", "HostTable", "Lookahead", "RowOptimizer"]
