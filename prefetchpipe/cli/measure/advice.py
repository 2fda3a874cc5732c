"""What a checkup means: findings with a severity and what to do, and options to start from, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prefetchpipe.cli.measure.checkup import Checkup, Gpu
from prefetchpipe.cli.measure.versions import Software

__all__ = ["Finding", "Recommendation", "findings", "recommendations"]

Severity = Literal["ok", "note", "problem"]

_GB_PER_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.56}
"""PCI Express, after line coding, before packet headers."""
_SLOW_LINK = 0.6
_KNOWN_BAD_CUPY = ("14.0.0", "14.1.0")
_MIB, _GIB = 1 << 20, 1 << 30
_SHM = "shared memory (/dev/shm)"
_DOCKER_SHM = 64 * _MIB  # what a Docker container gets unless told otherwise
_PACKING_MARGIN = 1.2


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    severity: Severity
    says: str
    do: str = ""
    """What to do about it; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A value to start from."""

    option: str
    value: int | None
    why: str


def findings(found: Checkup) -> list[Finding]:
    """All findings, in the order of reading."""
    said = [_torch(found), *_cupy(found)]
    if found.gpu is not None:
        said += _link(found.gpu)
        said += _mig(found.gpu)
        said.append(_packing(found.software))
    said += [*_cores(found), *_numa(found), _memory(found), _shm(found), _memlock(found)]
    return said


def recommendations(found: Checkup) -> list[Recommendation]:
    """Depth, workers and copy threads to start from."""
    return [_depth(found), _workers(found), _copy_threads(found)]


def _torch(found: Checkup) -> Finding:
    software, driver = found.software, found.driver
    if found.gpu is not None:
        served = f"driver {driver.version} (serves CUDA up to {driver.cuda})" if driver.version else driver.problem
        return Finding("torch", "ok", f"torch {software.torch}, built for CUDA {software.torch_cuda}; {served}")
    if software.cuda_available:
        return Finding("torch", "note", f"torch {software.torch} sees a GPU; the device asked for is the CPU")
    build = f"torch {software.torch}, " + (
        f"built for CUDA {software.torch_cuda}" if software.torch_cuda else "a build without CUDA"
    )
    if not driver.gpus:
        why = f" ({driver.problem})" if driver.problem else ""
        return Finding("torch", "note", f"{build}; no GPU here{why}: batches stay on the CPU, with the same semantics")
    gpus = ", ".join(driver.gpus)
    if software.torch_cuda is None:
        do = f"install a CUDA build of torch for CUDA {driver.cuda} or older (https://pytorch.org)"
    elif driver.cuda is not None and _major(driver.cuda) < _major(software.torch_cuda):
        do = f"the driver serves CUDA up to {driver.cuda}: update it, or install a torch build for CUDA {driver.cuda}"
    else:
        do = "check CUDA_VISIBLE_DEVICES, and whether the container was started with its GPUs (docker run --gpus all)"
    return Finding("torch", "problem", f"{build}, sees no GPU, but the driver has {gpus}", do)


def _cupy(found: Checkup) -> Iterator[Finding]:
    software = found.software
    wanted = software.cupy_wanted
    if wanted is None or found.gpu is None:
        have = f"; installed: {', '.join(software.cupy_wheels)}" if software.cupy_wheels else ""
        fits = f"with a GPU this torch build takes {wanted}" if wanted else "a torch build without CUDA takes none"
        yield Finding("CuPy", "ok", f"not needed without a GPU ({fits}){have}")
        return
    extra = wanted.removeprefix("cupy-").removesuffix("x")
    install = f"pip install 'prefetchpipe[{extra}]' (the wheel is {wanted})"
    wheels = ", ".join(software.cupy_wheels)
    if len(software.cupy_wheels) > 1:
        yield Finding(
            "CuPy", "problem", f"several wheels: {wheels}; they overwrite each other", f"uninstall all, then {install}"
        )
    elif any(wheel.endswith(f" {bad}") for wheel in software.cupy_wheels for bad in _KNOWN_BAD_CUPY):
        yield Finding("CuPy", "problem", f"{wheels} is known to be broken", install)
    elif software.cupy:
        yield Finding("CuPy", "ok", f"{software.cupy} serves streams, events and pinned memory")
    elif software.cupy_wheels:
        yield Finding("CuPy", "problem", software.cupy_problem, f"uninstall {wheels}, then {install}")
    else:
        yield Finding("CuPy", "note", "not installed: torch's calls serve, which cost more of the CPU", install)


def _packing(software: Software) -> Finding:
    if not software.without_native:
        return Finding("packing", "ok", "native copies pack batches, beside Python's lock")
    why = f"torch packs batches, which is slower: native copies are {software.without_native}"
    return Finding("packing", "note", why, "install a C compiler, then prefetchpipe again from its source")


def _link(gpu: Gpu) -> Iterator[Finding]:
    facts = gpu.facts
    if facts.pcie_generation is None or facts.pcie_width is None:
        yield Finding("PCIe", "note", "generation and width are not known", "pip install nvidia-ml-py")
    else:
        used = f"generation {facts.pcie_generation} x{facts.pcie_width} in use"
        most = f"generation {facts.pcie_max_generation} x{facts.pcie_max_width} possible"
        if facts.pcie_max_width is not None and facts.pcie_width < facts.pcie_max_width:
            yield Finding("PCIe", "problem", f"{used}, {most}", "check the slot, its lanes and any riser")
        elif facts.pcie_max_generation is not None and facts.pcie_generation < facts.pcie_max_generation:
            do = "read while copies were queued: if it stays so, check the slot and the BIOS setting"
            yield Finding("PCIe", "note", f"{used}, {most}", do)
        else:
            yield Finding("PCIe", "ok", used)
    if gpu.link_problem:
        yield Finding("copies", "problem", gpu.link_problem, "free device or host memory and try again")
    if gpu.link is None:
        return
    pinned, pageable = gpu.link.pinned_h2d.median, gpu.link.pageable_h2d.median
    says = f"pinned H2D {pinned:.1f} GB/s, pageable {pageable:.1f} GB/s"
    lane = _GB_PER_S_PER_LANE.get(facts.pcie_max_generation or 0)
    if lane is not None and facts.pcie_max_width is not None and pinned < _SLOW_LINK * lane * facts.pcie_max_width:
        limit = lane * facts.pcie_max_width
        do = "look for other traffic on the link, a far NUMA node, or a virtual machine without direct access"
        yield Finding("copies", "note", f"{says}; the link could carry {limit:.0f}", do)
    else:
        yield Finding("copies", "ok", f"{says}: pinned memory is worth {pinned / pageable:.1f} times")


def _mig(gpu: Gpu) -> Iterator[Finding]:
    if gpu.facts.mig:
        says = "on: this is a slice of a GPU, and its link is shared with the other slices"
        yield Finding("MIG", "note", says, "expect H2D rates to vary with the neighbours")
    elif gpu.facts.mig is False:
        yield Finding("MIG", "ok", "off")


def _cores(found: Checkup) -> Iterator[Finding]:
    machine = found.machine
    says = f"{len(machine.affinity)} of {machine.cores} cores may be used"
    if machine.quota_cores is not None:
        says += f", with a quota of {machine.quota_cores:g} cores"
    if machine.quota_cores is not None and machine.quota_cores < len(machine.affinity):
        do = "more threads than the quota are throttled: start with a larger one (docker run --cpus), or fewer workers"
        yield Finding("cores", "note", says, do)
    elif machine.usable_cores == 1:
        do = "loading, packing and the loop take turns on one core; give this process more"
        yield Finding("cores", "problem", says, do)
    else:
        yield Finding("cores", "ok", says)
    if found.torch_threads > machine.usable_cores:
        says = f"torch uses {found.torch_threads} threads for {machine.usable_cores} usable cores"
        yield Finding("threads", "problem", says, f"OMP_NUM_THREADS={machine.usable_cores}")


def _numa(found: Checkup) -> Iterator[Finding]:
    nodes = found.machine.numa
    if len(nodes) < 2:  # noqa: PLR2004
        yield Finding("NUMA", "ok", "one memory node")
        return
    mine = {core: node.number for node in nodes for core in node.cores}
    used = sorted({mine[core] for core in found.machine.affinity if core in mine})
    says = f"{len(nodes)} nodes, this process may run on {', '.join(map(str, used))}"
    near = found.gpu.facts.numa_node if found.gpu is not None else None
    if near is None:
        yield Finding("NUMA", "note" if len(used) > 1 else "ok", says)
    elif used == [near]:
        yield Finding("NUMA", "ok", f"{says}, the GPU's own")
    else:
        do = f"numactl --cpunodebind={near} --membind={near} python ..."
        severity: Severity = "note" if near in used else "problem"
        yield Finding("NUMA", severity, f"{says}; the GPU is at node {near}", do)


def _memory(found: Checkup) -> Finding:
    machine = found.machine
    total, limit = machine.memory_bytes, machine.memory_limit_bytes
    place = f" ({machine.container})" if machine.container else ""
    if limit is None or (total is not None and limit >= total):
        return Finding("memory", "ok", f"{_size(total)}, no container limit below it{place}")
    says = f"{_size(total)}, of which the container may have {_size(limit)}{place}"
    if limit < 4 * _GIB:
        do = "pinned memory, workers and their batches count: fewer workers, smaller batches, or a larger limit"
        return Finding("memory", "note", says, do)
    return Finding("memory", "ok", says)


def _shm(found: Checkup) -> Finding:
    size, free = found.machine.shm_bytes, found.machine.shm_free_bytes
    if size is None:
        return Finding(_SHM, "problem", "there is none", "DataLoader workers need it: mount a tmpfs there")
    says = f"{_size(size)}, {_size(free)} free"
    do = "DataLoader workers hand batches over through it: docker run --shm-size=8g, or --ipc=host"
    if size <= _DOCKER_SHM:
        return Finding(_SHM, "problem", f"{says}: room for little more than one batch", do)
    if size < _GIB or (free is not None and free < size // 10):
        return Finding(_SHM, "note", says, do)
    return Finding(_SHM, "ok", says)


def _memlock(found: Checkup) -> Finding:
    limit = found.machine.memlock_bytes
    if limit is None:
        return Finding("memlock", "ok", "unlimited")
    says = f"{_size(limit)} of locked memory (ulimit -l)"
    if found.gpu is None:
        return Finding("memlock", "ok", f"{says}; nothing is locked without a GPU")
    do = "the first thing to raise (ulimit -l unlimited, --ulimit memlock=-1) if pinning is refused"
    return Finding("memlock", "note", says, do)


def _depth(found: Checkup) -> Recommendation:
    if found.gpu is None:
        return Recommendation("depth", 2, "the default: one batch in work, one ready; no copy has to be hidden here")
    room = _size(found.gpu.memory_bytes)
    why = (
        f"the default: one batch in flight, one ready; costs up to 3 batches of the {room} on the GPU. "
        "4 if the loader's times vary much from batch to batch"
    )
    return Recommendation("depth", 2, why)


def _workers(found: Checkup) -> Recommendation:
    cores = found.machine.usable_cores
    if cores == 1:
        return Recommendation("num_workers", 0, "one core: a worker process would only take turns with the loop")
    if found.gpu is None:
        count = max(1, cores // 2)
        why = f"{cores} usable cores, and the model computes on them too"
    else:
        count = max(1, cores - 2)
        why = f"{cores} usable cores, less one for the loop and one for packing"
    return Recommendation("num_workers", count, f"{why}; `prefetchpipe sweep` finds the best for your loader")


def _copy_threads(found: Checkup) -> Recommendation:
    if found.gpu is None:
        return Recommendation("copy_threads", None, "the default: there is no link to keep up with")
    if found.gpu.link is None or not found.packing:
        return Recommendation("copy_threads", None, "the default: nothing was measured")
    wanted = _PACKING_MARGIN * found.gpu.link.pinned_h2d.median
    enough = [threads for threads, rate in found.packing.items() if rate.median >= wanted]
    best = max(found.packing, key=lambda threads: found.packing[threads].median)
    count = min(enough, default=best)
    packs = f"{count} threads pack {found.packing[count].median:.0f} GB/s"
    link = f"{found.gpu.link.pinned_h2d.median:.0f} GB/s of the link"
    if enough:
        return Recommendation("copy_threads", count, f"{packs}, comfortably above the {link}")
    return Recommendation("copy_threads", count, f"{packs}, the most here; below 1.2 times the {link}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "unknown size"
    if nbytes < _GIB:
        return f"{nbytes / _MIB:.3g} MiB"
    return f"{nbytes / _GIB:.3g} GiB"
