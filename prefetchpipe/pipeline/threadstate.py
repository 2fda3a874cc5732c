"""Thread-local modes of the consumer, carried to where the loader and the transform run (contract 17)."""

from __future__ import annotations

import contextvars
import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

__all__ = ["ThreadState", "limit_packing_threads"]

T = TypeVar("T")

_AUTOCAST_DEVICES = ("cpu", "cuda")


class ThreadState:
    """A snapshot of the calling thread: grad, inference, autocast, default device, context variables."""

    __slots__ = ("_autocast", "_cache", "_context", "_function_modes", "_grad", "_inference")

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = _autocast()
        self._cache = torch.is_autocast_cache_enabled()
        # The default device is a function mode; they cost at every torch call, so our own calls run without them.
        self._function_modes = _get_current_function_mode_stack()
        self._context = contextvars.copy_context()

    def run(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the calling thread, which is ours, under the captured modes."""
        with self._entered():
            self._context.run(function)

    def call(self, function: Callable[[Any], T], argument: Any) -> T:
        """Call ``function`` in a thread of the user's, under the captured modes where they differ from its own."""
        if self._is_current():
            return self._context.run(function, argument)
        with self._entered(), self.user_code():
            return self._context.run(function, argument)

    def _is_current(self) -> bool:
        return (
            torch.is_grad_enabled() == self._grad
            and torch.is_inference_mode_enabled() == self._inference
            and _len_torch_function_stack() == len(self._function_modes)
            and _autocast() == self._autocast
        )

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            current = dict(_autocast())
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=self._cache))
                current.pop(device, None)
            for device in current:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def user_code(self) -> AbstractContextManager[None]:
        """Around each call of the user's: the function modes, unless the thread has them already."""
        if self._function_modes and _len_torch_function_stack() == 0:
            return _Pushed(self._function_modes)
        return nullcontext()


def _autocast() -> list[tuple[str, torch.dtype]]:
    return [
        (device, torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)
    ]


class _Pushed:
    """Function modes pushed as they are: entering them anew would change process-wide state (contract 13)."""

    __slots__ = ("_modes",)

    def __init__(self, modes: list[object]) -> None:
        self._modes = modes

    def __enter__(self) -> None:
        for mode in self._modes:
            _push_mode(mode)

    def __exit__(self, *_: object) -> None:
        for _mode in self._modes:
            _pop_mode()


def limit_packing_threads(count: int) -> None:
    """Let torch use ``count`` threads for operations of the calling thread, and of no other.

    ``torch.set_num_threads`` would be process-wide. OpenMP keeps the number per thread (OpenMP 5.2, 2.4: the
    nthreads-var internal control variable), and torch asks OpenMP.
    """
    torch.get_num_threads()  # torch initialises a thread's number at first use, and would overwrite ours later
    with suppress(OSError, AttributeError):  # a torch without OpenMP, or a platform that hides it: torch's number then
        ctypes.CDLL(None).omp_set_num_threads(ctypes.c_int(count))
