"""Predictions for a whole data set into a NumPy memory-map; copies run in both directions beside the model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from prefetchpipe import GPUPrefetcher, HostPrefetcher


def train(model: nn.Module, loader: GPUPrefetcher) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()


def predictions(model: nn.Module, loader: GPUPrefetcher) -> Iterator[torch.Tensor]:
    for images, _ in loader:
        yield model(images).softmax(1)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    train(model, GPUPrefetcher(DataLoader(data, batch_size=128), device))

    loader = GPUPrefetcher(DataLoader(data, batch_size=256), device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions.npy"
        out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(len(data), 10))
        with torch.inference_mode(), HostPrefetcher(predictions(model, loader), device=device, borrow=True) as results:
            start = 0
            for scores in results:  # a view of the pinned slot, valid until the next one: written out at once
                out[start : start + len(scores)] = scores.numpy()
                start += len(scores)
        out.flush()
        written = np.load(path, mmap_mode="r")
        accuracy = float((written.argmax(1) == digits.target).mean())
        print(f"device      {device}")
        print(f"written     {written.shape}, rows sum to {written.sum(1).min():.4f} .. {written.sum(1).max():.4f}")
        print(f"accuracy    {accuracy:.3f} on the data it was trained on")
        print(f"back        {results.stats()}")


if __name__ == "__main__":
    main()
