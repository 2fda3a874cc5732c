"""Steps of optimizers without the frame that torch puts around each of them, while nobody looks into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
except ImportError:  # private names of torch's
    _everybody: tuple[Any, ...] | None = None
else:
    _everybody = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)

__all__ = ["is_watched", "plain_step", "step"]


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook or a profiler wants to know of a step of ``optimizer``."""
    if _everybody is None or _everybody[0] or _everybody[1]:
        return True
    own = vars(optimizer)
    return bool(
        own.get("_optimizer_step_pre_hooks", True)
        or own.get("_optimizer_step_post_hooks", True)
        or torch._C._autograd._profiler_enabled()  # noqa: SLF001
    )


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """The step of its class as it is called inside torch's frame; None where somebody may be looking."""
    framed = type(optimizer).step
    if not getattr(framed, "hooked", False) or "step" in vars(optimizer) or is_watched(optimizer):
        return None
    return getattr(framed, "__wrapped__", None)


def step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``."""
    plain = plain_step(optimizer)
    if plain is None:
        optimizer.step()
    else:
        plain(optimizer)
