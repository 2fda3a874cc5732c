"""One rank of the data-parallel tests; started by torchrun. Prints one line a rank, `RIGHT` first if all is well."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from prefetchpipe import GPUPrefetcher
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.ranks import usable_cores

ROWS, BATCH, EPOCHS = 45, 4, 3


class Rows(Dataset):
    """Rows that carry their number; uneven over ranks and over batches."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.rand(8, generator=generator), "index": torch.tensor(index)}


def train(device: torch.device, workers: int, wrap: Any) -> tuple[list[list[int]], list[float], list[torch.Tensor]]:
    """Rows seen by epoch, losses, and the parameters at the end."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sampler = DistributedSampler(Rows(), shuffle=True, seed=3)
    loader = wrap(DataLoader(Rows(), BATCH, sampler=sampler, num_workers=workers))
    seen: list[list[int]] = []
    losses = []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        seen.append([])
        for batch in loader:
            batch = {key: value.to(device) for key, value in batch.items()}  # noqa: PLW2901  a no-op where prefetched
            loss = ddp(batch["x"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen[-1] += batch["index"].tolist()
    return seen, losses, [p.detach().cpu() for p in model.parameters()]


def check_equal(device: torch.device, workers: int) -> list[list[int]]:
    plain = train(device, workers, lambda loader: loader)
    ours = train(device, workers, GPUPrefetcher)
    assert ours[0] == plain[0], "rows"
    assert ours[1] == plain[1], "losses"
    assert all(torch.equal(one, other) for one, other in zip(ours[2], plain[2], strict=True)), "parameters"
    return ours[0]


def check_shares(seen: list[list[int]], world: int) -> None:
    shares: list[Any] = [None] * world
    dist.all_gather_object(shares, seen)
    for epoch in range(EPOCHS):
        rows = [row for share in shares for row in share[epoch]]
        assert set(rows) == set(range(ROWS)), "every row is read by some rank"
        assert len(rows) == -(-ROWS // world) * world, "none twice, but for padding"
    assert shares[0][0] != shares[0][1], "set_epoch reached the sampler"


def check_breaks(device: torch.device, rank: int) -> None:
    """Ranks that leave at different places do not hang, and start anew."""
    prefetcher = GPUPrefetcher(DataLoader(Rows(), BATCH, sampler=DistributedSampler(Rows(), shuffle=False)))
    for batch in itertools.islice(prefetcher, 1 + rank):
        assert batch["x"].device == device
    dist.barrier()
    assert sum(len(batch["index"]) for batch in prefetcher) == -(-ROWS // dist.get_world_size())
    dist.barrier()


def check_warnings(device: torch.device, rank: int, world: int) -> None:
    wrong = DataLoader(Rows(), BATCH, sampler=DistributedSampler(Rows(), num_replicas=world + 1, rank=rank))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        GPUPrefetcher(wrong)
    assert [w.category for w in said] == [PrefetchWarning]
    if device.type == "cuda" and rank:
        torch.cuda.set_device(0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            GPUPrefetcher([])
        torch.cuda.set_device(device)
        assert "local rank" in str(said[0].message)


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    world = dist.get_world_size()
    assert GPUPrefetcher([]).stats().device == str(device)
    for workers in (0, 1):
        check_shares(check_equal(device, workers), world)
    check_breaks(device, rank)
    check_warnings(device, rank, world)
    cores = usable_cores()
    assert cores == max(1, len(os.sched_getaffinity(0)) // world)
    if device.type == "cuda":
        others = [index for index in range(torch.cuda.device_count()) if index != rank]
        assert all(torch.cuda.memory_reserved(index) == 0 for index in others), "memory on another rank's device"
    dist.barrier()
    dist.destroy_process_group()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetchpipe-")]
    assert not left, left
    # In one piece: the ranks have one pipe, and torchrun's `python -u` writes the end of a line by itself.
    print(f"RIGHT rank {rank} of {world} on {device.type}\n", end="", flush=True)


if __name__ == "__main__":
    main()
