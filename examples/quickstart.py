"""Train a small classifier on scikit-learn's digits; the batches arrive on the GPU (or, without one, on the CPU)."""

from __future__ import annotations

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from tqdm import tqdm

from prefetchpipe import GPUPrefetcher

EPOCHS = 20


def normalize(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = batch
    return images.float() / 16, labels  # runs on the device: bytes travel, not floats


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.uint8).unsqueeze(1)  # 1797 x 1 x 8 x 8, values 0..16
    train_set, test_set = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

    shuffle = torch.Generator().manual_seed(0)
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True, generator=shuffle)
    train = GPUPrefetcher(train_loader, device, transform=normalize)
    test = GPUPrefetcher(DataLoader(test_set, batch_size=256), device, transform=normalize)

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    start = time.perf_counter()
    for _ in (progress := tqdm(range(EPOCHS), desc="training", unit="epoch")):
        epoch_loss = torch.zeros((), device=device)
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch_loss += loss.detach()
        progress.set_postfix(loss=f"{epoch_loss.item() / len(train):.3f}")  # the one wait for the GPU in an epoch
    seconds = time.perf_counter() - start

    with torch.inference_mode():
        correct = sum((model(x).argmax(1) == y).sum() for x, y in test)

    print(f"device          {device}")
    print(f"test accuracy   {int(correct) / len(test_set):.3f}")
    print(f"training speed  {EPOCHS * len(train_set) / seconds:,.0f} samples/s")
    print(f"\n{train.stats()}")


if __name__ == "__main__":
    main()
