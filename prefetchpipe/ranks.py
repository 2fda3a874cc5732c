"""What one of several training processes on a host has for itself: cores, a device, a share of the data.

Launchers (torchrun, Ray Train, Accelerate, mpirun) say in environment variables which process this is.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from prefetchpipe.errors import PrefetchWarning

__all__ = ["check_device", "check_sampler", "local_world_size", "usable_cores"]

_LOCAL_WORLD_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_CALLER_OF_THE_CONSTRUCTOR = 5  # check_device <- cuda_device <- resolve <- __init__ <- the user


def local_world_size() -> int:
    """Training processes on this host, as the launcher says; 1 without a launcher."""
    return max((_number(name) or 1 for name in _LOCAL_WORLD_SIZES), default=1)


def usable_cores(ranks: int | None = None) -> int:
    """Cores for this process: those it may run on, shared fairly with the other training processes of this host.

    Processes that the launcher has bound to cores of their own share nothing more. Whether it has shows in the affinity
    of the parent, which is the launcher's: the share is a part of that, and never more than this process may run on.

    Args:
        ranks: Training processes on this host; None: as many as the launcher says.
    """
    try:
        own = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this platform
        own = os.cpu_count() or 1
    ranks = ranks or local_world_size()
    if ranks == 1:
        return max(1, own)
    shared = own
    with suppress(AttributeError, OSError):  # the parent is gone
        shared = max(own, len(os.sched_getaffinity(os.getppid())))
    return max(1, min(own, shared // ranks))


def check_device(index: int, count: int) -> None:
    """Warn when the current device was taken and looks like one that nobody has chosen: 0 in a process of rank 1.

    Args:
        index: The current device of the calling thread.
        count: Devices that this process sees.
    """
    rank = _number("LOCAL_RANK")
    if index == 0 and rank is not None and 0 < rank < count:
        warnings.warn(
            f"device: the current CUDA device is cuda:0, but this is local rank {rank} of a launcher, and it sees "
            f"{count} devices: all ranks would share cuda:0. Call torch.cuda.set_device({rank}) first, with "
            f"int(os.environ['LOCAL_RANK']), or pass device='cuda:{rank}' (device='cuda:0', if that is meant)",
            PrefetchWarning,
            stacklevel=_CALLER_OF_THE_CONSTRUCTOR,
        )


def check_sampler(loader: Any) -> None:
    """Warn about a ``DistributedSampler`` that cannot be this process group's: shares read twice or by nobody.

    Fewer replicas than processes are no mistake (tensor parallelism); nor is a loader without such a sampler, since
    evaluation on every rank, sharded files and samplers of one's own look just like that.
    """
    if not isinstance(loader, DataLoader) or not dist.is_available() or not dist.is_initialized():
        return
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            problem = _problem(sampler, dist.get_world_size(), dist.get_rank())
            if problem:
                warnings.warn(
                    f"loader: its DistributedSampler {problem}. Make it after init_process_group as "
                    "DistributedSampler(dataset), or pass num_replicas=dist.get_world_size(), rank=dist.get_rank()",
                    PrefetchWarning,
                    stacklevel=3,
                )
            return


def _problem(sampler: DistributedSampler[Any], world: int, rank: int) -> str:
    replicas = sampler.num_replicas
    if replicas > world:
        return (
            f"has num_replicas={replicas}, but the process group has {world} processes: "
            f"{replicas - world} of {replicas} shares are read by nobody"
        )
    if replicas == world and sampler.rank != rank:
        return f"has rank={sampler.rank} of {replicas}, but this process is rank {rank} of {world}"
    return ""


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None
