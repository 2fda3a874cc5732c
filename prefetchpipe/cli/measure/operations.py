"""The operations of ``breakeven``: each is one function that NumPy arrays and torch tensors both serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["DTYPES", "NUMPY_DTYPES", "OPERATIONS", "Operation"]

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
NUMPY_DTYPES = ("float32", "float64", "float16")
"""Those that NumPy has."""

_FEATURES, _HIDDEN, _CLASSES = 256, 512, 16
_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Operation:
    """What is timed.

    Attributes:
        title: What it computes, by the size ``n``.
        weights: Shapes that stay where the operation runs.
        inputs: Shapes that travel with every call, by size.
        run: Called with weights and inputs; gives what travels back.
    """

    name: str
    title: str
    weights: tuple[tuple[int, ...], ...]
    inputs: Callable[[int], tuple[tuple[int, ...], ...]]
    run: Callable[..., Any]


def _mlp_step(w1: Any, w2: Any, x: Any, y: Any) -> Any:
    """Forward, backward and SGD update of two layers with ReLU and squared error, written out."""
    hidden = (x @ w1).clip(0)
    error = (hidden @ w2 - y) / len(x)
    grad_hidden = (error @ w2.T) * (hidden > 0)
    w2 -= _RATE * (hidden.T @ error)
    w1 -= _RATE * (x.T @ grad_hidden)
    return (error * error).sum()


_ALL = (
    Operation(
        "multiply",
        "a * b, n x n each",
        (),
        lambda n: ((n, n), (n, n)),
        lambda a, b: a * b,
    ),
    Operation(
        "matmul",
        "a @ b, n x n each",
        (),
        lambda n: ((n, n), (n, n)),
        lambda a, b: a @ b,
    ),
    Operation(
        "reduce",
        "sum of n x n",
        (),
        lambda n: ((n, n),),
        lambda a: a.sum(),
    ),
    Operation(
        "mlp",
        f"training step of an MLP {_FEATURES}-{_HIDDEN}-{_CLASSES}, n rows",
        ((_FEATURES, _HIDDEN), (_HIDDEN, _CLASSES)),
        lambda n: ((n, _FEATURES), (n, _CLASSES)),
        _mlp_step,
    ),
)
OPERATIONS = {operation.name: operation for operation in _ALL}
