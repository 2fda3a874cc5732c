"""Types whose objects are handed on as they are: they hold no tensor and do not change."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import pathlib
import types
import uuid

import numpy as np
import torch

__all__ = ["CONSTANTS", "NUMPY_SCALARS", "SCALARS"]

NUMPY_SCALARS = frozenset(t for t in np.sctypeDict.values() if not issubclass(t, (np.void, np.object_)))
SCALARS = frozenset((bool, int, float, complex, str, bytes, type(None))) | NUMPY_SCALARS
CONSTANTS = SCALARS | frozenset(
    (
        *(type(Ellipsis), range, slice, type, torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PosixPath, pathlib.WindowsPath),
        *(dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone),
        *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType),
    )
)
