"""Data-parallel training on scikit-learn's digits: one process for each GPU, or CPU processes where there is none.

Run it with `torchrun --nproc-per-node=2 examples/ddp.py`.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from prefetchpipe import GPUPrefetcher

EPOCHS = 10


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start it with: torchrun --nproc-per-node=2 examples/ddp.py")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # first of all: from here on this GPU is the current one
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, test_set = Subset(data, range(1500)), Subset(data, range(1500 + rank, len(data), world))

    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train_set, seed=0)
    train = GPUPrefetcher(DataLoader(train_set, batch_size=32, sampler=sampler))
    test = GPUPrefetcher(DataLoader(test_set, batch_size=256))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # or train.sampler.set_epoch(epoch), it is the same object
        for x, y in train:
            loss = nn.functional.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    counts = torch.zeros(2, device=device)  # right ones, and all
    with torch.inference_mode():
        for x, y in test:
            counts += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y), device=device)])
    dist.all_reduce(counts)
    if rank == 0:
        print(f"processes       {world}, on {device.type}")
        print(f"test images     {int(counts[1])}")
        print(f"test accuracy   {float(counts[0] / counts[1]):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
