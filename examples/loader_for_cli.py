"""What `prefetchpipe sweep` and `prefetchpipe trace` ask for: a function that makes a loader, and a step.

prefetchpipe sweep examples/loader_for_cli.py:make_loader --step examples/loader_for_cli.py:step
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """Stands for decoded images: 64 x 64 crops with a random flip, from a photo of 160 x 160."""

    def __init__(self) -> None:
        self.photos = torch.randint(0, 256, (64, 3, 160, 160), dtype=torch.uint8)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        top, left = torch.randint(0, 96, (2,), generator=generator).tolist()
        image = self.photos[index % len(self.photos), :, top : top + 64, left : left + 64]
        flip = index % 2 == 0
        return (image.flip(2) if flip else image.clone()), index % 10


def make_loader(batch_size: int = 64, num_workers: int = 0) -> DataLoader[tuple[torch.Tensor, int]]:
    return DataLoader(Photos(), batch_size=batch_size, num_workers=num_workers, drop_last=True)


MODEL = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 10))


def step(batch: list[torch.Tensor]) -> None:
    images, labels = batch
    model = MODEL.to(images.device)
    loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
    loss.backward()
