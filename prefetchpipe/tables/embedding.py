"""``HostEmbedding``: an embedding whose table lives on the host and whose active rows are trained on the device."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prefetchpipe.device.base import Device, Stream
from prefetchpipe.tables.ahead import MOST_PATCHES, RowsAhead
from prefetchpipe.tables.distinct import Distinct
from prefetchpipe.tables.index import read_index
from prefetchpipe.tables.initial import Init
from prefetchpipe.tables.lookup import look_up
from prefetchpipe.tables.table import HostTable
from prefetchpipe.tables.together import gather_ahead

if TYPE_CHECKING:
    from prefetchpipe.tables.lookahead import Lookahead
    from prefetchpipe.tables.optimizer import RowOptimizer

__all__ = ["ActiveRows", "HostEmbedding"]

Rows = dict[str, torch.Tensor]
States = dict[HostTable, tuple[torch.Tensor, int]]


@dataclass(slots=True)
class ActiveRows:
    """The rows of one forward pass.

    Attributes:
        distinct: Which rows.
        rows: A dense leaf, [ids, dim] on the device; its ``grad`` has the sum over repeated ids.
        version: The table's when they were gathered.
        states: Rows of the optimizer's tables that were gathered ahead and came with them, by table, and its version.
    """

    distinct: Distinct
    rows: torch.Tensor
    version: int
    states: States = field(default_factory=dict)

    def take_states(self, tables: Mapping[str, HostTable]) -> Rows:
        """What is there of ``tables``, as they are now. Once: the step changes it in place."""
        states = {
            name: self.states[table][0]
            for name, table in tables.items()
            if table in self.states and self.states[table][1] == table.version
        }
        self.states.clear()
        return states


@dataclass(slots=True)
class Prepared:
    """A batch of ids whose rows are on their way."""

    ids: Any
    change: Any
    distinct: Distinct
    rows: RowsAhead
    stream: Stream


class HostEmbedding(nn.Module):
    """An ``nn.Embedding`` with its table in host memory.

    ``forward`` gathers the distinct rows of a batch to the device as a dense leaf, and looks the batch up in it. After
    ``backward`` that leaf has a dense gradient, repeated ids summed as in ``nn.Embedding``, and
    :class:`~prefetchpipe.tables.RowOptimizer` updates the rows with a row-wise optimizer of torch and writes them back.

    The module has no parameters: other optimizers and ``.to`` leave it alone. ``state_dict`` has the table under
    ``weight``, so checkpoints of ``nn.Embedding`` load and the other way round.

    Args:
        num_embeddings: Rows.
        embedding_dim: Values a row.
        dtype: Floating point.
        device: Where the active rows go, as for :class:`prefetchpipe.GPUPrefetcher`.
        init: As for :class:`HostTable`; None: standard normal, as ``nn.Embedding``.
        table: A table to use instead of a new one; the other options are then its own.
        path: As for :class:`HostTable`.
        max_pinned_bytes: As for :class:`HostTable`.

    Raises:
        TypeError: See :class:`HostTable`; also a dtype that is not floating point.
        ValueError: See :class:`HostTable`; also a table of another shape.

    Example:
        >>> embedding = HostEmbedding(1000, 8, device="cpu")
        >>> optimizer = RowOptimizer(torch.optim.Adam, embedding, lr=0.1)
        >>> embedding(torch.tensor([[1, 5], [5, 7]])).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | Device | None = None,
        init: Init = None,
        table: HostTable | None = None,
        path: str | os.PathLike[str] | None = None,
        max_pinned_bytes: int | None = None,
    ) -> None:
        super().__init__()
        if table is None:
            if init is None and not (path is not None and os.path.exists(path)):  # noqa: PTH110 - a path of any kind
                init = nn.init.normal_
            table = HostTable(
                num_embeddings, embedding_dim, dtype, device, init, path=path, max_pinned_bytes=max_pinned_bytes
            )
        if table.shape != (num_embeddings, embedding_dim):
            raise ValueError(f"table must have shape {(num_embeddings, embedding_dim)}, not {table.shape}")
        if not table.dtype.is_floating_point:
            raise TypeError(f"dtype must be floating point to be trained, not {table.dtype}")
        self.table = table
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self._active: dict[int, ActiveRows] = {}
        self._prepared: dict[int, list[Prepared]] = {}
        self._optimizer: weakref.ref[RowOptimizer] | None = None

    def forward(self, ids: Any) -> torch.Tensor:
        """Look ids up.

        Args:
            ids: Integers of any shape: a tensor in host memory or on the device, or a NumPy array.

        Returns:
            [*ids.shape, embedding_dim] on the device.

        Raises:
            IndexError: An id is out of range; for ids on the device see :class:`HostTable`.
            TypeError: Ids are not integers.
        """
        table = self.table
        device = table.where
        is_trained = torch.is_grad_enabled()
        states: States = {}
        with torch.no_grad(), device.beside_captures():
            prepared = self._take_prepared(ids)
            if prepared is None:
                distinct = self._distinct(ids)
                rows = table.gather_rows(distinct.index)
            else:
                distinct = prepared.distinct
                rows, *more = prepared.rows.take()
                for one, its in zip(prepared.rows.tables[1:], more, strict=True):
                    states[one] = its, one.version
                stream = device.current_stream()
                if stream != prepared.stream:
                    for tensor in distinct.device_tensors():
                        device.record_use(tensor, stream)  # contract 4: made on the stream that was current then
        device.before_kernels()
        if is_trained:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(_remember(weakref.ref(self), distinct, table.version, states))
        return look_up(rows, distinct, _shape_of(ids), device)

    def _distinct(self, ids: Any) -> Distinct:
        table = self.table
        table.poll()
        return table.distinct(read_index(ids, table.shape[0], table.where))

    # Rows ahead

    def lookahead(self, batches: Iterable[Any], ids: Callable[[Any], Any], *, depth: int = 1) -> Lookahead:
        """Iterate over ``batches`` with the rows of the next ones on their way.

        Args:
            batches: A :class:`prefetchpipe.GPUPrefetcher` (without ``static``), or any iterable of batches that are not
                written to again.
            ids: Gives the very object that ``forward`` will be called with, out of a batch.
            depth: Batches ahead, at least 1.

        Example:
            >>> embedding = HostEmbedding(10, 4, device="cpu")
            >>> for batch in embedding.lookahead([torch.tensor([1, 2]), torch.tensor([2, 3])], lambda batch: batch):
            ...     embedding(batch).shape
            torch.Size([2, 4])
            torch.Size([2, 4])
        """
        from prefetchpipe.tables.lookahead import Lookahead

        return Lookahead(batches, {self: ids}, depth=depth)

    def prepare(self, ids: Any, *, depth: int = 1) -> Prepared:
        """Start to gather the rows (and the optimizer's) for a later ``forward`` with this very object.

        Args:
            ids: As for ``forward``.
            depth: Batches until then. If many more steps pass the rows are gathered again: who waits that long stands
                still while others train, and what they write would pile up on the device.
        """
        table = self.table
        if torch.is_inference_mode_enabled():  # what is made here may serve a training step: never in it
            with torch.inference_mode(False):
                return self.prepare(ids, depth=depth)
        with torch.no_grad(), table.where.beside_captures():
            distinct = self._distinct(ids)
            optimizer = None if self._optimizer is None else self._optimizer()
            tables = () if optimizer is None else optimizer.tables_ahead()
            rows = gather_ahead((table, *tables), distinct.index, most_patches=MOST_PATCHES * depth)
            # It keeps ids alive, so that its number is not reused.
            prepared = Prepared(ids, _change_of(ids), distinct, rows, table.where.current_stream())
            self._prepared.setdefault(id(ids), []).append(prepared)
            return prepared

    def forget(self, prepared: Prepared) -> bool:
        """Give up what :meth:`prepare` started; whether it was still waiting."""
        waiting = self._prepared.get(id(prepared.ids), [])
        found = any(one is prepared for one in waiting)
        if found:
            self._keep(prepared.ids, [one for one in waiting if one is not prepared])
        return found

    def _take_prepared(self, ids: Any) -> Prepared | None:
        waiting = self._prepared.get(id(ids))
        if not waiting:
            return None
        self._keep(ids, waiting[1:])
        return waiting[0] if _unchanged(waiting[0].change, ids) else None

    def _keep(self, ids: Any, waiting: list[Prepared]) -> None:
        if waiting:
            self._prepared[id(ids)] = waiting
        else:
            self._prepared.pop(id(ids), None)

    # For the optimizer

    def take_active(self) -> list[ActiveRows]:
        """The rows that have got gradients since the last call, in the order of their forward passes' backward."""
        active = list(self._active.values())
        self._active.clear()
        return active

    # nn.Module

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002, ARG002 - torch's signature
        """Give up gradients that no step has used; ``zero_grad`` of a module around this one does not get here."""
        for one in self.take_active():
            one.rows.grad = None  # a graph that was retained may add to it again

    def extra_repr(self) -> str:
        """As ``nn.Embedding``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.table!r}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.table.host_tensor()

    def _load_from_state_dict(  # noqa: PLR0917 - torch's signature
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,  # noqa: FBT001
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        state = dict(state_dict)
        weight = state.pop(key, None)
        super()._load_from_state_dict(state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if weight is None:
            if strict:
                missing_keys.append(key)
        elif tuple(weight.shape) != self.table.shape:
            error_msgs.append(
                f"size mismatch for {key}: {tuple(weight.shape)} in the checkpoint, {self.table.shape} here"
            )
        else:
            with torch.no_grad():
                self.table.host_tensor().copy_(weight)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_active": {}, "_prepared": {}, "_optimizer": None}


def _remember(
    module: weakref.ref[HostEmbedding], distinct: Distinct, version: int, states: States
) -> Callable[[torch.Tensor], None]:
    """Runs when the leaf has its gradient. Until then only the graph holds the leaf: a forward alone leaves nothing."""

    def hook(leaf: torch.Tensor) -> None:
        embedding = module()
        reference = None if embedding is None else embedding._optimizer  # noqa: SLF001
        if embedding is None or reference is None or reference() is None:
            leaf.grad = None  # nobody will step: a table that is not trained collects no gradients
        else:
            embedding._active.setdefault(id(leaf), ActiveRows(distinct, leaf, version, states))  # noqa: SLF001

    return hook


def _shape_of(ids: Any) -> tuple[int, ...]:
    return tuple(ids.shape) if hasattr(ids, "shape") else tuple(torch.as_tensor(ids).shape)


def _change_of(ids: Any) -> Any:
    """What tells whether ``ids`` was written to in place."""
    if isinstance(ids, torch.Tensor):
        return ids._version if not ids.is_inference() else None  # noqa: SLF001 - autograd's own count of in-place writes
    return ids.copy() if hasattr(ids, "copy") else None


def _unchanged(before: Any, ids: Any) -> bool:
    if isinstance(ids, torch.Tensor):
        return bool(before == _change_of(ids))
    return bool((before == ids).all()) if hasattr(ids, "all") else bool(before == ids)
