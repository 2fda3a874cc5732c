"""``RowOptimizer``: any row-wise optimizer of torch for the rows of a table, with its state in tables too."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.tables.columns import TableColumns
from prefetchpipe.tables.embedding import ActiveRows, HostEmbedding
from prefetchpipe.tables.index import Index, read_index
from prefetchpipe.tables.known import KnownStates
from prefetchpipe.tables.lookup import sum_by_row
from prefetchpipe.tables.rules import NOT_ROW_WISE, READ, Rule, rule_for
from prefetchpipe.tables.table import HostTable
from prefetchpipe.tables.together import can_count, gather_rows, write_back
from prefetchpipe.tables.updates import AtOnce, ByCount, Shared, Update, at_once
from prefetchpipe.tables.watched import is_watched

__all__ = ["RowOptimizer", "StepCount"]

StepCount = Literal["row", "table"]

_by_folder: weakref.WeakValueDictionary[Path, RowOptimizer] = weakref.WeakValueDictionary()

_OURS = ("foreach", "fused", "capturable", "differentiable")


class RowOptimizer(torch.optim.Optimizer):
    """Updates the active rows of a table with an optimizer class of torch.

    Every state tensor of that optimizer is a :class:`HostTable` beside the table, and every number that it keeps for a
    parameter (``step``; ASGD's ``eta`` and ``mu``) is kept for each row. A row that is not in a batch is not touched by
    that step: no momentum, no decay, no count (the "lazy" rule; docs/tables.md says for each optimizer where that
    differs from a dense embedding). A row in every batch is trained exactly as in a dense embedding.

    The arithmetic is that of torch's own class. Where the update does not depend on the count (SGD, Adadelta, RMSprop,
    Rprop, Adagrad without ``lr_decay``) all rows are one parameter. Where it does, on CUDA the class is run with
    ``capturable=True`` and one count a row; elsewhere, or if the class cannot, rows are put together by count, one
    parameter for each distinct count in the batch.

    Args:
        kind: A class of ``torch.optim``, or any optimizer class whose state has the shape of the parameter or is one
            number.
        target: The embedding, or a table that :meth:`update` is called for.
        step_count: ``"row"``: each row counts the steps that it was in, so that bias correction fits rare rows.
            ``"table"``: one count for all, as ``torch.optim.SparseAdam`` has it; one launch whatever the counts.
        path: A folder where the state tables are mapped files, for state larger than memory; made if it is not there.
            State that is in it is gone on with. Each optimizer has a folder of its own.
        max_pinned_bytes: Upper bound for the page-locked memory of each state table.
        options: Hyperparameters of ``kind`` (``lr``, ...). How the class runs is chosen here, so ``foreach``,
            ``fused``, ``capturable`` and ``differentiable`` are not taken.

    Raises:
        TypeError: An argument has a wrong type, or ``kind`` does not take an option.
        ValueError: An option has a value that is not allowed.

    Example:
        >>> table = HostTable(4, 2, device="cpu")
        >>> optimizer = RowOptimizer(torch.optim.SGD, table, lr=0.5)
        >>> optimizer.update([1, 1], torch.ones(2, 2))
        >>> table[:2].tolist()
        [[0.0, 0.0], [-1.0, -1.0]]
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        target: HostEmbedding | HostTable,
        *,
        step_count: StepCount = "row",
        path: str | os.PathLike[str] | None = None,
        max_pinned_bytes: int | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):  # type: ignore[redundant-expr]
            raise TypeError(f"kind must be a class of torch.optim, not {kind!r}")
        if kind in [getattr(torch.optim, name, None) for name in NOT_ROW_WISE]:
            raise TypeError(f"kind must be row-wise and take dense gradients, and {kind.__name__} does not")
        if not isinstance(target, (HostEmbedding, HostTable)):
            raise TypeError(f"target must be a HostEmbedding or a HostTable, not {target!r}")
        if step_count not in ("row", "table"):
            raise ValueError(f"step_count must be 'row' or 'table', not {step_count!r}")
        for name in _OURS:
            if options.get(name):
                raise ValueError(f"{name}={options[name]!r} cannot be asked for: RowOptimizer chooses it")
            options.pop(name, None)
        table = target.table if isinstance(target, HostEmbedding) else target
        if not table.dtype.is_floating_point:
            raise TypeError(f"target must be floating point to be trained, not {table.dtype}")
        self._table = table
        self._embedding = target if isinstance(target, HostEmbedding) else None
        self._folder = None if path is None else Path(path)
        if self._folder is not None:
            self._open(self._folder)
        self._max_pinned_bytes = max_pinned_bytes
        placeholder = torch.nn.Parameter(torch.empty(0, table.shape[1], dtype=table.dtype, device=table.device))
        self._inner = kind([placeholder], **options)
        self._rule = rule_for(kind, self._inner.defaults)
        super().__init__([placeholder], self._inner.defaults)
        self.param_groups = self._inner.param_groups  # learning rate schedules set them here
        self._states: dict[str, HostTable] = {}
        self._followed: list[Any] = []
        self._columns = TableColumns(weakref.WeakMethod(self._add_found))  # no cycle: `del` gives the memory back
        self._found: KnownStates | None = None
        self._counted: HostTable | None = None
        self._update = self._choose(step_count)
        if self._embedding is not None:
            self._embedding._optimizer = weakref.ref(self)  # noqa: SLF001 - the newest one takes the gradients

    def _open(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        other = _by_folder.get(folder.resolve())
        if other is not None and other._table is not self._table:  # noqa: SLF001 - one of us
            warnings.warn(
                f"path={str(folder)!r} holds the state of another RowOptimizer that is in use; the two write over each "
                "other: give each a folder of its own",
                PrefetchWarning,
                stacklevel=3,
            )
        _by_folder[folder.resolve()] = self

    def _choose(self, step_count: StepCount) -> Update:
        rule = self._rule
        if rule is None:
            if step_count == "table":
                raise ValueError(
                    f"step_count='table' is not known for {type(self._inner).__name__} with these options; use 'row'"
                )
            self._columns.tables["seen"] = self._new_table("seen", torch.uint8, width=1)
            if self._folder is not None:
                self._found = KnownStates(self._folder)
                for name, dtype, is_number in self._found.read():
                    self._add_found(name, dtype, is_number=is_number)
            return ByCount(self._columns, known=False)
        self._add_states(rule)
        if step_count == "table" and rule.counts_matter:
            return Shared({name: self._one_number(name, value) for name, value in rule.scalars.items()}, rule.from_lr)
        for name, value in rule.scalars.items():
            self._columns.tables[name] = self._new_table(name, torch.float32, value, width=1)
        group = self._inner.param_groups[0]
        if not rule.counts_matter:
            group["foreach"] = False  # it is one parameter
            counts = self._columns.tables.get("step")
            if rule.scalar_step and counts is not None and can_count([self._table], counts):
                self._counted = counts
            return AtOnce(scalar_step=rule.scalar_step, from_lr=rule.from_lr)
        if rule.capturable and self._table.device.type in _capturable_devices():
            group.update(foreach=False, capturable=True)
            self._inner._warned_capturable_if_run_uncaptured = True  # noqa: SLF001 - meant
            return at_once(self._inner, rule.from_lr)
        return ByCount(self._columns, known=True, from_lr=rule.from_lr)

    def _add_states(self, rule: Rule) -> None:
        for name, value in rule.states.items():
            if name not in self._states:
                self._states[name] = self._new_table(name, self._table.dtype, value)

    def _follow_options(self) -> None:
        """A schedule may have switched on what wants one more state: ``OneCycleLR`` and momentum."""
        group = self.param_groups[0]
        read = [group.get(name) for name in READ]
        if self._rule is None or read == self._followed:
            return
        rule = rule_for(type(self._inner), group)
        if rule is not None:
            self._add_states(rule)
        self._followed = read

    def _add_found(self, name: str, dtype: torch.dtype, *, is_number: bool) -> None:
        """A table for state that the class turned out to have."""
        tables = self._columns.tables if is_number else self._states
        tables[name] = self._new_table(name, dtype, width=1 if is_number else None)
        if self._found is not None:
            self._found.add(name, dtype, is_number=is_number)

    def _one_number(self, name: str, value: float) -> torch.Tensor:
        """A number of the whole table, kept where its state is."""
        if self._folder is None:
            return torch.tensor(value, dtype=torch.float32, device="cpu")
        path = self._folder / f"{name}.npy"
        init = None if path.exists() else lambda rows: rows.fill_(value)
        view = HostTable(1, 1, torch.float32, "cpu", init, path=path).host_tensor()
        return view[0, 0]

    def _new_table(self, name: str, dtype: torch.dtype, value: float = 0.0, *, width: int | None = None) -> HostTable:
        table = self._table
        path = None if self._folder is None else self._folder / f"{name}.npy"
        kept = not value or (path is not None and path.exists())
        init = None if kept else lambda rows: rows.fill_(value)
        return HostTable(
            table.shape[0],
            width or table.shape[1],
            dtype,
            table.where,
            init,
            path=path,
            max_pinned_bytes=self._max_pinned_bytes,
        )

    @property
    def tables(self) -> dict[str, HostTable]:
        """The state tables by name: [num_rows, dim], and [num_rows, 1] for what is one number a row."""
        return {**self._states, **self._columns.tables}

    # Steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows that have got gradients since the last step, and write them and their state back.

        The gradients are used up: nothing of them is left for the next step. Several forward passes before one step add
        up.

        Args:
            closure: Reevaluates the model and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            RuntimeError: The optimizer is that of a table, or a newer one took its place.
            TypeError: The optimizer class turns out not to be row-wise; nothing has been written then.
        """
        if is_watched(self):
            return _framed_step(self) if closure is None else _framed_step(self, closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined] # torch's frame is ours to put around it

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        embedding = self._embedding
        if embedding is None:
            raise RuntimeError("this RowOptimizer is that of a table: call update(index, grad)")
        if embedding._optimizer is None or embedding._optimizer() is not self:  # noqa: SLF001
            raise RuntimeError("a newer RowOptimizer, or none, belongs to this embedding; its gradients are not ours")
        active = embedding.take_active()
        if not active:
            return loss
        with self._table.where.beside_captures():
            self._table.where.before_kernels()
            if len(active) == 1:
                one = active[0]
                assert one.rows.grad is not None
                self._apply(one.distinct.index, self._current(one), one.rows.grad, one)
            else:
                self._apply(*_merged(active, self._table), None)
            stream = self._table.where.current_stream()
            for one in active:
                grad, one.rows.grad = one.rows.grad, None
                assert grad is not None
                self._table.where.record_use(grad, stream)  # contract 4: the backward pass may have run on another
        return loss

    @torch.no_grad()
    def update(self, index: Any, grad: Any) -> None:
        """Update rows of the table by hand.

        Args:
            index: Row ids of any shape; gradients of repeated ids add up.
            grad: [*index.shape, dim] of the table's dtype, on the device.

        Raises:
            IndexError: As for :class:`HostTable`.
            ValueError: ``grad`` does not fit, or is not on the device.
        """
        table = self._table
        with table.where.beside_captures():
            table.poll()
            found = read_index(index, table.shape[0], table.where)
            wanted = (*found.shape, table.shape[1])
            if tuple(grad.shape) != wanted or grad.dtype is not table.dtype:
                raise ValueError(
                    f"grad must be {table.dtype} of shape {wanted}, not {grad.dtype} of {tuple(grad.shape)}"
                )
            if table.where.staged != table.where.is_resident(grad) or grad.device != table.device:
                # Kernels would be given an address of ordinary memory.
                raise ValueError(f"grad must be on {table.where!r}, not on {grad.device}")
            table.where.before_kernels()
            distinct = table.distinct(found)
            table.where.before_kernels()
            total = sum_by_row(grad.detach().reshape(-1, table.shape[1]), distinct, table.where)
            rows = table.gather_rows(distinct.index)
            table.where.before_kernels()
            self._apply(distinct.index, rows, total, None)

    def _current(self, active: ActiveRows) -> torch.Tensor:
        """The rows as they are now: gathered again if the table was written to since the forward pass."""
        if active.version == self._table.version:
            return active.rows.detach()
        rows = self._table.gather_rows(active.distinct.index)
        self._table.where.before_kernels()
        return rows

    def _apply(self, index: Index, rows: torch.Tensor, grad: torch.Tensor, active: ActiveRows | None) -> None:
        if not len(index):
            return
        self._follow_options()
        moving = self._moving()
        found = {} if active is None else active.take_states(moving)
        missing = {name: table for name, table in moving.items() if name not in found}
        if missing:
            found.update(zip(missing, gather_rows(list(missing.values()), index), strict=True))
        states = {name: found[name] for name in moving}
        self._table.where.before_kernels()
        made = self._update(self._inner, index, rows, grad, states)
        for name, new in made.items():
            self._add_found(name, new.dtype, is_number=False)
            states[name] = new
        tables = self.tables
        written = [self._table, *(tables[name] for name in states)]
        write_back(written, index, [rows, *states.values()], self._counted)

    def _moving(self) -> dict[str, HostTable]:
        """The tables whose rows travel with the step; the other numbers are read and written by the host."""
        return self.tables if self._update.columns_on_device and self._counted is None else self._states

    def tables_ahead(self) -> list[HostTable]:
        """State tables whose rows can be gathered ahead of a step."""
        self._follow_options()
        return list(self._moving().values())

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002, ARG002 - torch's signature
        """Give up gradients that no step has used."""
        if self._embedding is not None:
            self._embedding.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not served: an optimizer has the rows of one table.

        Raises:
            TypeError: Always.
        """
        if self.param_groups:  # the base class adds the first one
            raise TypeError(
                "a RowOptimizer trains the rows of one table: give another embedding a RowOptimizer of its own, and "
                "other parameters another optimizer"
            )
        super().add_param_group(param_group)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Hyperparameters and all state: tensors [num_rows, dim] or [num_rows, 1] in host memory, not copied."""
        groups = [{k: v for k, v in group.items() if k not in ("params", *_OURS)} for group in self.param_groups]
        state = {name: table.host_tensor() for name, table in self.tables.items()}
        if isinstance(self._update, Shared):
            state.update(self._update.scalars)
        return {"state": state, "numbers": sorted(self._columns.tables), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: It is that of another optimizer, or of a table of another size; nothing has been changed then.
        """
        state = dict(state_dict["state"])
        rows, dim = self._table.shape
        shared = self._update.scalars if isinstance(self._update, Shared) else {}
        (group,) = state_dict["param_groups"]
        options = {k: v for k, v in group.items() if k not in ("params", *_OURS)}
        rule = None if self._rule is None else rule_for(type(self._inner), {**self.param_groups[0], **options})
        own = {*self.tables, *shared}
        # State that these options ask for may come in; of a class that is not known, any.
        differing = (own ^ set(state)) - (set(state) if rule is None else {*rule.states} - own)
        if differing:
            raise ValueError(f"state_dict is that of another optimizer; they differ in {sorted(differing)}")
        numbers = set(state_dict["numbers"])
        for name, value in state.items():
            wanted = () if name in shared else (rows, 1 if name in numbers else dim)
            if tuple(value.shape) != wanted:
                raise ValueError(f"state {name!r} must have shape {wanted}, not {tuple(value.shape)}")
        for name, value in state.items():
            if name in shared:
                shared[name].copy_(value)
                continue
            if name not in self.tables:
                self._add_found(name, value.dtype, is_number=name in numbers)
            self.tables[name].host_tensor().copy_(value)
        self.param_groups[0].update(options)

    def __reduce__(self) -> Any:
        raise TypeError("a RowOptimizer cannot be copied or pickled: its state is in tables; use state_dict()")

    def __repr__(self) -> str:
        return f"RowOptimizer({type(self._inner).__name__}, {self._table!r}, state {sorted(self.tables)})"


_framed_step = torch.optim.Optimizer.profile_hook_step(RowOptimizer._step)  # noqa: SLF001 - of this file


def _merged(active: list[ActiveRows], table: HostTable) -> tuple[Index, torch.Tensor, torch.Tensor]:
    """Several forward passes as one: a row that is in two of them has the sum of its gradients, in their order."""
    parts = [one.distinct.index for one in active]
    ids = torch.cat([part.ids for part in parts])
    distinct = table.distinct(Index(ids, tuple(ids.shape), resident=parts[0].resident))
    table.where.before_kernels()
    device = active[0].rows.device
    inverse = distinct.inverse.to(device)
    count = len(distinct.index)
    grad = torch.zeros(count, table.shape[1], dtype=table.dtype, device=device)
    for one, places in zip(active, inverse.split([len(part) for part in parts]), strict=True):
        assert one.rows.grad is not None
        grad.index_add_(0, places, one.rows.grad)  # ids of one pass are distinct, so the order of the sum is fixed
    rows = table.gather_rows(distinct.index)
    table.where.before_kernels()
    return distinct.index, rows, grad


def _capturable_devices() -> list[str]:
    try:
        from torch.optim.optimizer import _get_capturable_supported_devices
    except ImportError:  # a private name of torch's
        return ["cuda"]
    return _get_capturable_supported_devices()
