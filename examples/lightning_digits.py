"""Lightning, with one line more: the callback. Trains on scikit-learn's digits."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from prefetchpipe.integrations.lightning import GPUPrefetch


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.layers(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, val_set = random_split(dataset, [0.8, 0.2])

    prefetch = GPUPrefetch(depth=2)
    trainer = pl.Trainer(max_epochs=5, devices=1, callbacks=[prefetch], logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), DataLoader(train_set, batch_size=64, shuffle=True), DataLoader(val_set, batch_size=256))

    print(f"accuracy  {trainer.callback_metrics['accuracy'].item():.3f}")
    print(prefetch.stats()[-1])


if __name__ == "__main__":
    main()
