"""Transformers: ``PrefetchTrainer`` in the place of ``Trainer``, or ``class MyTrainer(PrefetchMixin, Seq2SeqTrainer)``.

The loaders of a ``Trainer`` are Accelerate's, so they are prefetched as in
:mod:`prefetchpipe.integrations.accelerate`: in place, below Accelerate's own look-ahead and flags.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.integrations._standin import StandIn, is_served
from prefetchpipe.integrations._versions import require
from prefetchpipe.integrations.accelerate import device_of, is_prepared, prefetch_prepared

require("transformers")

from transformers import Trainer  # noqa: E402 - after the check of its version

__all__ = ["PrefetchMixin", "PrefetchTrainer"]


class PrefetchMixin:
    """Makes a ``Trainer`` train, evaluate and predict on batches that are prefetched to its device.

    Put it in front of the trainer: ``class MyTrainer(PrefetchMixin, Trainer)``.

    Attributes:
        prefetch_depth: Batches copied ahead, at least 1. Set it on the class or on the trainer.
        prefetch_options: Further options of :class:`prefetchpipe.GPUPrefetcher`, apart from ``device`` and ``static``.

    Raises:
        TypeError: At class creation: the mixin stands behind ``Trainer``, where it would do nothing.
        TypeError, ValueError: When a loader is made: an option is unknown or has a wrong type or value.
    """

    prefetch_depth: int = 2
    prefetch_options: Mapping[str, Any] = MappingProxyType({})
    _warned_of: ClassVar[set[str]] = set()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        mro = cls.__mro__
        if Trainer in mro and mro.index(Trainer) < mro.index(PrefetchMixin):
            raise TypeError(
                f"the bases of {cls.__name__} are in the wrong order, and the trainer's own loaders would be used: "
                f"write class {cls.__name__}(PrefetchMixin, Trainer)"
            )

    def get_train_dataloader(self) -> Any:
        """The trainer's own, prefetched."""
        return self._prefetched(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, prefetched."""
        return self._prefetched(super().get_eval_dataloader(*args, **kwargs))  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, prefetched."""
        return self._prefetched(super().get_test_dataloader(*args, **kwargs))  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own.

        In the epoch in which training is resumed, the trainer iterates over a loader that ``skip_first_batches`` has
        just made. Its iterator is a generator; as long as that has not begun, its loader can still be prefetched.
        """
        if inspect.isgenerator(epoch_iterator) and inspect.getgeneratorstate(epoch_iterator) == inspect.GEN_CREATED:
            loader = inspect.getgeneratorlocals(epoch_iterator).get("self")
            if is_prepared(loader):
                self._prefetched(loader)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)  # type: ignore[misc]

    def _prefetched(self, loader: Any) -> Any:
        if is_prepared(loader) and issubclass(type(loader.base_dataloader), StandIn):
            return loader  # kept by the trainer from an earlier evaluation, with its persistent workers
        device = device_of(loader) if is_prepared(loader) else None
        if device is None or not is_served(device):
            target = self.args.device  # type: ignore[attr-defined]
            self._warn(
                f"batches of a {type(loader).__name__} for {target} are not prefetched: the trainer's loaders have to "
                "come from accelerator.prepare, and its device has to be a CPU or a CUDA GPU"
            )
            return loader
        return prefetch_prepared(loader, depth=self.prefetch_depth, **self.prefetch_options)

    def _warn(self, text: str) -> None:
        if text not in self._warned_of:
            self._warned_of.add(text)
            warnings.warn(text, PrefetchWarning, stacklevel=4)


class PrefetchTrainer(PrefetchMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with :class:`PrefetchMixin`.

    Example:
        >>> trainer = PrefetchTrainer(model, args, train_dataset=data)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
