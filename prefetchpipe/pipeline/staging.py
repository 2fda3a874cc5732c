"""Packing: from the loader's tensors into a pinned slot, and from there, piece by piece, onto the wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefetchpipe.batch.layout import Layout
from prefetchpipe.device.base import Device
from prefetchpipe.memory.ring import Slot

__all__ = ["CHUNK_BYTES", "stage"]

CHUNK_BYTES = 64 << 20
"""A leaf beyond this is packed and copied in pieces, so that its copy starts before its packing has ended."""


def stage(
    device: Device, layout: Layout, slot: Slot, leaves: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]
) -> None:
    """Pack ``leaves`` into ``slot`` and launch the copies to ``blocks``, on the copy stream.

    Runs on the thread that sends; the GIL is free while bytes move. All bytes have left ``leaves`` when it returns
    (contract 5).
    """
    views = slot.views(layout)
    sources = layout.sources(leaves)
    if layout.nbytes <= CHUNK_BYTES:
        torch._foreach_copy_(views, sources)
        for block, memory in zip(layout.blocks, blocks, strict=True):
            device.copy(memory, slot.tensor[block.slot_offset : block.slot_offset + block.nbytes])
        return
    small_views: list[torch.Tensor] = []
    small_sources: list[torch.Tensor] = []
    for span, view, source in zip(layout.spans, views, sources, strict=True):
        if span.block == layout.slab:
            small_views.append(view)
            small_sources.append(source)
            continue
        if span.nbytes > CHUNK_BYTES and source.is_contiguous():
            _stage_in_pieces(device, slot, span.slot_offset, source, blocks[span.block])
            continue
        view.copy_(source)
        device.copy(blocks[span.block], slot.tensor[span.slot_offset : span.slot_offset + span.nbytes])
    if small_views:
        torch._foreach_copy_(small_views, small_sources)
        block = layout.blocks[layout.slab]
        device.copy(blocks[layout.slab], slot.tensor[block.slot_offset : block.slot_offset + block.nbytes])


def _stage_in_pieces(
    device: Device, slot: Slot, slot_offset: int, source: torch.Tensor, memory: torch.Tensor
) -> None:
    flat = source.view(-1).view(torch.uint8)
    nbytes = flat.numel()
    for start in range(0, nbytes, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, nbytes)
        piece = slot.tensor[slot_offset + start : slot_offset + end]
        piece.copy_(flat[start:end])
        device.copy(memory[start:end], piece)
