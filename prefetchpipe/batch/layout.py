"""Where every leaf of a batch lies: in one pinned slot, and in few device blocks.

Leaves of at least :data:`OWN_BLOCK_BYTES` get a device block of their own; all smaller ones share one slab. So a batch
costs one copy per block (mostly one or two), and a label kept for later keeps a small slab alive, never the images
beside it (contract 2 read the way a user would).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["ALIGNMENT", "OWN_BLOCK_BYTES", "Layout", "LayoutCache", "Leaf", "is_packable"]

ALIGNMENT = 64
"""Bytes. A cache line for the packing threads, and more than any vectorised device load asks for (16)."""

OWN_BLOCK_BYTES = 1 << 20
"""Bytes from which a leaf has a device block of its own. The extra copy launch costs some 3 us, its copy 20."""

_SHARED_SPAN = 2
"""Leaves of one storage are packed as one span if it is at most this many times their own bytes."""

_PACKABLE_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        "float16 float32 float64 bfloat16 complex32 complex64 complex128 bool uint8 uint16 uint32 uint64 int8 int16 "
        "int32 int64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if hasattr(torch, name)
)

Key = tuple[object, ...]


def is_packable(leaf: object) -> bool:
    """Whether ``leaf`` is plain CPU bytes with sizes and strides; anything else goes by its own ``.to``."""
    return (
        type(leaf) is torch.Tensor
        and leaf.is_cpu
        and leaf.dtype in _PACKABLE_DTYPES
        and leaf.layout is torch.strided
        and not leaf.requires_grad
        and not leaf.is_nested
        and not leaf.is_neg()
        and not (leaf.is_complex() and leaf.is_conj())
    )


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf inside its block. ``offset`` in bytes; ``stride`` in elements, as plain ``.to`` would give it."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    block: int
    offset: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes packed by one copy on the CPU: a leaf, or a stretch of a storage that several leaves share."""

    leaf: int
    block: int
    slot_offset: int
    nbytes: int
    storage_offset: int
    """Bytes into the storage of ``leaf``; -1 for a span that is just that leaf."""


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of device memory, and where its bytes lie in the slot."""

    slot_offset: int
    nbytes: int


class Layout:
    """The plan for all batches of one signature.

    Args:
        leaves: Packable CPU tensors, in the order of the batch.

    Attributes:
        nbytes: Bytes of the slot that holds the whole batch.
        blocks: Device blocks, the slab of the small leaves last.
        leaves: Where each leaf lies.
        spans: What is packed.
    """

    __slots__ = ("_groups", "_odd", "blocks", "leaves", "nbytes", "slab", "spans")

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        spans, inside = _spans(leaves)
        large = [i for i, span in enumerate(spans) if span[1] >= OWN_BLOCK_BYTES]
        small = [i for i, span in enumerate(spans) if span[1] < OWN_BLOCK_BYTES]
        # Leaves of one dtype stand side by side, so that one call unpacks them all.
        small.sort(key=lambda i: (leaves[spans[i][0]].dtype.itemsize, str(leaves[spans[i][0]].dtype)), reverse=True)
        blocks: list[Block] = []
        placed: dict[int, Span] = {}
        position = 0
        for i in large:
            position = _align(position)
            leaf, nbytes, storage_offset = spans[i]
            placed[i] = Span(leaf, len(blocks), position, nbytes, storage_offset)
            blocks.append(Block(position, nbytes))
            position += nbytes
        self.slab = -1
        if small:
            start = position = _align(position)
            self.slab = len(blocks)
            for i in small:
                position = _align(position)
                leaf, nbytes, storage_offset = spans[i]
                placed[i] = Span(leaf, len(blocks), position, nbytes, storage_offset)
                position += nbytes
            blocks.append(Block(start, position - start))
        self.nbytes = position
        self.blocks = tuple(blocks)
        self.spans = tuple(placed[i] for i in (*large, *small))
        self.leaves = tuple(self._place(leaf, placed[s], extra) for leaf, (s, extra) in zip(leaves, inside, strict=True))
        self._plan_unpacking()

    def _place(self, tensor: torch.Tensor, span: Span, extra: int) -> Leaf:
        stride = tensor.stride() if span.storage_offset >= 0 else _arriving_stride(tensor)
        offset = span.slot_offset - self.blocks[span.block].slot_offset + extra
        return Leaf(tensor.dtype, tensor.shape, tuple(stride), span.block, offset)

    def _plan_unpacking(self) -> None:
        """Runs of contiguous small leaves are unpacked by one C++ call each; padding takes part as dummy leaves."""
        order = sorted(
            (i for i, leaf in enumerate(self.leaves) if leaf.block == self.slab and _is_plain(leaf)),
            key=lambda i: self.leaves[i].offset,
        )
        groups: list[tuple[int, int, torch.dtype, list[torch.Tensor], list[tuple[int, int]]]] = []
        used: set[int] = set()
        run: list[int] = []

        def close() -> None:
            if len(run) > 1:
                used.update(run)
                groups.append(self._group(run))
            run.clear()

        end = -1
        for i in order:
            leaf = self.leaves[i]
            if run and (leaf.dtype != self.leaves[run[-1]].dtype or leaf.offset < end):
                close()
            run.append(i)
            end = leaf.offset + leaf.shape.numel() * leaf.dtype.itemsize
        close()
        self._groups = tuple(groups)
        self._odd = tuple(i for i in range(len(self.leaves)) if i not in used)

    def _group(
        self, run: list[int]
    ) -> tuple[int, int, torch.dtype, list[torch.Tensor], list[tuple[int, int]]]:
        dtype = self.leaves[run[0]].dtype
        start = position = self.leaves[run[0]].offset
        templates: list[torch.Tensor] = []
        picks: list[tuple[int, int]] = []
        for i in run:
            leaf = self.leaves[i]
            if leaf.offset > position:
                pad = (leaf.offset - position) // dtype.itemsize
                templates.append(torch.empty(pad, dtype=dtype, device="meta"))
            picks.append((len(templates), i))
            templates.append(torch.empty(leaf.shape, dtype=dtype, device="meta"))
            position = leaf.offset + leaf.shape.numel() * dtype.itemsize
        return start, position, dtype, templates, picks

    def unpack(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Leaves over ``blocks`` (flat ``uint8``), in batch order.

        Each is a tensor of its own, not an autograd view: an in-place change of one leaf must not count as a change
        of its neighbours in the slab.
        """
        out: list[torch.Tensor] = [None] * len(self.leaves)  # type: ignore[list-item]
        for start, end, dtype, templates, picks in self._groups:
            flat = blocks[self.slab][start:end].view(dtype)
            pieces = torch._C._nn.unflatten_dense_tensors(flat, templates)
            for piece, i in picks:
                out[i] = pieces[piece].data
        for i in self._odd:
            leaf = self.leaves[i]
            block = blocks[leaf.block]
            piece = torch.empty(0, dtype=leaf.dtype, device=block.device)
            if leaf.shape.numel():
                start = leaf.offset // leaf.dtype.itemsize
                out[i] = piece.set_(block.untyped_storage(), start, leaf.shape, leaf.stride)
            else:
                out[i] = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=block.device)
        return out

    def slot_views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Destinations of the spans inside ``slot`` (flat ``uint8``, at least ``nbytes``), for ``copy_``."""
        views = []
        for span in self.spans:
            if span.storage_offset >= 0:
                views.append(slot[span.slot_offset : span.slot_offset + span.nbytes])
                continue
            leaf = self.leaves[span.leaf]
            view = torch.empty(0, dtype=leaf.dtype, device="cpu")
            start = span.slot_offset // leaf.dtype.itemsize
            views.append(view.set_(slot.untyped_storage(), start, leaf.shape, leaf.stride))
        return views

    def sources(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What ``copy_`` reads for each span."""
        return [leaves[s.leaf] if s.storage_offset < 0 else _bytes_of(leaves[s.leaf], s) for s in self.spans]


class LayoutCache:
    """Layouts by signature, bounded: batches of ever new shapes must not grow it (contract 14)."""

    __slots__ = ("_layouts",)

    _LIMIT = 128

    def __init__(self) -> None:
        self._layouts: dict[Key, Layout] = {}

    def get(self, leaves: Sequence[torch.Tensor]) -> Layout:
        """The layout of a batch with these leaves; a few hundred nanoseconds a leaf when known."""
        key = signature(leaves)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= self._LIMIT:
                self._layouts.clear()
            layout = self._layouts[key] = Layout(leaves)
        return layout


def signature(leaves: Sequence[torch.Tensor]) -> Key:
    """Dtypes, shapes, strides, and which leaves share a storage where."""
    parts: list[object] = []
    for leaf in leaves:
        parts.append(leaf.dtype)
        parts.append(leaf.shape)
        parts.append(leaf.stride())
    storages = [leaf.untyped_storage().data_ptr() for leaf in leaves]
    if len(set(storages)) != len(storages):
        first: dict[int, int] = {}
        for i, (leaf, storage) in enumerate(zip(leaves, storages, strict=True)):
            if storage:
                parts.append((first.setdefault(storage, i), leaf.storage_offset()))
    return tuple(parts)


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _is_plain(leaf: Leaf) -> bool:
    expected = 1
    for size, stride in zip(reversed(leaf.shape), reversed(leaf.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    # A dimension of one may carry any stride; a plain view would reset it.
    return leaf.shape.numel() > 0 and leaf.stride == _contiguous(leaf.shape)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _arriving_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that ``tensor.to(device)`` gives: asked of torch itself, on a device without memory."""
    if tensor.is_contiguous() and tensor.numel():
        return tensor.stride()
    with torch.no_grad():
        return tensor.to("meta").stride()


def _bytes_of(leaf: torch.Tensor, span: Span) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.uint8, device="cpu")
    return view.set_(leaf.untyped_storage(), span.storage_offset, (span.nbytes,), (1,))


def _extent(leaf: torch.Tensor) -> tuple[int, int]:
    """Bytes of the storage that ``leaf`` touches: first, and one past the last."""
    size = leaf.dtype.itemsize
    start = leaf.storage_offset() * size
    last = sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))
    return start, start + (last + 1) * size


def _spans(leaves: Sequence[torch.Tensor]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Spans as (leaf, bytes, storage offset or -1); and for each leaf its span and its bytes into it."""
    spans: list[tuple[int, int, int]] = []
    inside: list[tuple[int, int]] = [(0, 0)] * len(leaves)
    by_storage: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        storage = leaf.untyped_storage().data_ptr() if leaf.numel() else 0
        by_storage.setdefault(storage or -1 - i, []).append(i)
    for members in by_storage.values():
        if len(members) > 1:
            extents = [_extent(leaves[i]) for i in members]
            start = min(e[0] for e in extents) // ALIGNMENT * ALIGNMENT
            end = max(e[1] for e in extents)
            own = sum(leaves[i].numel() * leaves[i].dtype.itemsize for i in members)
            if end - start <= _SHARED_SPAN * own + ALIGNMENT:
                for i, extent in zip(members, extents, strict=True):
                    inside[i] = (len(spans), extent[0] - start)
                spans.append((members[0], end - start, start))
                continue
        for i in members:
            inside[i] = (len(spans), 0)
            spans.append((i, leaves[i].numel() * leaves[i].dtype.itemsize, -1))
    return spans, inside
