"""What is known of torch's optimizers: which state a row has, where it starts, and how its step count is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["NOT_ROW_WISE", "READ", "Rule", "rule_for"]

NOT_ROW_WISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Classes of torch whose update of a row depends on other rows, or that want sparse gradients."""

READ = ("amsgrad", "centered", "dampening", "initial_accumulator_value", "lr_decay", "momentum")
"""Hyperparameters that a rule depends on."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One optimizer class under given hyperparameters.

    Attributes:
        states: State tensors of the shape of the parameter, and the value that they start with.
        scalars: State numbers of a parameter, each of which becomes one number a row, and where they start.
        counts_matter: Whether the update depends on a scalar. If not, all rows can be updated at once.
        scalar_step: ``step`` need not be that of each row where it does not matter: nothing starts with it, or it is
            read as a Python number.
        capturable: The class can take its scalars as tensors, with one entry per row.
        from_lr: States and scalars that start with the learning rate of the row's first step: a schedule may have
            changed it by then.
    """

    states: Mapping[str, float]
    scalars: Mapping[str, float] = field(default_factory=dict)
    counts_matter: bool = True
    scalar_step: bool = False
    capturable: bool = True
    from_lr: tuple[str, ...] = ()


def rule_for(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Rule | None:
    """The rule of exactly this class; None: find out at the first step, and treat fresh rows apart.

    Args:
        kind: The optimizer class; a subclass of the user's is not taken for its base.
        options: Its hyperparameters, defaults included.
    """
    make = _RULES.get(kind)
    return None if make is None else make(options)


def _sgd(options: Mapping[str, Any]) -> Rule | None:
    if options["dampening"]:
        return None  # the first step of a row takes the gradient undamped
    if not options["momentum"]:
        return Rule({}, counts_matter=False, capturable=False)
    return Rule({"momentum_buffer": 0.0}, counts_matter=False, capturable=False)


def _adagrad(options: Mapping[str, Any]) -> Rule:
    return Rule(
        {"sum": float(options["initial_accumulator_value"])},
        {"step": 0.0},
        counts_matter=options["lr_decay"] != 0,
        scalar_step=True,
        capturable=False,
    )


def _adadelta(options: Mapping[str, Any]) -> Rule:  # noqa: ARG001 - one signature
    return Rule({"square_avg": 0.0, "acc_delta": 0.0}, {"step": 0.0}, counts_matter=False, scalar_step=True)


def _rmsprop(options: Mapping[str, Any]) -> Rule:
    states = {"square_avg": 0.0}
    if options["momentum"] > 0:
        states["momentum_buffer"] = 0.0
    if options["centered"]:
        states["grad_avg"] = 0.0
    return Rule(states, {"step": 0.0}, counts_matter=False, scalar_step=True)


def _rprop(options: Mapping[str, Any]) -> Rule:  # noqa: ARG001 - one signature
    states = {"prev": 0.0, "step_size": 0.0}
    return Rule(states, {"step": 0.0}, counts_matter=False, from_lr=("step_size",))


def _adam(options: Mapping[str, Any]) -> Rule:
    states = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    if options["amsgrad"]:
        states["max_exp_avg_sq"] = 0.0
    return Rule(states, {"step": 0.0})


def _adamax(options: Mapping[str, Any]) -> Rule:  # noqa: ARG001 - one signature
    return Rule({"exp_avg": 0.0, "exp_inf": 0.0}, {"step": 0.0})


def _asgd(options: Mapping[str, Any]) -> Rule:  # noqa: ARG001 - one signature
    return Rule({"ax": 0.0}, {"step": 0.0, "eta": 0.0, "mu": 1.0}, from_lr=("eta",))


_RULES: dict[type[torch.optim.Optimizer], Any] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adadelta: _adadelta,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Rprop: _rprop,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.Adamax: _adamax,
    torch.optim.ASGD: _asgd,
}
