"""The training run of examples/quickstart.py, as a function: it comes with the package and needs torch alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from prefetchpipe import GPUPrefetcher

__all__ = ["Outcome", "digits", "train"]

_PIXELS = 8
_CLASSES = 10
_SAMPLES = 1797


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the run gave."""

    device: str
    data: str
    epochs: int
    test_accuracy: float
    samples_per_second: float
    losses: tuple[float, ...]
    """Mean training loss of each epoch."""
    stats: str


def digits() -> tuple[torch.Tensor, torch.Tensor, str]:
    """Images (uint8, N x 1 x 8 x 8, values 0 to 16), labels, and where they are from.

    scikit-learn's handwritten digits where it is installed; otherwise as many images made of ten random patterns
    with noise.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(_CLASSES, (_SAMPLES,), generator=generator)
        patterns = torch.randint(0, 17, (_CLASSES, 1, _PIXELS, _PIXELS), generator=generator)
        noise = torch.randint(-6, 7, (_SAMPLES, 1, _PIXELS, _PIXELS), generator=generator)
        images = (patterns[labels] + noise).clamp(0, 16).to(torch.uint8)
        return images, labels, "made-up patterns (scikit-learn is not installed)"
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.uint8).unsqueeze(1)
    return images, torch.tensor(bunch.target), "scikit-learn's digits"


def normalize(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs on the device: bytes travel, not floats."""
    images, labels = batch
    return images.float() / 16, labels


def train(device: torch.device, *, epochs: int, done: Callable[[str], None]) -> Outcome:
    """Train a small classifier through :class:`prefetchpipe.GPUPrefetcher`; step by step what the example does.

    The global random state of torch is put back.

    Args:
        device: Where batches and model go.
        epochs: At least 1.
        done: Called after each epoch with its loss.
    """
    images, labels, data = digits()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        train_set, test_set = random_split(TensorDataset(images, labels), [0.8, 0.2])
        shuffle = torch.Generator().manual_seed(0)
        train_loader = DataLoader(train_set, batch_size=64, shuffle=True, generator=shuffle)
        batches = GPUPrefetcher(train_loader, device, transform=normalize)
        test = GPUPrefetcher(DataLoader(test_set, batch_size=256), device, transform=normalize)
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, _CLASSES)
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        start = time.perf_counter()
        for _ in range(epochs):
            epoch_loss = torch.zeros((), device=device)
            for x, y in batches:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                epoch_loss += loss.detach()
            losses.append(epoch_loss.item() / len(batches))  # the one wait for the GPU in an epoch
            done(f"loss {losses[-1]:.3f}")
        seconds = time.perf_counter() - start
        with torch.inference_mode():
            correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
    return Outcome(
        device=str(device),
        data=data,
        epochs=epochs,
        test_accuracy=correct / len(test_set),
        samples_per_second=epochs * len(train_set) / seconds,
        losses=tuple(losses),
        stats=str(batches.stats()),
    )
