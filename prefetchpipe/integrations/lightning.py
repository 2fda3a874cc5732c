"""Lightning: ``Trainer(callbacks=[GPUPrefetch(depth=2)])``. For Fabric see :mod:`prefetchpipe.integrations.fabric`.

Loaders are wrapped in ``Strategy.process_dataloader``, the hook in which a strategy may wrap them: Lightning has
injected its samplers by then, and everything that it does later (limits, epochs, state, transfer hooks) it does to the
wrapped loader. The hook is set on the trainer's own strategy object and taken back when Lightning tears that down.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from prefetchpipe.integrations._standin import StandIn, is_served, make_options, warn_of_world_size
from prefetchpipe.integrations._versions import require
from prefetchpipe.prefetcher import GPUPrefetcher
from prefetchpipe.stats import Stats

require("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402 - after the check of its version
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # noqa: E402

__all__ = ["GPUPrefetch"]

TransferHooks = Literal["host", "device"]

_HOST_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


class GPUPrefetch(Callback):  # type: ignore[misc]
    """Prefetches the batches of all train, validation, test and predict loaders to the trainer's device.

    The trainer gives what it gives without: batches, order, hooks (each once per batch, in the trainer's thread),
    metrics, checkpoints.

    Args:
        depth: Batches copied ahead of the one in use, at least 1.
        transfer_hooks: What a model (or data module) gets that overrides ``on_before_batch_transfer`` or
            ``transfer_batch_to_device``, if the device is a GPU. With ``"host"`` they get the batch on the host, as
            Lightning promises; its loaders are then left alone, since copying ahead is not possible. With ``"device"``
            they get batches that are on the device already. ``on_after_batch_transfer`` needs no such choice.
        **options: As of :class:`prefetchpipe.GPUPrefetcher`, apart from ``device`` and ``static``.

    Raises:
        TypeError: An option is unknown or has a wrong type.
        ValueError: An option has a value that is not allowed.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", callbacks=[GPUPrefetch(depth=2)], logger=False)
    """

    def __init__(self, depth: int = 2, *, transfer_hooks: TransferHooks = "host", **options: Any) -> None:
        super().__init__()
        if transfer_hooks not in get_args(TransferHooks):
            raise ValueError(f"transfer_hooks must be 'host' or 'device', not {transfer_hooks!r}")
        self._options = make_options(depth, options)
        self._transfer_hooks = transfer_hooks
        self._wrapped: list[weakref.ref[Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_wrapped": []}

    def stats(self) -> list[Stats]:
        """One entry for each loader of the trainer, in the order in which Lightning set them up."""
        return [loader.stats() for reference in self._wrapped if (loader := reference()) is not None]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning's hook, before loaders are set up: see the module's docstring."""
        del pl_module, stage
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"trainer must be a lightning.pytorch.Trainer, not a {type(trainer).__module__}.Trainer: write "
                "'import lightning.pytorch as pl' (the lightning package) throughout"
            )
        if sum(isinstance(callback, GPUPrefetch) for callback in trainer.callbacks) > 1:
            raise ValueError(
                "callbacks must hold one GPUPrefetch, and hold several; one wraps the loaders of every stage"
            )
        strategy = trainer.strategy
        for name in ("process_dataloader", "teardown"):
            if not callable(getattr(strategy, name, None)):
                raise TypeError(
                    f"strategy must have a method {name}, and {type(strategy).__name__} has none: iterate over "
                    "GPUPrefetcher(loader) in a loop of your own instead"
                )
        self._wrapped = []
        if not is_served(strategy.root_device):
            rank_zero_warn(
                f"GPUPrefetch serves accelerator='gpu' (CUDA) and 'cpu', not {strategy.root_device}: loaders stay as "
                "they are"
            )
            return
        _Hooks(self, trainer)

    def wrap(self, trainer: Trainer, loader: Any) -> Any:
        """The loader to use in the place of ``loader``, which Lightning is done with."""
        if issubclass(type(loader), StandIn):  # in a CombinedLoader that an interrupted run has left
            loader = loader.wrapped
        if issubclass(type(loader), GPUPrefetcher):
            _refuse_unsharded(trainer, loader)
            return loader
        device = trainer.strategy.root_device
        if device.type != "cpu" and self._transfer_hooks == "host" and (owner := _owner_of_host_hooks(trainer)):
            rank_zero_info(
                f"GPUPrefetch leaves the loaders as they are: {owner} has to see a batch on the host. Do that work in "
                "the data set or in on_after_batch_transfer; or, if it may see a batch on the device, write "
                "GPUPrefetch(transfer_hooks='device')"
            )
            return loader
        warn_of_world_size(loader, (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
        if trainer.reload_dataloaders_every_n_epochs and getattr(loader, "persistent_workers", False):
            for reference in self._wrapped:  # the same loader again: its workers go on, as without us
                known = reference()
                if known is not None and known.wrapped is loader and not known.is_retired:
                    return known
        # Lightning holds a batch back where a loader, or one that it is combined with, has no length.
        stand_in = StandIn(loader, device, self._options, hands_out_late=True)
        self._wrapped.append(weakref.ref(stand_in))
        return stand_in


class _Hooks:
    """Two methods of one strategy object replaced, until that is torn down."""

    def __init__(self, callback: GPUPrefetch, trainer: Trainer) -> None:
        self._callback = callback
        self._trainer = trainer
        strategy = trainer.strategy
        self._process_dataloader = strategy.process_dataloader
        self._teardown = strategy.teardown
        self._before = {
            name: vars(strategy)[name] for name in ("process_dataloader", "teardown") if name in vars(strategy)
        }
        strategy.process_dataloader = self.process_dataloader
        strategy.teardown = self.teardown

    def process_dataloader(self, loader: object) -> Any:
        """The strategy's own, and then ours."""
        return self._callback.wrap(self._trainer, self._process_dataloader(loader))

    def teardown(self) -> Any:
        """Called at the end of every run, after an error too, when all checkpoints are written."""
        strategy = self._trainer.strategy
        for name in ("process_dataloader", "teardown"):
            with suppress(AttributeError):
                delattr(strategy, name)
        vars(strategy).update(self._before)
        try:
            _retire_all(self._trainer)
        finally:
            self._teardown()


def _retire_all(trainer: Trainer) -> None:
    """End all passes. The trainer keeps the retired loaders, for their states; a user's ``CombinedLoader`` does not."""
    for loop in _loops_of(trainer):
        combined = loop._combined_loader  # noqa: SLF001 - what trainer.train_dataloader and the like read
        if combined is None or not any(issubclass(type(loader), StandIn) for loader in combined.flattened):
            continue
        kept = copy.copy(combined)
        kept._iterator = None  # noqa: SLF001 - the original goes on with it
        kept.flattened = combined.flattened
        combined.flattened = [
            loader.wrapped if issubclass(type(loader), StandIn) else loader for loader in combined.flattened
        ]
        loop._combined_loader = kept  # noqa: SLF001
        for loader in kept.flattened:
            if issubclass(type(loader), StandIn):
                loader.retire(keep_state=not _is_reset_by_teardown(loader.wrapped))


def _loops_of(trainer: Trainer) -> Iterator[Any]:
    yield trainer.fit_loop
    yield trainer.fit_loop.epoch_loop.val_loop
    yield trainer.validate_loop
    yield trainer.test_loop
    yield trainer.predict_loop


def _is_reset_by_teardown(loader: Any) -> bool:
    """Whether Lightning's teardown, which drops ``loader._iterator``, drops the loader's state with it."""
    return any(cls.__module__.startswith("torchdata.stateful_dataloader") for cls in type(loader).__mro__)


def _owner_of_host_hooks(trainer: Trainer) -> str:
    """The overridden hook that Lightning calls with a batch on the host, or an empty string."""
    for instance in (trainer.lightning_module, trainer.datamodule):
        for hook in _HOST_HOOKS:
            if instance is not None and is_overridden(hook, instance):
                return f"{type(instance).__name__}.{hook}"
    return ""


def _refuse_unsharded(trainer: Trainer, prefetcher: GPUPrefetcher) -> None:
    """Lightning gives each process its share of a ``DataLoader``, but does not look inside a prefetcher."""
    loader = prefetcher._shared.loader  # noqa: SLF001 - as Lightning would have got it
    if (
        trainer.world_size > 1
        and isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader.sampler, DistributedSampler)
    ):
        raise ValueError(
            f"the loader is a GPUPrefetcher around a DataLoader, so each of the {trainer.world_size} processes would "
            "get all of the data: pass the DataLoader itself, and GPUPrefetch wraps it after Lightning has injected "
            "its sampler"
        )
