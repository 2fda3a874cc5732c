"""From which size on one way is faster than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Crossover", "find_crossover"]


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where ``faster`` overtakes ``than``.

    Attributes:
        kind: ``at`` a size inside the range; ``from the start``: at every size measured; ``not reached``: it is not
            faster at the largest size; ``not measured``: one of the two has no times.
        size: Of ``at``, interpolated; else None.
    """

    faster: str
    than: str
    kind: Literal["at", "from the start", "not reached", "not measured"]
    size: float | None = None


def find_crossover(
    faster: str, than: str, sizes: Sequence[int], faster_seconds: Sequence[float], than_seconds: Sequence[float]
) -> Crossover:
    """The size from which on ``faster`` stays faster, up to the largest size measured.

    Between two sizes the logarithm of the ratio is taken to be linear in the logarithm of the size. If the two change
    places several times, the last time counts.

    Args:
        faster: Name of the one that is expected to win when sizes grow.
        than: Name of the other.
        sizes: Ascending.
        faster_seconds: Time at each size; empty: not measured.
        than_seconds: Likewise.

    Example:
        >>> find_crossover("gpu", "cpu", [10, 1000], [1.0, 1.0], [0.1, 10.0]).size
        100.0
    """
    if not faster_seconds or not than_seconds:
        return Crossover(faster, than, "not measured")
    ratios = [math.log(mine / other) for mine, other in zip(faster_seconds, than_seconds, strict=True)]
    if ratios[-1] >= 0:
        return Crossover(faster, than, "not reached")
    slower = [index for index, ratio in enumerate(ratios) if ratio >= 0]
    if not slower:
        return Crossover(faster, than, "from the start")
    last = slower[-1]
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    size = math.exp(math.log(sizes[last]) + share * math.log(sizes[last + 1] / sizes[last]))
    return Crossover(faster, than, "at", float(f"{size:.4g}"))
