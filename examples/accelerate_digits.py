"""Accelerate, with one line more: prepare. Trains on scikit-learn's digits; also under `accelerate launch`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from prefetchpipe.integrations.accelerate import prepare


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, test_set = random_split(dataset, [0.8, 0.2])

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    train = prepare(accelerator, DataLoader(train_set, batch_size=32, shuffle=True), depth=2)
    test = prepare(accelerator, DataLoader(test_set, batch_size=128), depth=2)

    for _ in range(5):
        for images, labels in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    correct = total = 0
    with torch.inference_mode():
        for images, labels in test:
            guesses, truth = accelerator.gather_for_metrics((model(images).argmax(1), labels))
            correct += int((guesses == truth).sum())
            total += len(truth)

    accelerator.print(f"accuracy  {correct / total:.3f} of {total}")
    accelerator.print(train.stats())


if __name__ == "__main__":
    main()
