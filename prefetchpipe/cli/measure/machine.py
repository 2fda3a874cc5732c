"""The host as this process may use it: cores, container limits, memory, /dev/shm, locked memory, NUMA nodes."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine", "NumaNode", "read_machine"]

_ROOT = Path("/")
_NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as a number of about 2^63."""
_CONTAINER_FILES = {".dockerenv": "Docker", "run/.containerenv": "Podman"}


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One memory node and its cores."""

    number: int
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What is there, and what this process may have of it."""

    system: str
    python: str
    cpu: str
    cores: int
    """Cores of the machine."""
    affinity: tuple[int, ...]
    """Cores that this process may run on."""
    quota_cores: float | None
    """CPU time per wall time that the container allows; None: no quota."""
    memory_bytes: int | None
    memory_limit_bytes: int | None
    """What the container allows; None: no limit."""
    shm_bytes: int | None
    """Size of /dev/shm; None: there is none."""
    shm_free_bytes: int | None
    memlock_bytes: int | None
    """Soft limit of locked memory (RLIMIT_MEMLOCK); None: unlimited."""
    numa: tuple[NumaNode, ...]
    container: str | None
    """The kind of container, where it shows."""

    @property
    def usable_cores(self) -> int:
        """Whole cores that this process can keep busy: its affinity, cut by the container's quota."""
        quota = len(self.affinity) if self.quota_cores is None else int(self.quota_cores)
        return max(1, min(len(self.affinity), quota))


def read_machine(root: Path = _ROOT) -> Machine:
    """Read it now.

    Args:
        root: Where ``proc``, ``sys`` and ``dev`` are.
    """
    shm = _file_system(root / "dev/shm")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        system=platform.platform(),
        python=platform.python_version(),
        cpu=_cpu_name(root),
        cores=os.cpu_count() or 1,
        affinity=_affinity(),
        quota_cores=_quota(root),
        memory_bytes=_memory(root),
        memory_limit_bytes=_memory_limit(root),
        shm_bytes=shm[0],
        shm_free_bytes=shm[1],
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        numa=_numa(root),
        container=next((name for file, name in _CONTAINER_FILES.items() if (root / file).exists()), None),
    )


def parse_cores(text: str) -> tuple[int, ...]:
    """The kernel's list format: ``0-3,8``."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _affinity() -> tuple[int, ...]:
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # not on this platform
        return tuple(range(os.cpu_count() or 1))


def _quota(root: Path) -> float | None:
    quotas = []
    for folder in _cgroup_folders(root, ""):
        fields = _text(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0].isdigit():  # noqa: PLR2004 - "quota period"
            quotas.append(int(fields[0]) / int(fields[1]))
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _memory_limit(root: Path) -> int | None:
    limits = [_number(folder / "memory.max") for folder in _cgroup_folders(root, "")]
    limits += [_number(folder / "memory.limit_in_bytes") for folder in _cgroup_folders(root, "memory")]
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The folders of this process's group and of all above it, as far as they can be seen from inside a container.

    Args:
        root: Where ``proc`` and ``sys`` are.
        controller: Of cgroup v1; empty: cgroup v2.
    """
    group, mounted = None, ""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(",") if controller else number == "0" and not controllers:
            group, mounted = path.strip("/"), controllers
            break
    if group is None:
        return []
    base = root / "sys/fs/cgroup"
    if controller:
        base = next((base / name for name in (mounted, controller) if (base / name).is_dir()), base / controller)
    elif (base / "unified").is_dir():
        base /= "unified"
    parts = [part for part in group.split("/") if part not in {"", ".."}]
    return [base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _numa(root: Path) -> tuple[NumaNode, ...]:
    nodes = [
        NumaNode(int(folder.name.removeprefix("node")), parse_cores(_text(folder / "cpulist")))
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
    ]
    return tuple(sorted(nodes, key=lambda node: node.number))


def _memory(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _cpu_name(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _file_system(path: Path) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
