"""Running torch's own optimizer over the active rows: all at once, or once for each distinct step count."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.optim.adam import Adam, adam

from prefetchpipe.tables.index import PAD, Index
from prefetchpipe.tables.watched import plain_step, step

__all__ = ["AtOnce", "ByCount", "Columns", "Shared", "Update", "at_once", "run"]

Rows = dict[str, torch.Tensor]


class Update(Protocol):
    """One way to step."""

    columns_on_device: bool
    """Scalars come as columns, [ids, 1] on the device, beside the state rows, and are changed in place."""

    def __call__(
        self, inner: torch.optim.Optimizer, index: Index, rows: torch.Tensor, grad: torch.Tensor, states: Rows
    ) -> Rows:
        """Change ``rows`` and ``states`` in place; states that the optimizer made are returned."""


class Columns(Protocol):
    """The scalars of all rows, in host memory."""

    def read(self, ids: torch.Tensor) -> Rows:
        """[ids] each."""

    def write(self, ids: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """[ids] each; a name that is new gets a column."""


_ADAM_OPTIONS = (
    *("foreach", "capturable", "differentiable", "fused", "amsgrad", "lr", "weight_decay", "eps", "maximize"),
    "decoupled_weight_decay",
)
_ADAM_GIVEN = (
    *("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
    *("beta1", "beta2", "has_complex", "grad_scale", "found_inf"),
)
_ADAM_IS_KNOWN = {*_ADAM_GIVEN, *_ADAM_OPTIONS} == set(inspect.signature(adam).parameters)
"""Another version of torch may want something else."""
_ADAM_STEP = getattr(Adam.step, "__wrapped__", None) if hasattr(Adam.step, "hooked") else Adam.step


def run(inner: torch.optim.Optimizer, params: list[torch.Tensor], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One ``inner.step()`` over leaves with gradients, with these states; the states afterwards."""
    group = inner.param_groups[0]
    before = group["params"]
    try:
        group["params"] = params
        inner.state.clear()
        for param, state in zip(params, states, strict=True):
            if state:
                inner.state[param] = state
        step(inner)
        return [dict(inner.state[param]) for param in params]
    finally:
        group["params"] = before
        inner.state.clear()


def _leaf(rows: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    leaf = rows.detach().requires_grad_()
    leaf.grad = grad
    return leaf


def _begin(inner: torch.optim.Optimizer, states: Rows, steps: torch.Tensor, names: tuple[str, ...]) -> None:
    """Where ``steps`` is 0, what is named starts with the learning rate of now, as in a new parameter."""
    rate = inner.param_groups[0]["lr"]
    for name in names:
        state = states[name]
        if isinstance(rate, torch.Tensor):
            rate = rate.to(state.device, state.dtype)
        state.copy_(torch.where(steps == 0, rate, state))


class AtOnce:
    """All rows in one step of torch's: either no scalar matters, or the class takes scalars of one number a row.

    Args:
        scalar_step: ``step`` goes in as a number, which says nothing, and its column is counted apart.
        from_lr: See :class:`~prefetchpipe.tables.rules.Rule`.
    """

    columns_on_device = True

    def __init__(self, *, scalar_step: bool, from_lr: tuple[str, ...] = ()) -> None:
        self._scalar_step = scalar_step
        self._no_step = torch.zeros((), dtype=torch.float32, device="cpu")
        self._from_lr = from_lr

    def __call__(
        self, inner: torch.optim.Optimizer, index: Index, rows: torch.Tensor, grad: torch.Tensor, states: Rows
    ) -> Rows:
        """See the protocol."""
        del index
        if self._from_lr:
            _begin(inner, states, states["step"], self._from_lr)
        given: dict[str, Any] = dict(states)
        if self._scalar_step:
            given["step"] = self._no_step.zero_()
            if "step" in states:  # otherwise the kernel that writes the rows back counts
                states["step"] += 1
        (after,) = run(inner, [_leaf(rows, grad)], [given])
        for name, state in states.items():
            if after[name] is not state and not (self._scalar_step and name == "step"):
                state.copy_(after[name])
        return {}


def at_once(inner: torch.optim.Optimizer, from_lr: tuple[str, ...]) -> AtOnce:
    """For a class that takes one count a row."""
    if isinstance(inner, Adam) and not from_lr:
        return _AdamAtOnce()
    return AtOnce(scalar_step=False, from_lr=from_lr)


class _AdamAtOnce(AtOnce):
    """:class:`AtOnce` for Adam and AdamW: what their ``step`` calls, with what it gives, while nobody looks into it.

    The class would read the parameter and its state out of dictionaries that are made for this one step.
    """

    def __init__(self) -> None:
        super().__init__(scalar_step=False)

    def __call__(
        self, inner: torch.optim.Optimizer, index: Index, rows: torch.Tensor, grad: torch.Tensor, states: Rows
    ) -> Rows:
        """See the protocol."""
        group = inner.param_groups[0]
        if not _ADAM_IS_KNOWN or plain_step(inner) is not _ADAM_STEP:
            return super().__call__(inner, index, rows, grad, states)
        beta1, beta2 = group["betas"]
        adam(
            [rows],
            [grad],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [states["max_exp_avg_sq"]] if group["amsgrad"] else [],
            [states["step"]],
            beta1=beta1,
            beta2=beta2,
            has_complex=False,
            grad_scale=None,
            found_inf=None,
            **{name: group[name] for name in _ADAM_OPTIONS},
        )
        return {}


class Shared:
    """All rows in one step, with one step count for the table: the steps of this optimizer, not of the row.

    Args:
        scalars: Where they are kept, one number each; changed in place.
        from_lr: See :class:`~prefetchpipe.tables.rules.Rule`.
    """

    columns_on_device = False

    def __init__(self, scalars: Rows, from_lr: tuple[str, ...] = ()) -> None:
        self.scalars = scalars
        self._from_lr = from_lr

    def __call__(
        self, inner: torch.optim.Optimizer, index: Index, rows: torch.Tensor, grad: torch.Tensor, states: Rows
    ) -> Rows:
        """See the protocol."""
        del index
        if self._from_lr:
            _begin(inner, self.scalars, self.scalars["step"], self._from_lr)
        # Clones: a step that raises half-way has counted nothing.
        scalars = {name: value.clone() for name, value in self.scalars.items()}
        (after,) = run(inner, [_leaf(rows, grad)], [{**states, **scalars}])
        for name, value in self.scalars.items():
            value.copy_(torch.as_tensor(after[name]))
        for name, state in states.items():
            if after[name] is not state:
                state.copy_(after[name])
        return {}


class ByCount:
    """One parameter for each distinct set of scalars among the rows, all in one ``step()`` of torch's.

    Exactly torch's arithmetic. There are at most as many parameters as distinct counts in the batch.

    Args:
        columns: The scalars of all rows.
        known: The state is known from the start. Otherwise a row without a count goes in without any state, as a new
            parameter does, and what the optimizer makes of it becomes the state.
        from_lr: See :class:`~prefetchpipe.tables.rules.Rule`.
    """

    columns_on_device = False

    def __init__(self, columns: Columns, *, known: bool, from_lr: tuple[str, ...] = ()) -> None:
        self._columns = columns
        self._known = known
        self._from_lr = from_lr

    def __call__(
        self, inner: torch.optim.Optimizer, index: Index, rows: torch.Tensor, grad: torch.Tensor, states: Rows
    ) -> Rows:
        """See the protocol."""
        ids = index.ids.cpu()
        real = (ids != PAD).nonzero().view(-1)
        ids = ids[real]
        scalars = self._columns.read(ids)
        if self._from_lr:
            _begin(inner, scalars, scalars["step"], self._from_lr)
        order, starts = _groups(scalars, len(ids))
        sorted_in = real[order].to(rows.device)
        picked, grads = rows.index_select(0, sorted_in), grad.index_select(0, sorted_in)
        picked_states = {name: state.index_select(0, sorted_in) for name, state in states.items()}
        leaves, given = [], []
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            leaves.append(_leaf(picked[start:stop], grads[start:stop]))
            first = order[start]
            state: dict[str, Any] = {}
            if self._known or scalars["seen"][first]:
                state = {name: piece[start:stop] for name, piece in picked_states.items()}
                state |= {name: column[first].clone() for name, column in scalars.items() if name != "seen"}
            given.append(state)
        after = run(inner, leaves, given)
        made: Rows = {}
        for name, piece in _row_states(after, leaves, list(states), inner).items():
            target = states.get(name)
            if target is None:
                target = made[name] = torch.zeros(rows.shape, dtype=piece.dtype, device=rows.device)
            target.index_copy_(0, sorted_in, piece)
        rows.index_copy_(0, sorted_in, picked)
        numbers = _numbers(after, [len(leaf) for leaf in leaves])
        if not self._known:
            numbers["seen"] = torch.ones(len(ids), dtype=torch.uint8, device="cpu")
        self._columns.write(ids[order], numbers)
        return made


def _row_states(
    after: list[dict[str, Any]], leaves: list[torch.Tensor], known: list[str], inner: torch.optim.Optimizer
) -> Rows:
    """The state rows of all groups, one behind the other, by name."""
    for state, leaf in zip(after, leaves, strict=True):
        for name, value in state.items():
            if _is_rows(value) and value.shape != leaf.shape:
                raise TypeError(
                    f"{type(inner).__name__} is not row-wise: its state {name!r} has shape {tuple(value.shape)} for "
                    f"a parameter of shape {tuple(leaf.shape)}"
                )
    names = dict.fromkeys([*known, *(name for state in after for name, value in state.items() if _is_rows(value))])
    return {
        name: torch.cat(
            [
                state[name] if _is_rows(state.get(name)) else torch.zeros_like(leaf)
                for state, leaf in zip(after, leaves, strict=True)
            ]
        ).detach()
        for name in names
    }


def _is_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _groups(scalars: Rows, count: int) -> tuple[torch.Tensor, list[int]]:
    """An order in which rows with equal scalars stand together, and where each group starts."""
    order = torch.arange(count, device="cpu")
    if not scalars or not count:
        return order, [0] if count else []
    keys = torch.stack([column.to(torch.float64) for column in scalars.values()], 1)
    _, group = (
        torch.unique(keys, dim=0, return_inverse=True)
        if keys.shape[1] > 1
        else torch.unique(keys.view(-1), return_inverse=True)
    )
    ordered, order = torch.sort(group, stable=True)
    return order, [0, *(1 + (ordered[1:] != ordered[:-1]).nonzero().view(-1)).tolist()]


def _numbers(after: list[dict[str, Any]], sizes: list[int]) -> Rows:
    """The scalars of all groups by name, one for each row."""
    repeat = torch.tensor(sizes, device="cpu")
    names = dict.fromkeys(
        name for state in after for name, value in state.items() if value is not None and not _is_rows(value)
    )
    return {
        name: torch.stack([torch.as_tensor(state[name], device="cpu") for state in after]).repeat_interleave(repeat)
        for name in names
    }
