"""Transformers' Trainer gives the same on prefetched batches: losses bit for bit, metrics, predictions, resuming."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from prefetchpipe import PrefetchWarning
from prefetchpipe.integrations.accelerate import is_prepared
from prefetchpipe.integrations.transformers import PrefetchMixin, PrefetchTrainer
from tests.integrations import accelerate_loops

logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def own_state() -> Any:
    yield
    accelerate_loops.new_accelerator()


class Rows(Dataset):
    def __init__(self, rows: int = 38) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([float(index % 7), 1.0])
        return {"x": x, "labels": x.sum()[None]}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return (Rows()[index] for index in range(20))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def make_trainer(cls: type[Any], folder: Path, data: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    accelerate_loops.new_accelerator()
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "learning_rate": 1e-2,
        "seed": 3,
    }
    trainer = cls(
        model=Model(),
        args=TrainingArguments(**(defaults | options)),
        train_dataset=data if data is not None else Rows(),
        eval_dataset=Rows(21),
        compute_metrics=lambda got: {"sum": float(got.predictions.sum()), "rows": len(got.label_ids)},
    )
    trainer.log = lambda logs, *args, **kwargs: trainer.state.log_history.append(dict(logs))
    return trainer


def outcome(trainer: Any) -> Any:
    """What was logged, apart from times, and what was learnt."""
    logs = [
        {name: value for name, value in log.items() if "runtime" not in name and "per_second" not in name}
        for log in trainer.state.log_history
    ]
    weights = [parameter.tolist() for parameter in trainer.model.parameters()]
    return {"logs": logs, "weights": weights, "steps": trainer.state.global_step, "random": torch.rand(()).item()}


def prefetching(fetch: str, depth: int = 3) -> type[Any]:
    class Prefetching(PrefetchMixin, Trainer):
        prefetch_depth = depth
        prefetch_options: ClassVar = {"fetch": fetch}

    return Prefetching


SCENARIOS: dict[str, dict[str, Any]] = {
    "accumulation": {},
    "evaluation in between": {"eval_strategy": "steps", "eval_steps": 3},
    "max_steps": {"max_steps": 5},
    "no accumulation": {"gradient_accumulation_steps": 1},
    "grouped": {"dataloader_drop_last": True},
    "stream": {"data": Stream(), "max_steps": 5},
    "split batches": {"accelerator_config": {"split_batches": True, "use_seedable_sampler": False}},
}


def trained(cls: type[Any], folder: Path, **options: Any) -> Any:
    trainer = make_trainer(cls, folder, **options)
    trainer.train()
    return outcome(trainer)


@functools.cache
def without(scenario: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return trained(Trainer, Path(folder), **SCENARIOS[scenario])


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("fetch", ["auto", "thread"])
def test_training_is_the_same(tmp_path: Path, scenario: str, fetch: str) -> None:
    expected = without(scenario)
    assert trained(prefetching(fetch), tmp_path, **SCENARIOS[scenario]) == expected
    assert sum("loss" in log for log in expected["logs"]) >= 5


@pytest.mark.parametrize("depth", [1, 4])
def test_evaluate_and_predict(tmp_path: Path, depth: int) -> None:
    def run(cls: type[Any]) -> Any:
        trainer = make_trainer(cls, tmp_path)
        evaluated = trainer.evaluate()
        predicted = trainer.predict(Rows(13))
        metrics = [
            {k: v for k, v in one.items() if "_sum" in k or "rows" in k or "loss" in k}
            for one in (evaluated, predicted.metrics)
        ]
        return metrics, predicted.predictions.tolist(), predicted.label_ids.tolist()

    expected = run(Trainer)
    assert run(prefetching("thread", depth)) == expected
    assert expected[0][0]["eval_rows"] == 21


@pytest.mark.parametrize("fetch", ["auto", "thread"])
@pytest.mark.filterwarnings("ignore:.*weights_only")
def test_resumes_in_the_middle_of_an_epoch(tmp_path: Path, fetch: str) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1}

    def run(cls: type[Any], folder: Path) -> Any:
        first = make_trainer(cls, folder, **options)
        first.train()
        second = make_trainer(cls, folder, **options)
        second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return outcome(first), outcome(second)

    kinds: set[str] = set()

    class Prefetching(prefetching(fetch)):
        def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().get_batch_samples(epoch_iterator, *args, **kwargs)
            if epoch_iterator.gi_frame is not None:
                kinds.add(type(epoch_iterator.gi_frame.f_locals["self"].base_dataloader).__name__)
            return result

    plain = run(Trainer, tmp_path / "plain")
    assert run(Prefetching, tmp_path / "ours") == plain
    assert plain[0]["weights"] == plain[1]["weights"]
    assert kinds == {"StandIn"}  # also in the epoch in which training is resumed, whose loader is another one


@pytest.mark.slow
def test_workers_that_persist_serve_every_evaluation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 4}
    options |= {"eval_strategy": "steps", "eval_steps": 2}
    assert trained(prefetching("auto"), tmp_path, **options) == trained(Trainer, tmp_path, **options)


def test_the_one_line(tmp_path: Path) -> None:
    trainer = make_trainer(PrefetchTrainer, tmp_path)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader(), trainer.get_test_dataloader(Rows())):
        assert is_prepared(loader)
        assert len(list(loader)) == loader.stats().batches > 0


def test_the_wrong_order_of_bases() -> None:
    with pytest.raises(TypeError, match=r"write class Wrong\(PrefetchMixin, Trainer\)"):

        class Wrong(Trainer, PrefetchMixin):
            pass


def test_loaders_that_are_not_accelerates(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=4)

    class Mine(PrefetchMixin, Own):
        pass

    trainer = make_trainer(Mine, tmp_path)
    with pytest.warns(PrefetchWarning, match="a DataLoader for cpu are not prefetched"):
        loader = trainer.get_train_dataloader()
    assert type(loader) is torch.utils.data.DataLoader
    assert trainer.get_train_dataloader() is not None  # said once


def test_bad_options(tmp_path: Path) -> None:
    trainer = make_trainer(PrefetchTrainer, tmp_path)
    trainer.prefetch_depth = 0
    with pytest.raises(ValueError, match="depth must be at least 1, not 0"):
        trainer.get_train_dataloader()


@pytest.mark.slow
def test_two_processes(accelerate_ranks: list[Any]) -> None:
    for rank in accelerate_ranks:
        result = rank["transformers"]
        assert result["prefetched"] == result["plain"]
        assert sum("eval_loss" in log for log in result["plain"]["logs"]) >= 2
