"""From a loop that waits for its loader to one that does not, change by change, as the verdicts say.

The data set decodes each picture when it is asked for: run-length coded digits, made 64 x 64. See docs/loader-bound.md.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from prefetchpipe import GPUPrefetcher

SIZE = 64


def encode(picture: np.ndarray[Any, Any]) -> bytes:
    """Pairs of a run's length and its value."""
    large = np.kron(picture, np.ones((SIZE // 8, SIZE // 8))).astype(np.uint8)
    return bytes(part for value, run in itertools.groupby(large.ravel().tolist()) for part in (len(list(run)), value))


def decode_in_python(coded: bytes) -> torch.Tensor:
    """One pixel at a time, as it should not be."""
    pixels = [(coded[i + 1] / 16 - 0.3) / 0.38 for i in range(0, len(coded), 2) for _ in range(coded[i])]
    return torch.tensor(pixels).view(1, SIZE, SIZE)


def decode_in_numpy(coded: bytes) -> torch.Tensor:
    runs = np.frombuffer(coded, np.uint8)
    pixels = np.repeat(runs[1::2], runs[::2])
    return torch.from_numpy(((pixels / 16 - 0.3) / 0.38).astype(np.float32)).view(1, SIZE, SIZE)


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Pictures that are decoded when they are asked for."""

    def __init__(self, samples: int, decode: Any) -> None:
        digits = load_digits()
        self.coded = [encode(picture) for picture in digits.images[:samples]]
        self.labels = [int(label) for label in digits.target[:samples]]
        self.decode = decode

    def __len__(self) -> int:
        return len(self.coded)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.decode(self.coded[index]), self.labels[index]


def train(name: str, decode: Any, samples: int, epochs: int, **options: Any) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # on the CPU: a core for the step, one for the loader
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shuffle = torch.Generator()
    loader = GPUPrefetcher(
        DataLoader(Digits(samples, decode), batch_size=32, shuffle=True, generator=shuffle, **options), device
    )
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 16, 5, stride=2), nn.Flatten(), nn.LazyLinear(10)
    ).to(device)
    model(torch.zeros(1, 1, SIZE, SIZE, device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    started = time.perf_counter()
    with loader:
        for epoch in range(epochs):
            shuffle.manual_seed(epoch)
            total = torch.zeros((), device=device)
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach()
            losses.append(total.item() / len(loader))
        seconds = time.perf_counter() - started
        print(f"=== {name}")
        print(f"{epochs * samples / seconds:,.0f} samples/s, loss {losses[-1]:.4f}\n")
        print(loader.stats(), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()

    def step(name: str, decode: Any, **options: Any) -> None:
        train(name, decode, given.samples, given.epochs, **options)

    step("1. as it was", decode_in_python)
    step("2. two worker processes", decode_in_python, num_workers=2)
    step("3. decoding with NumPy", decode_in_numpy, num_workers=2)
    step("4. and without worker processes", decode_in_numpy)


if __name__ == "__main__":
    main()
