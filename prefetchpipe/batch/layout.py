"""Where every leaf of a batch lies: in one pinned slot, and in few pieces of device memory.

Leaves of at least :data:`OWN_BLOCK_BYTES` get device memory of their own; all smaller ones share one slab. So a batch
costs one copy per block (mostly one or two), and a label kept for later keeps a small slab alive, never the images
beside it (contract 2 read the way a user would).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from prefetchpipe.batch.rows import Rows

__all__ = [
    "ALIGNMENT",
    "OWN_BLOCK_BYTES",
    "PACKABLE_DTYPES",
    "Layout",
    "arriving_stride",
    "flat_bytes",
    "is_packable",
    "is_plain",
]

ALIGNMENT = 64
"""Bytes. A cache line for the packing threads, and more than any vectorised device load asks for (16)."""

OWN_BLOCK_BYTES = 1 << 20
"""Bytes from which a leaf has device memory of its own. The extra copy costs some 4 us to launch, and 20 to run
(by arithmetic, at 55 GB/s)."""

_FEW_LEAVES = 3

_SHARED_SPAN = 2
"""Leaves of one storage are packed as one span if it is at most this many times their own bytes."""

_PACKABLE = """
    float16 float32 float64 bfloat16 complex32 complex64 complex128 bool
    uint8 uint16 uint32 uint64 int8 int16 int32 int64
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""
PACKABLE_DTYPES = frozenset(getattr(torch, name) for name in _PACKABLE.split() if hasattr(torch, name))

Empty = Callable[[torch.Size, tuple[int, ...], torch.dtype], torch.Tensor]
Alloc = Callable[[int], torch.Tensor]


def is_packable(leaf: object) -> bool:
    """Whether ``leaf`` is plain CPU bytes with sizes and strides; anything else goes by its own ``.to``."""
    return isinstance(leaf, Rows) or (type(leaf) is torch.Tensor and leaf.is_cpu and is_plain(leaf))


def is_plain(leaf: torch.Tensor) -> bool:
    """Whether a :class:`torch.Tensor` is nothing but strided bytes, on whatever device."""
    return (
        leaf.dtype in PACKABLE_DTYPES
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
    leaf: int
    """The one leaf that it holds; -1 for a slab or a shared storage."""


class Layout:
    """The plan for all batches of one signature.

    Args:
        leaves: Packable CPU tensors, in the order of the batch.

    Attributes:
        nbytes: Bytes of the slot that holds the whole batch.
        blocks: Device memory, the slab of the small leaves last.
        slab: Index of that slab; -1 without one.
        leaves: Where each leaf lies.
        spans: What is packed.
    """

    __slots__ = ("_copied", "_empty", "_groups", "_offsets", "_sizes", "blocks", "leaves", "nbytes", "slab", "spans")

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        spans, inside = _spans(leaves)
        large = [i for i, span in enumerate(spans) if span[1] >= OWN_BLOCK_BYTES]
        small = [i for i, span in enumerate(spans) if span[1] < OWN_BLOCK_BYTES]
        if len(small) <= _FEW_LEAVES and all(spans[i][2] < 0 for i in small):
            large, small = large + small, []  # an allocation and a copy each cost less than cutting up a slab
        small.sort(key=lambda i: _likeness(leaves[spans[i][0]]))  # like beside like: one call unpacks them all
        blocks: list[Block] = []
        placed: dict[int, Span] = {}
        position = 0
        for i in large:
            position = _align(position)
            leaf, nbytes, storage_offset = spans[i]
            placed[i] = Span(leaf, len(blocks), position, nbytes, storage_offset)
            blocks.append(Block(position, nbytes, leaf if storage_offset < 0 else -1))
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
            blocks.append(Block(start, position - start, -1))
        self.nbytes = position
        self.blocks = tuple(blocks)
        self.spans = tuple(placed[i] for i in (*large, *small))
        self.leaves = tuple(
            self._place(leaf, placed[span], extra) for leaf, (span, extra) in zip(leaves, inside, strict=True)
        )
        self._copied = tuple(self._is_copied(span, leaves[span.leaf]) for span in self.spans)
        self._offsets = array("Q", [span.slot_offset for span in self.spans])
        self._sizes = array("Q", [span.nbytes for span in self.spans])
        self._plan_unpacking()

    def _is_copied(self, span: Span, leaf: torch.Tensor) -> bool:
        """Whether the bytes of a span lie in memory as they are packed."""
        if span.storage_offset >= 0:
            return True
        return not isinstance(leaf, Rows) and tuple(leaf.stride()) == self.leaves[span.leaf].stride

    def _place(self, tensor: torch.Tensor, span: Span, extra: int) -> Leaf:
        stride = tuple(tensor.stride() if span.storage_offset >= 0 else arriving_stride(tensor))
        offset = span.slot_offset - self.blocks[span.block].slot_offset + extra
        return Leaf(tensor.dtype, tensor.shape, stride, span.block, offset)

    def _plan_unpacking(self) -> None:
        """Leaves that are alike and evenly spaced in their block are cut out of it by one call."""
        alone = {block.leaf for block in self.blocks}
        order = sorted((i for i in range(len(self.leaves)) if i not in alone), key=self._place_of)
        runs: list[_Run] = []
        for i in order:
            leaf = self.leaves[i]
            if leaf.shape.numel() and not (runs and runs[-1].takes(i, leaf)):
                runs.append(_Run(i, leaf))
        # Seen as elements once for all runs of a dtype in a block; an odd tail would be in the way of that.
        groups: dict[tuple[int, torch.dtype], list[_Run]] = {}
        for run in runs:
            groups.setdefault((run.block, run.dtype), []).append(run)
        self._groups = tuple(
            (block, dtype, self.blocks[block].nbytes % dtype.itemsize, tuple(members))
            for (block, dtype), members in groups.items()
        )
        self._empty = tuple(i for i in order if self.leaves[i].shape.numel() == 0)

    def _place_of(self, i: int) -> tuple[int, int]:
        return self.leaves[i].block, self.leaves[i].offset

    def allocate(
        self,
        empty: Empty,
        alloc: Alloc,
        *,
        in_slab: bool = True,  # noqa: ARG002 - for few leaves
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Device memory for one batch.

        Args:
            empty: ``empty(shape, stride, dtype)`` on the device.
            alloc: ``alloc(nbytes)``, flat ``uint8`` on the device.
            in_slab: A few small leaves share memory too, as many always do.

        Returns:
            The leaves in batch order, and one tensor for each of ``blocks`` over the same memory. No leaf is an
            autograd view: an in-place change of one must not count as a change of its neighbours in the slab.
        """
        out: list[torch.Tensor] = [None] * len(self.leaves)  # type: ignore[list-item]
        memory: list[torch.Tensor] = []
        for block in self.blocks:
            if block.leaf >= 0:
                leaf = self.leaves[block.leaf]
                tensor = out[block.leaf] = empty(leaf.shape, leaf.stride, leaf.dtype)
            else:
                tensor = alloc(block.nbytes)
            memory.append(tensor)
        if self._groups:
            with torch._C._AutoDispatchBelowADInplaceOrView():  # noqa: SLF001 - as torch's own C++ does
                for number, dtype, tail, runs in self._groups:
                    whole = memory[number]
                    flat = (whole[:-tail] if tail else whole).view(dtype)
                    for run in runs:
                        run.cut(flat, out)
        for i in self._empty:
            leaf = self.leaves[i]
            out[i] = empty(leaf.shape, leaf.stride, leaf.dtype)
        return out, memory

    def targets(self, arrived: list[torch.Tensor], memory: list[torch.Tensor]) -> list[torch.Tensor]:
        """Destinations of the spans in final memory, where that is the host's."""
        targets = []
        for span in self.spans:
            if span.storage_offset < 0:
                targets.append(arrived[span.leaf])
            else:
                start = span.slot_offset - self.blocks[span.block].slot_offset
                targets.append(memory[span.block][start : start + span.nbytes])
        return targets

    @property
    def count(self) -> int:
        """Number of spans."""
        return len(self.spans)

    def slot_views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Inside ``slot`` (flat ``uint8``, at least ``nbytes``): where spans are packed."""
        return [self.slot_view(span, slot) for span in self.spans]

    def pieces(self, slot: torch.Tensor, *, in_slab: bool = True) -> list[torch.Tensor]:  # noqa: ARG002
        """The bytes in ``slot`` of each tensor of memory that :meth:`allocate` gives, told the same."""
        return [slot[block.slot_offset : block.slot_offset + block.nbytes] for block in self.blocks]

    def slot_view(self, span: Span, slot: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Where ``span`` is packed in a slot that begins with the byte ``begin`` of the batch."""
        start = span.slot_offset - begin
        if span.storage_offset >= 0:
            return slot[start : start + span.nbytes]
        leaf = self.leaves[span.leaf]
        view = torch.empty(0, dtype=leaf.dtype, device=slot.device)
        return view.set_(slot.untyped_storage(), start // leaf.dtype.itemsize, leaf.shape, leaf.stride)

    def sources(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What ``copy_`` reads for each span."""
        return [leaves[s.leaf] if s.storage_offset < 0 else _bytes_of(leaves[s.leaf], s) for s in self.spans]

    def source(self, number: int, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same for one span."""
        span = self.spans[number]
        return leaves[span.leaf] if span.storage_offset < 0 else _bytes_of(leaves[span.leaf], span)

    def addresses(self, leaves: Sequence[torch.Tensor]) -> tuple[list[int], array[int], array[int]]:
        """For each span where its bytes lie in memory, 0 if they do not lie there as they are packed.

        Returns:
            The addresses; the offset in the slot, and the bytes of each span, as arrays of type ``"Q"``.
        """
        addresses = [
            0
            if not is_copied
            else leaves[span.leaf].data_ptr()
            if span.storage_offset < 0
            else leaves[span.leaf].untyped_storage().data_ptr() + span.storage_offset
            for span, is_copied in zip(self.spans, self._copied, strict=True)
        ]
        return addresses, self._offsets, self._sizes


class _Run:
    """Leaves of one dtype, shape and stride, evenly spaced in one block."""

    __slots__ = ("_indices", "_leaf", "_pitch", "_shape", "_start", "_stride", "block", "dtype")

    def __init__(self, index: int, leaf: Leaf) -> None:
        self.block = leaf.block
        self.dtype = leaf.dtype
        self._leaf = leaf
        self._indices = [index]
        self._pitch = 0  # in elements
        self._start = leaf.offset // leaf.dtype.itemsize
        self._shape: tuple[int, ...] = tuple(leaf.shape)
        self._stride = leaf.stride

    def takes(self, index: int, leaf: Leaf) -> bool:
        """Add ``leaf`` if it continues this run."""
        first = self._leaf
        if (leaf.block, leaf.dtype, leaf.shape, leaf.stride) != (first.block, first.dtype, first.shape, first.stride):
            return False
        step = leaf.offset // leaf.dtype.itemsize - self._start - self._pitch * (len(self._indices) - 1)
        if len(self._indices) > 1 and step != self._pitch:
            return False
        self._pitch = step
        self._indices.append(index)
        self._shape = (len(self._indices), *first.shape)
        self._stride = (step, *first.stride)
        return True

    def cut(self, flat: torch.Tensor, out: list[torch.Tensor]) -> None:
        """Fill in the leaves of this run, from its block seen as elements."""
        piece = flat.as_strided(self._shape, self._stride, self._start)
        if len(self._indices) == 1:
            out[self._indices[0]] = piece
            return
        for i, leaf in zip(self._indices, piece.unbind(0), strict=True):
            out[i] = leaf


def _likeness(tensor: torch.Tensor) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    return -tensor.dtype.itemsize, str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride())


def arriving_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that ``tensor.to(device)`` gives: asked of torch itself, on a device without memory."""
    if isinstance(tensor, Rows) or (tensor.is_contiguous() and tensor.numel()):
        return tensor.stride()
    with torch.no_grad():
        return tensor.to("meta").stride()


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a dense tensor, whatever its strides: a dimension of one may keep an odd one."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    size = tensor.dtype.itemsize
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (tensor.numel() * size,), (1,))


def _bytes_of(leaf: torch.Tensor, span: Span) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=leaf.device)
    return view.set_(leaf.untyped_storage(), span.storage_offset, (span.nbytes,), (1,))


def _extent(leaf: torch.Tensor) -> tuple[int, int]:
    """Bytes of the storage that ``leaf`` touches: first, and one past the last."""
    size = leaf.dtype.itemsize
    start = int(leaf.storage_offset()) * size
    last = sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))
    return start, start + (last + 1) * size


def _spans(leaves: Sequence[torch.Tensor]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Spans as (leaf, bytes, storage offset or -1); and for each leaf its span and its bytes into it."""
    spans: list[tuple[int, int, int]] = []
    inside: list[tuple[int, int]] = [(0, 0)] * len(leaves)
    by_storage: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        storage = leaf.untyped_storage().data_ptr() if leaf.numel() and not isinstance(leaf, Rows) else 0
        by_storage.setdefault(storage or -1 - i, []).append(i)
    for members in by_storage.values():
        if len(members) > 1:
            extents = [_extent(leaves[i]) for i in members]
            start = min(e[0] for e in extents) // ALIGNMENT * ALIGNMENT
            end = max(e[1] for e in extents)
            own = sum(leaves[i].numel() * leaves[i].dtype.itemsize for i in members)
            # NumPy views of one array have storages of different length: the longest one covers them all.
            longest = max(members, key=lambda i: leaves[i].untyped_storage().nbytes())
            if end - start <= _SHARED_SPAN * own + ALIGNMENT:
                for i, extent in zip(members, extents, strict=True):
                    inside[i] = (len(spans), extent[0] - start)
                spans.append((longest, end - start, start))
                continue
        for i in members:
            inside[i] = (len(spans), 0)
            spans.append((i, leaves[i].numel() * leaves[i].dtype.itemsize, -1))
    return spans, inside
