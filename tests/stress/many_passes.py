"""Question: do many short passes over worker processes leave memory, descriptors, mappings and processes flat?

Command: ``python -m tests.stress.many_passes 1000`` (one row for each tenth of the passes).
Result: benchmarks/results/2026-11-30-cpu-1000-passes.txt.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import threading
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader

from prefetchpipe import GPUPrefetcher
from prefetchpipe.testing import SimulatedDevice

COLUMNS = ("passes", "RSS MB", "descriptors", "mappings", "segments", "processes", "threads", "registered bytes")


def row(passes: int, device: SimulatedDevice) -> str:
    gc.collect()
    process = psutil.Process()
    maps = Path("/proc/self/maps").read_text()
    numbers = (
        passes,
        f"{process.memory_info().rss / 1e6:.1f}",
        process.num_fds(),
        maps.count("\n"),
        maps.count("memfd:prefetchpipe"),
        len(process.children(recursive=True)),
        threading.active_count(),
        device.pinned_bytes,
    )
    return "".join(f"{number!s:>18}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("passes", type=int, nargs="?", default=1000)
    count = parser.parse_args().passes
    rows = [torch.full((1024,), float(index)) for index in range(12)]
    print(f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, simulated device")
    print("each pass: a new prefetcher, DataLoader(12 rows of 4 KiB, batch_size=2, num_workers=1); every third is left")
    print("".join(f"{name:>18}" for name in COLUMNS))
    device = SimulatedDevice()
    for number in range(count + 1):
        if number in (1, 2) or number % max(count // 10, 1) == 0:
            print(row(number, device), flush=True)
        with GPUPrefetcher(DataLoader(rows, 2, num_workers=1), device) as prefetcher:
            for seen, batch in enumerate(prefetcher):
                device.synchronize()
                if batch[:, 7].tolist() != [2.0 * seen, 2.0 * seen + 1]:
                    sys.exit(f"pass {number}, batch {seen}: {batch[:, 7].tolist()}")
                if number % 3 == 2 and seen == number % 5:
                    break
            del batch


if __name__ == "__main__":
    main()
