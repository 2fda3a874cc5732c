"""The command line on a GPU: rates, the sides with a GPU, usage while a sweep runs, the copy lane of a trace."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from prefetchpipe.cli.measure.curves import CPU_SIDES, GPU_SIDES, measure_operation, missing_sides
from prefetchpipe.cli.measure.link import measure_link
from prefetchpipe.cli.measure.nvml import gpu_facts, read_driver
from prefetchpipe.cli.measure.operations import OPERATIONS
from tests.cli_support import PNG, SWEEP, document, loaders_in, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    with loaders_in(tmp_path, monkeypatch):
        yield tmp_path


def test_doctor_measures_the_link():
    found = document("doctor", "--device", "cuda")
    gpu = found["checkup"]["gpu"]
    link = gpu["link"]
    assert gpu["device"] == f"cuda:{torch.cuda.current_device()}"
    assert all(link[name]["low"] > 0 for name in ("pinned_h2d", "pageable_h2d", "pinned_d2h", "pageable_d2h"))
    assert {"torch", "CuPy", "PCIe", "copies"} <= {finding["name"] for finding in found["findings"]}
    assert run("doctor", "--device", "cuda").exit_code == 0


def test_what_was_asked_while_copies_run_comes_back():
    _, seen = measure_link(torch.device("cuda", torch.cuda.current_device()), 1 << 20, lambda: "seen")
    assert seen == "seen"


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="needs nvidia-ml-py")
def test_nvml_knows_the_gpu_that_torch_means():
    device = torch.device("cuda", torch.cuda.current_device())
    assert torch.cuda.get_device_name(device) in read_driver().gpus
    assert gpu_facts(device).bus_id is not None


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_breakeven_has_all_sides(name, dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    curves = measure_operation(name, [2, 64], dtype=dtype, device=device, seconds=0.001, repeats=2)
    assert {curve.side for curve in curves} == {*CPU_SIDES, *GPU_SIDES} - set(missing_sides(device, dtype))


def test_breakeven_draws_all_sides(folder):
    result = run("breakeven", "--sizes", "8,64,512", "--seconds", 0.002, "--repeats", 2, "--device", "cuda")
    assert result.exit_code == 0, result.output
    assert (folder / "breakeven.png").read_bytes().startswith(PNG)
    assert "torch GPU + copies against" in result.stdout


def test_sweep_arrives_on_the_gpu(folder):
    found = document("sweep", "cli_loaders:both", "--batch-sizes", "8", "--device", "cuda", "--no-chart", *SWEEP)
    assert found["machine"]["gpu"] == torch.cuda.get_device_name()
    assert all(len(point["windows"]) == 2 for point in found["points"])


def test_trace_has_a_copy_lane(folder):
    pytest.importorskip("prefetchpipe.trace")
    found = document("trace", "cli_loaders:plain", "--batches", "6", "--device", "cuda")
    assert "copy" in {span["lane"] for span in found["spans"]}
    assert (folder / "trace.png").read_bytes().startswith(PNG)


def test_demo():
    assert document("demo", "--epochs", 1, "--device", "cuda")["outcome"]["device"].startswith("cuda")
