"""A batch as plain Python data, so that two that came different ways can be compared for everything that counts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import PackedSequence


def described(value: Any) -> Any:  # noqa: PLR0911 - a list of kinds
    """Types, values, dtypes, shapes, strides and flags, all the way down.

    Strides are those that plain ``.to(device)`` gives. Numeric arrays count as tensors: that is the rule for them.
    """
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return (name, *_tensor(value))
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            return described(torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="K")))
        return name, value.dtype, value.shape, value.tolist()
    if isinstance(value, TensorDict):
        return name, value.batch_size, sorted((key, described(item)) for key, item in value.items())
    if isinstance(value, PackedSequence):
        return (name, *(described(part) for part in value))
    if isinstance(value, Mapping):
        extra = (value.default_factory,) if isinstance(value, collections.defaultdict) else ()
        return (name, *extra, [(described(key), described(item)) for key, item in value.items()], _attributes(value))
    if isinstance(value, (list, tuple, collections.deque)):
        return name, [described(item) for item in value], _attributes(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return name, [(f.name, described(getattr(value, f.name))) for f in dataclasses.fields(value)]
    if attrs.has(type(value)):
        return name, [(f.name, described(getattr(value, f.name))) for f in attrs.fields(type(value))]
    if type(value).__eq__ is object.__eq__ and not isinstance(value, type) and not callable(value):
        return name, _attributes(value)
    return name, repr(value)


def _attributes(value: Any) -> list[tuple[str, str]]:
    return sorted((key, repr(item)) for key, item in getattr(value, "__dict__", {}).items() if key != "data")


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = tensor.dtype, tuple(tensor.shape), tensor.layout, tensor.requires_grad
    if tensor.layout is not torch.strided or tensor.is_nested:
        dense = tensor.detach().to_dense() if not tensor.is_nested else torch.cat([t.view(-1) for t in tensor.unbind()])
        return *flags, tensor.is_sparse and tensor.is_coalesced(), _bytes(dense)
    if tensor.is_quantized:
        return *flags, tensor.q_scale(), tensor.q_zero_point(), _bytes(tensor.int_repr())
    plain = tensor.detach().as_subclass(torch.Tensor)
    stride = plain.resolve_conj().resolve_neg().to("meta").stride()
    return *flags, stride, getattr(tensor, "canvas", None), plain.is_conj(), plain.is_neg(), _bytes(plain)


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
