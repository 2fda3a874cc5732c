"""What a batch is: containers taken apart into leaves, leaves laid out in one slab, and the way back."""

from __future__ import annotations

from prefetchpipe.batch.containers import LEAF, Spec
from prefetchpipe.batch.move import array_to_tensor, move
from prefetchpipe.batch.search import find_tensors
from prefetchpipe.batch.tree import WalkCache, flatten, register_batch_type, unflatten

__all__ = [
    "LEAF",
    "Spec",
    "WalkCache",
    "array_to_tensor",
    "find_tensors",
    "flatten",
    "move",
    "register_batch_type",
    "unflatten",
]
