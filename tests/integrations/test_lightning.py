"""Lightning gives the same with GPUPrefetch as without: losses, hooks, metrics, weights, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import pickle
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler

from prefetchpipe import GPUPrefetcher, PrefetchWarning
from prefetchpipe.integrations.lightning import GPUPrefetch
from tests.integrations.lightning_models import Counting, HookRecorder, Recorder, Rows, Unsized, data, loader
from tests.integrations.support import lightning_warnings, quiet_framework

pytestmark = [pytest.mark.filterwarnings(text) for text in lightning_warnings]
quiet_framework("lightning.pytorch", "lightning.fabric")

DEPTHS = pytest.mark.parametrize("depth", [1, 4])


def make_trainer(folder: Path, *callbacks: Any, **options: Any) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | options))


def fit(folder: Path, train: Any, val: Any = None, *callbacks: Any, model: Any = Recorder, **options: Any) -> Any:
    """Everything that can be seen of one training."""
    torch.manual_seed(1)
    module = model()
    trainer = make_trainer(folder, *callbacks, **options)
    trainer.fit(module, train, val)
    return {**module.outcome(), "steps": trainer.global_step, "random": torch.rand(()).item()}


SCENARIOS: dict[str, Any] = {
    "plain": lambda: ((loader(shuffle=True), loader(10)), {}),
    "limits": lambda: ((loader(shuffle=True), loader(20)), {"limit_train_batches": 3, "limit_val_batches": 0.5}),
    "overfit": lambda: ((loader(shuffle=True), loader(10, shuffle=True)), {"overfit_batches": 2}),
    "max_steps": lambda: ((loader(shuffle=True),), {"max_steps": 11, "max_epochs": -1}),
    "accumulate": lambda: (
        (loader(shuffle=True), loader(10)),
        {"accumulate_grad_batches": 3, "val_check_interval": 2},
    ),
    "early stopping": lambda: (
        (loader(shuffle=True), loader(10), EarlyStopping("val_loss", patience=1, min_delta=1e3)),
        {"max_epochs": 9},
    ),
    "several val loaders": lambda: ((loader(), [loader(10), loader(7, 100)]), {}),
    "dict of loaders": lambda: (({"a": loader(shuffle=True), "b": loader(7, 50, shuffle=True)},), {}),
    "combined": lambda: (
        (
            CombinedLoader({"a": loader(), "b": loader(7, 50)}, "min_size"),
            CombinedLoader({"a": loader(), "b": loader(7, 50)}, "max_size"),
        ),
        {},
    ),
    "unsized": lambda: ((Unsized(), Unsized(3)), {}),
    "empty": lambda: ((loader(0),), {}),
    "own generator": lambda: (
        (loader(shuffle=True, generator=torch.Generator().manual_seed(5)),),
        {"limit_train_batches": 3, "max_epochs": 3},
    ),
    "double precision": lambda: ((loader(), loader(5)), {"precision": "64-true"}),
    "no sanity check": lambda: ((loader(), loader(10)), {"num_sanity_val_steps": 0}),
}


@functools.cache
def without(scenario: str) -> Any:
    arguments, options = SCENARIOS[scenario]()
    return fit(Path("unused"), *arguments, **options)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("fetch", ["auto", "thread"])
def test_training_is_the_same(tmp_path: Path, scenario: str, fetch: str) -> None:
    expected = without(scenario)
    arguments, options = SCENARIOS[scenario]()
    prefetch = GPUPrefetch(depth=3, fetch=fetch)
    train, val, *callbacks = (*arguments, None)[: max(2, len(arguments))]
    assert fit(tmp_path, train, val, *callbacks, prefetch, **options) == expected
    if scenario != "empty":
        trained = sum(stage == "train" for stage, *_ in expected["seen"])
        assert trained > 0
        assert sum(stats.batches for stats in prefetch.stats()) >= trained


@pytest.mark.parametrize("model", [HookRecorder])
@DEPTHS
def test_transfer_hooks_run_once_each(tmp_path: Path, depth: int, model: Any) -> None:
    options = {"limit_train_batches": 4, "model": model}
    expected = fit(tmp_path, loader(shuffle=True), [loader(9), loader(5)], **options)
    prefetch = GPUPrefetch(depth)
    assert fit(tmp_path, loader(shuffle=True), [loader(9), loader(5)], prefetch, **options) == expected
    validated = sum(stage in ("val", "sanity") for stage, *_ in expected["seen"])
    hooks = expected["hooks"]
    assert hooks["before 0 cpu"] == hooks["transfer 0 cpu"] == hooks["after 0"]
    assert hooks["after 0"] + hooks["after 1"] == 8 + validated


@DEPTHS
def test_validate_test_and_predict(tmp_path: Path, depth: int) -> None:
    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.written: list[Any] = []

        def write_on_batch_end(self, trainer: Any, module: Any, *results: Any) -> None:
            prediction, indices, _, batch_idx, dataloader_idx = results
            self.written.append((batch_idx, dataloader_idx, list(indices), prediction.tolist()))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            self.written.append(indices)

    def run(*callbacks: Any) -> Any:
        torch.manual_seed(2)
        module, writer = Recorder(), Writer()
        trainer = make_trainer(tmp_path, writer, *callbacks, limit_test_batches=3)
        validated = trainer.validate(module, [loader(9), loader(4, 40)], verbose=False)
        tested = trainer.test(module, loader(), verbose=False)
        predicted = trainer.predict(module, [loader(7), loader(8, 10)])
        return validated, tested, [[p.tolist() for p in one] for one in predicted], writer.written, module.seen

    assert run(GPUPrefetch(depth)) == run()


@pytest.mark.slow
def test_workers_persist_over_epochs_and_end_with_the_run(tmp_path: Path) -> None:
    options = {"num_workers": 1, "persistent_workers": True, "shuffle": True}
    expected = fit(tmp_path, loader(**options), None, limit_train_batches=4)
    assert fit(tmp_path, loader(**options), None, GPUPrefetch(depth=3), limit_train_batches=4) == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"reload_dataloaders_every_n_epochs": 1}, {"limit_train_batches": 3}], ids=str)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_and_a_generator_of_ones_own(tmp_path: Path, options: Any, persistent: bool) -> None:
    """A pass begins while the one before is held, and a loader that is set up again has its workers already."""

    def make() -> Any:
        generator = torch.Generator().manual_seed(5)
        return loader(shuffle=True, generator=generator, num_workers=1, persistent_workers=persistent)

    expected = fit(tmp_path, make(), None, max_epochs=3, **options)
    assert fit(tmp_path, make(), None, GPUPrefetch(depth=4), max_epochs=3, **options) == expected


def test_loaders_of_the_module_are_made_anew_every_epoch(tmp_path: Path) -> None:
    class Reloading(Recorder):
        def train_dataloader(self) -> Any:
            return loader(9, 10 * self.current_epoch, shuffle=True)

        def val_dataloader(self) -> Any:
            return loader(5, 10 * self.current_epoch)

    options = {"model": Reloading, "reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
    assert fit(tmp_path, None, None, GPUPrefetch(), **options) == fit(tmp_path, None, None, **options)


def test_a_data_module(tmp_path: Path) -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(shuffle=True)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [leaf + torch.rand(()) for leaf in batch]

    def run(*callbacks: Any) -> Any:
        torch.manual_seed(3)
        module = Recorder()
        make_trainer(tmp_path, *callbacks).fit(module, datamodule=Data())
        return module.outcome()

    assert run(GPUPrefetch(depth=3)) == run()


# Checkpoints


def test_the_step_gets_what_lightning_gives(tmp_path: Path) -> None:
    class Looking(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append({key: (type(value), value) for key, value in batch.items() if key != "x"})
            return self.loss([batch["x"]])

        def outcome(self) -> Any:
            return {"seen": repr(self.seen)}

    def make() -> DataLoader:
        return DataLoader(
            Rows(),
            batch_size=2,
            collate_fn=lambda rows: {"x": torch.stack(rows), "box": np.arange(3.0), "names": ("a", "b"), "none": None},
        )

    assert fit(tmp_path, make(), None, GPUPrefetch(fetch="thread"), model=Looking) == fit(
        tmp_path, make(), model=Looking
    )


def _stateful(**options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data(), batch_size=3, shuffle=True, **options)


def _stateful_with_workers() -> Any:
    return _stateful(num_workers=2)


class StopAfter(pl.Callback):
    """Saves a checkpoint in the middle of an epoch, and interrupts the run."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise RuntimeError("interrupted")


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [_stateful, _stateful_with_workers, Counting, lambda: loader(shuffle=True)],
    ids=["torchdata", "workers", "own", "none"],
)
@pytest.mark.parametrize("fetch", ["auto", "thread"])
def test_resumes_in_the_middle_of_an_epoch(tmp_path: Path, make: Any, fetch: str) -> None:
    def run(name: str, *callbacks: Any) -> Any:
        path = tmp_path / f"{name}.ckpt"
        torch.manual_seed(4)
        first = Recorder()
        with pytest.raises(RuntimeError, match="interrupted"):
            make_trainer(tmp_path, StopAfter(4, path), *callbacks).fit(first, make())
        torch.manual_seed(5)
        second = Recorder()
        make_trainer(tmp_path, *callbacks).fit(second, make(), ckpt_path=path)
        saved = torch.load(path, weights_only=False)["loops"]["fit_loop"].get("state_dict", {})
        return first.seen, second.outcome(), repr(saved.get("combined_loader"))

    expected = run("plain")
    assert run("prefetched", GPUPrefetch(depth=3, fetch=fetch)) == expected
    assert len(expected[0]) == 4


@pytest.mark.parametrize("make", [_stateful, Counting], ids=["torchdata", "own"])
def test_a_checkpoint_saved_after_the_run_says_where_it_stopped(tmp_path: Path, make: Any) -> None:
    def run(name: str, *callbacks: Any) -> Any:
        torch.manual_seed(4)
        trainer = make_trainer(tmp_path, *callbacks, max_steps=2, max_epochs=-1)
        trainer.fit(Recorder(), make())
        trainer.save_checkpoint(tmp_path / name)
        loops = torch.load(tmp_path / name, weights_only=False)["loops"]["fit_loop"]
        return loops["state_dict"]["combined_loader"]

    def without_seed(states: Any) -> Any:
        return [{key: value for key, value in state.items() if "sampler" not in key} for state in states]

    assert without_seed(run("b", GPUPrefetch(depth=3, fetch="thread"))) == without_seed(run("a"))


def test_a_checkpoint_saved_for_an_error_says_where_it_happened(tmp_path: Path) -> None:
    class Failing(Recorder):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise RuntimeError("failed")

    class Saving(pl.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            self.states = trainer.fit_loop._combined_loader._state_dicts()

    saving = Saving()
    with pytest.raises(RuntimeError, match="failed"):
        fit(tmp_path, Counting(), None, GPUPrefetch(depth=3, fetch="thread"), saving, model=Failing)
    assert saving.states == [{"position": 3}]


# Leaving


def test_afterwards_everything_is_as_before(tmp_path: Path) -> None:
    combined = CombinedLoader({"a": loader(), "b": loader(7)})
    own = combined.flattened
    prefetch = GPUPrefetch(fetch="thread")
    trainer = make_trainer(tmp_path, prefetch, num_sanity_val_steps=0)
    trainer.fit(Recorder(), combined)
    assert combined.flattened == own
    assert not {"process_dataloader", "teardown"} & set(vars(trainer.strategy))
    after = trainer.train_dataloader["a"]
    assert isinstance(after, DataLoader)
    batches = list(after)
    assert [batch[0].tolist() for batch in batches] == [batch[0].tolist() for batch in loader()]
    assert [stats.batches for stats in prefetch.stats()] == [6, 6]
    trainer.fit_loop.max_epochs = 4
    trainer.fit(Recorder(), combined)
    assert [stats.batches for stats in prefetch.stats()] == [6, 6]
    pickle.loads(pickle.dumps(prefetch))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_a_step_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    class Failing(Recorder):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if not self.trainer.sanity_checking and batch_idx == 1:
                raise error("failed")

    trainer = make_trainer(tmp_path, GPUPrefetch(depth=3, fetch="thread"))
    train, val = loader(num_workers=0), loader(12)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError if error is RuntimeError else SystemExit):
        trainer.fit(Failing(), train, val)
    signal.signal(signal.SIGINT, before)
    assert not {"process_dataloader", "teardown"} & set(vars(trainer.strategy))
    assert len(list(train)) == 8


# Bad input


def test_a_prefetcher_instead_of_a_loader_is_taken_in_one_process(tmp_path: Path) -> None:
    expected = fit(tmp_path, GPUPrefetcher(loader(), "cpu"))
    assert fit(tmp_path, GPUPrefetcher(loader(), "cpu"), None, GPUPrefetch()) == expected


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="depth must be at least 1, not 0"):
        GPUPrefetch(0)
    with pytest.raises(ValueError, match="static must be False here"):
        GPUPrefetch(static=True)
    with pytest.raises(TypeError, match="there is no option 'dept'; options are depth, transform"):
        GPUPrefetch(dept=3)
    with pytest.raises(ValueError, match="transfer_hooks must be 'host' or 'device', not 'gpu'"):
        GPUPrefetch(transfer_hooks="gpu")


def test_two_of_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="callbacks must hold one GPUPrefetch"):
        fit(tmp_path, loader(), None, GPUPrefetch(), GPUPrefetch())


def test_a_trainer_of_another_package() -> None:
    class Trainer:
        __module__ = "pytorch_lightning"

    with pytest.raises(TypeError, match=r"not a pytorch_lightning.Trainer: write 'import lightning.pytorch as pl'"):
        GPUPrefetch().setup(Trainer(), None, "fit")


def test_a_strategy_without_the_hook(tmp_path: Path) -> None:
    class Strategy(pl.strategies.SingleDeviceStrategy):
        process_dataloader = None

    trainer = make_trainer(tmp_path, strategy=Strategy(device=torch.device("cpu")))
    with pytest.raises(TypeError, match="strategy must have a method process_dataloader, and Strategy has none"):
        GPUPrefetch().setup(trainer, None, "fit")


def test_a_device_that_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("meta"))
    with pytest.warns(UserWarning, match="not meta: loaders stay as they are"):
        GPUPrefetch().setup(trainer, None, "fit")
    assert "process_dataloader" not in vars(trainer.strategy)


def test_a_sampler_for_another_number_of_processes(tmp_path: Path) -> None:
    sampler = DistributedSampler(data(), num_replicas=2, rank=0)
    with pytest.warns(PrefetchWarning, match=r"num_replicas=2, but its batches go to 1 process"):
        fit(tmp_path, DataLoader(data(), batch_size=3, sampler=sampler), None, GPUPrefetch())


def test_hooks_that_need_the_host_keep_their_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    trainer.strategy._lightning_module = HookRecorder()
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda:0"))
    said: list[str] = []
    monkeypatch.setattr("prefetchpipe.integrations.lightning.rank_zero_info", said.append)
    plain = loader()
    assert GPUPrefetch().wrap(trainer, plain) is plain
    assert "HookRecorder.on_before_batch_transfer has to see a batch on the host" in said[0]
    with contextlib.suppress(ValueError):  # there is no GPU here
        assert GPUPrefetch(transfer_hooks="device").wrap(trainer, plain) is not plain


@pytest.mark.slow
def test_two_processes(lightning_ranks: list[Any]) -> None:
    results = [rank["trainer"] for rank in lightning_ranks]
    for result in results:
        assert result["prefetched"] == result["plain"]
        assert "pass the DataLoader itself" in result["wrong order"]
    losses = [[one[3] for one in result["plain"]["seen"] if one[0] == "train"] for result in results]
    assert len(losses[0]) == len(losses[1]) == 3 * 4
    assert losses[0] != losses[1]
