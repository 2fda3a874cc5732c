"""A Lightning model that writes down everything that happens to it, and loaders for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Recorder(pl.LightningModule):
    """Trains a layer with dropout, so that the order of random draws shows in the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 1))
        self.seen: list[Any] = []
        self.hooks: Counter[str] = Counter()

    def loss(self, batch: Any) -> torch.Tensor:
        while isinstance(batch, dict):
            batch = [torch.cat([values[0] for values in batch.values() if values is not None])]
        x = batch[0]
        return (self.layer(x).squeeze(-1) - x.sum(-1)).square().mean()

    def note(self, stage: str, batch_idx: int, dataloader_idx: int, loss: torch.Tensor) -> None:
        self.seen.append((stage, batch_idx, dataloader_idx, loss.item(), self.global_step, self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.note("train", batch_idx, 0, loss)
        self.log("train_loss", loss)
        self.log("train_epoch", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.note("sanity" if self.trainer.sanity_checking else "val", batch_idx, dataloader_idx, loss)
        self.log("val_loss", loss)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.note("test", batch_idx, dataloader_idx, loss)
        self.log("test_loss", loss)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        self.note("predict", batch_idx, dataloader_idx, self.loss(batch))
        return self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_end(self) -> None:
        self.hooks["on_train_epoch_end"] += 1

    def on_validation_epoch_end(self) -> None:
        self.hooks["on_validation_epoch_end"] += 1

    def outcome(self) -> dict[str, Any]:
        metrics = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        weights = [parameter.tolist() for parameter in self.parameters()]
        return {"seen": self.seen, "hooks": dict(self.hooks), "metrics": metrics, "weights": weights}


class HookRecorder(Recorder):
    """Overrides the three transfer hooks."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.hooks[f"before {dataloader_idx} {batch[0].device.type}"] += 1
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.hooks[f"transfer {dataloader_idx} {batch[0].device.type}"] += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.hooks[f"after {dataloader_idx}"] += 1
        return [leaf * 2 + torch.rand(()) for leaf in super().on_after_batch_transfer(batch, dataloader_idx)]


def data(rows: int = 22, start: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(start, start + rows * 4).reshape(rows, 4) / 100)


def loader(rows: int = 22, start: int = 0, *, batch_size: int = 3, **options: Any) -> DataLoader:
    return DataLoader(data(rows, start), batch_size=batch_size, **options)


class Rows(Dataset):
    """Batches with things that frameworks leave as they are."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index))


class Unsized:
    """An iterable without a length."""

    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield [torch.full((2, 4), float(index))]


class Counting:
    """A stateful loader of the user's own: goes on where the state says."""

    def __init__(self, count: int = 6) -> None:
        self.count = count
        self.position = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        if self.position >= self.count:
            self.position = 0
        while self.position < self.count:
            self.position += 1
            yield [torch.full((2, 4), float(self.position))]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
