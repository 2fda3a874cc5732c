"""Everything ``doctor`` looks at, taken in one go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from prefetchpipe.cli.measure.link import LinkRates, measure_link, measure_packing
from prefetchpipe.cli.measure.machine import Machine, read_machine
from prefetchpipe.cli.measure.nvml import Driver, GpuFacts, gpu_facts, read_driver
from prefetchpipe.cli.measure.timing import Spread
from prefetchpipe.cli.measure.versions import Software, read_software

__all__ = ["STEPS", "Checkup", "Gpu", "checkup"]

STEPS = 4
"""How often :func:`checkup` says that a part is done."""
_LINK_BYTES = 64 << 20
_CPU_PACKING_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """The CUDA device that batches would go to."""

    device: str
    name: str
    memory_bytes: int
    facts: GpuFacts
    link: LinkRates | None
    """None: not measured."""
    link_problem: str = ""


@dataclass(frozen=True, slots=True)
class Checkup:
    """What was found."""

    machine: Machine
    software: Software
    driver: Driver
    torch_threads: int
    gpu: Gpu | None
    packing: dict[int, Spread]
    """GB/s from ordinary memory into a staging buffer, by number of threads; empty: not measured."""


def checkup(device: torch.device, *, measure: bool, done: Callable[[str], None]) -> Checkup:
    """Look at the machine.

    Args:
        device: Where batches would go, index resolved.
        measure: False leaves out the copies, which take some seconds.
        done: Called after each of :data:`STEPS` parts with the name of the next.
    """
    machine, software, driver = read_machine(), read_software(), read_driver()
    done("link")
    gpu = _gpu(device, measure=measure) if device.type == "cuda" else None
    done("packing")
    packing: dict[int, Spread] = {}
    if measure:
        nbytes = _LINK_BYTES if gpu else _CPU_PACKING_BYTES
        packing = measure_packing(_thread_counts(machine.usable_cores), nbytes, pinned=gpu is not None)
    done("findings")
    found = Checkup(machine, software, driver, torch.get_num_threads(), gpu, packing)
    done("")
    return found


def _gpu(device: torch.device, *, measure: bool) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    gpu = Gpu(str(device), properties.name, properties.total_memory, gpu_facts(device), None)
    if not measure:
        return gpu
    try:
        link, busy = measure_link(device, _LINK_BYTES, lambda: gpu_facts(device))
    except RuntimeError as error:
        return replace(gpu, link_problem=str(error).splitlines()[0])
    return replace(gpu, link=link, facts=busy)


def _thread_counts(cores: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 <= cores:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == cores else [*counts, cores]
