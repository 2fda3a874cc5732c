"""What `doctor` reads from the system and the driver, and what it concludes; each machine is made up."""

from __future__ import annotations

import dataclasses
import sys
import threading
import types

import pytest
import torch

from prefetchpipe.cli.measure import nvml
from prefetchpipe.cli.measure.advice import findings, recommendations
from prefetchpipe.cli.measure.checkup import Checkup, Gpu, checkup
from prefetchpipe.cli.measure.link import LinkRates, measure_packing
from prefetchpipe.cli.measure.machine import Machine, NumaNode, parse_cores, read_machine
from prefetchpipe.cli.measure.nvml import Driver, GpuFacts, Usage, UsageSampler, gpu_facts, read_driver
from prefetchpipe.cli.measure.timing import Spread
from prefetchpipe.cli.measure.versions import Software

GIB = 1 << 30
CPU = torch.device("cpu")


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class TestMachine:
    def test_cgroup_v2_the_tightest_of_all_levels_counts(self, tmp_path):
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/pod/job/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pod/memory.max": str(8 * GIB),
                "sys/fs/cgroup/pod/job/memory.max": "max\n",
                "proc/meminfo": "MemTotal:       16777216 kB\n",
            },
        )
        machine = read_machine(root)
        assert (machine.quota_cores, machine.memory_limit_bytes, machine.memory_bytes) == (1.5, 8 * GIB, 16 * GIB)
        assert machine.usable_cores == 1

    def test_cgroup_v1_by_controller_and_inside_a_container(self, tmp_path):
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
                ".dockerenv": "",
            },
        )
        machine = read_machine(root)
        assert (machine.quota_cores, machine.memory_limit_bytes, machine.container) == (4.0, 2 * GIB, "Docker")

    def test_no_limit_is_none(self, tmp_path):
        root = tree(
            tmp_path,
            {
                "proc/self/cgroup": "4:memory:/\n1:cpu:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
        )
        machine = read_machine(root)
        assert (machine.quota_cores, machine.memory_limit_bytes) == (None, None)
        assert (machine.shm_bytes, machine.numa, machine.container) == (None, (), None)

    def test_numa_nodes(self, tmp_path):
        nodes = "sys/devices/system/node"
        root = tree(tmp_path, {f"{nodes}/node1/cpulist": "4-7,12\n", f"{nodes}/node0/cpulist": "0-3\n"})
        assert read_machine(root).numa == (NumaNode(0, (0, 1, 2, 3)), NumaNode(1, (4, 5, 6, 7, 12)))

    def test_core_lists(self):
        assert parse_cores("0-2,5,7-8\n") == (0, 1, 2, 5, 7, 8)
        assert parse_cores("") == ()

    def test_this_machine(self):
        machine = read_machine()
        assert 1 <= machine.usable_cores <= machine.cores
        assert machine.memory_bytes > 0


MACHINE = Machine(
    system="Linux", python="3.11", cpu="a CPU", cores=16, affinity=tuple(range(16)), quota_cores=None,
    memory_bytes=128 * GIB, memory_limit_bytes=None, shm_bytes=64 * GIB, shm_free_bytes=64 * GIB, memlock_bytes=None,
    numa=(NumaNode(0, tuple(range(16))),), container=None,
)  # fmt: skip
SOFTWARE = Software("2.11", "13.0", True, ("cupy-cuda13x 14.2.0",), "cupy-cuda13x", "14.2.0", "", "")
DRIVER = Driver("580.1", "13.0", ("NVIDIA H200",))


def rates(h2d=55.0, pageable=8.0):
    return LinkRates(1 << 26, *(Spread(rate, rate, rate) for rate in (h2d, pageable, 54.0, 7.0)))


FACTS = GpuFacts("0000:01:00.0", 5, 16, 5, 16, mig=False, numa_node=0)
GPU = Gpu("cuda:0", "NVIDIA H200", 140 * GIB, FACTS, rates())
PACKING = {
    threads: Spread(rate, rate, rate) for threads, rate in {1: 7.0, 2: 15.0, 4: 32.0, 8: 70.0, 16: 110.0}.items()
}
FOUND = Checkup(MACHINE, SOFTWARE, DRIVER, 16, GPU, PACKING)
NO_CUDA = Software("2.13+cpu", None, False, (), None, "", "", "")


def finding(found, name):
    (chosen,) = (item for item in findings(found) if item.name == name)
    return chosen


def with_machine(**changed):
    return dataclasses.replace(FOUND, machine=dataclasses.replace(MACHINE, **changed))


def with_gpu(facts=FACTS, **changed):
    return dataclasses.replace(FOUND, gpu=dataclasses.replace(GPU, facts=facts, **changed))


class TestFindings:
    def test_a_good_machine_has_no_problem_and_nothing_to_do(self):
        assert {item.severity for item in findings(FOUND)} == {"ok"}
        assert not any(item.do for item in findings(FOUND))

    def test_without_native_copies(self):
        software = dataclasses.replace(SOFTWARE, without_native="not built: no C compiler, or not Linux")
        said = finding(dataclasses.replace(FOUND, software=software), "packing")
        assert said.severity == "note"
        assert "slower: native copies are not built: no C compiler" in said.says
        assert "install a C compiler" in said.do

    def test_without_a_gpu(self):
        found = dataclasses.replace(FOUND, gpu=None, software=NO_CUDA, driver=Driver(None, None, (), "NVML: none"))
        assert finding(found, "torch").severity == "note"
        assert "no GPU here (NVML: none): batches stay on the CPU" in finding(found, "torch").says
        assert "takes none" in finding(found, "CuPy").says

    @pytest.mark.parametrize(
        ("software", "driver", "do"),
        [
            (NO_CUDA, DRIVER, "install a CUDA build of torch for CUDA 13.0"),
            (
                dataclasses.replace(SOFTWARE, cuda_available=False),
                Driver("550", "12.4", ("L4",)),
                "update it, or install",
            ),
            (dataclasses.replace(SOFTWARE, cuda_available=False), DRIVER, "CUDA_VISIBLE_DEVICES"),
        ],
    )
    def test_a_gpu_that_torch_does_not_see(self, software, driver, do):
        found = finding(dataclasses.replace(FOUND, gpu=None, software=software, driver=driver), "torch")
        assert found.severity == "problem"
        assert do in found.do
        assert driver.gpus[0] in found.says

    @pytest.mark.parametrize(
        ("wheels", "works", "severity"),
        [
            ((), False, "note"),
            (("cupy-cuda12x 13.3",), False, "problem"),
            (("cupy-cuda13x 14.1.0",), False, "problem"),
            (("cupy-cuda12x 14.2", "cupy-cuda13x 14.2"), True, "problem"),
        ],
    )
    def test_the_right_cupy_wheel_is_named(self, wheels, works, severity):
        software = dataclasses.replace(
            SOFTWARE, cupy_wheels=wheels, cupy="14.2" * works, cupy_problem="" if works else "no CuPy"
        )
        found = finding(dataclasses.replace(FOUND, software=software), "CuPy")
        assert found.severity == severity
        assert "pip install 'prefetchpipe[cuda13]' (the wheel is cupy-cuda13x)" in found.do

    def test_a_narrow_link_is_a_problem_and_a_slow_generation_a_note(self):
        narrow = finding(with_gpu(dataclasses.replace(FACTS, pcie_width=8)), "PCIe")
        assert (narrow.severity, narrow.says) == ("problem", "generation 5 x8 in use, generation 5 x16 possible")
        assert finding(with_gpu(dataclasses.replace(FACTS, pcie_generation=4)), "PCIe").severity == "note"
        assert finding(with_gpu(GpuFacts()), "PCIe").do == "pip install nvidia-ml-py"

    def test_copies_far_below_the_link(self):
        found = finding(with_gpu(link=rates(h2d=12.0)), "copies")
        assert (found.severity, "63" in found.says) == ("note", True)

    def test_copies_that_could_not_be_measured(self):
        found = finding(with_gpu(link=None, link_problem="out of memory"), "copies")
        assert (found.severity, found.says) == ("problem", "out of memory")

    def test_mig(self):
        assert finding(with_gpu(dataclasses.replace(FACTS, mig=True)), "MIG").severity == "note"

    def test_cores_quota_and_threads(self):
        assert finding(with_machine(quota_cores=2.5), "cores").severity == "note"
        assert finding(with_machine(affinity=(3,)), "cores").severity == "problem"
        threads = finding(with_machine(quota_cores=4.0), "threads")
        assert (threads.severity, threads.do) == ("problem", "OMP_NUM_THREADS=4")

    def test_numa(self):
        two = (NumaNode(0, tuple(range(8))), NumaNode(1, tuple(range(8, 16))))
        far = finding(with_machine(numa=two, affinity=tuple(range(8, 16))), "NUMA")
        assert (far.severity, far.do) == ("problem", "numactl --cpunodebind=0 --membind=0 python ...")
        assert finding(with_machine(numa=two), "NUMA").severity == "note"
        assert finding(with_machine(numa=two, affinity=tuple(range(8))), "NUMA").severity == "ok"

    def test_memory_shm_memlock(self):
        assert finding(with_machine(memory_limit_bytes=2 * GIB), "memory").severity == "note"
        assert "2 GiB" in finding(with_machine(memory_limit_bytes=2 * GIB), "memory").says
        shm = "shared memory (/dev/shm)"
        assert finding(with_machine(shm_bytes=64 << 20, shm_free_bytes=64 << 20), shm).severity == "problem"
        assert finding(with_machine(shm_bytes=None, shm_free_bytes=None), shm).severity == "problem"
        assert finding(with_machine(shm_free_bytes=GIB), shm).severity == "note"
        assert finding(with_machine(memlock_bytes=8 << 20), "memlock").severity == "note"


class TestRecommendations:
    def test_the_fewest_threads_that_keep_up_with_the_link(self):
        chosen = {item.option: item.value for item in recommendations(FOUND)}
        assert chosen == {"depth": 2, "num_workers": 14, "copy_threads": 8}

    def test_the_fastest_where_none_keeps_up(self):
        found = dataclasses.replace(FOUND, packing={1: Spread(7, 7, 7), 2: Spread(6, 6, 6)})
        (threads,) = (item for item in recommendations(found) if item.option == "copy_threads")
        assert (threads.value, "the most here" in threads.why) == (1, True)

    def test_without_a_gpu_and_on_one_core(self):
        found = dataclasses.replace(with_machine(affinity=(0,)), gpu=None)
        assert {item.option: item.value for item in recommendations(found)} == {
            "depth": 2,
            "num_workers": 0,
            "copy_threads": None,
        }
        assert all(item.why for item in recommendations(found))


class TestCheckup:
    def test_without_measuring(self):
        steps = []
        found = checkup(CPU, measure=False, done=steps.append)
        assert (found.gpu, found.packing, len(steps)) == (None, {}, 4)

    def test_packing_puts_the_thread_count_back(self):
        before = torch.get_num_threads()
        assert set(measure_packing([1], 1 << 12, pinned=False)) == {1}
        assert torch.get_num_threads() == before


class FakeNvml(types.ModuleType):
    """Answers like NVML for one GPU; what it does not know raises NVML's error."""

    class NVMLError(Exception):
        pass

    def __init__(self, **answers):
        super().__init__("pynvml")
        self.asked = []
        self.users = 0
        self.answers = answers

    def nvmlInit(self):  # noqa: N802
        self.users += 1

    def nvmlShutdown(self):  # noqa: N802
        self.users -= 1

    def __getattr__(self, name):
        def ask(*arguments):
            self.asked.append((name, *arguments))
            answer = self.answers.get(name)
            answer = answer(*arguments) if callable(answer) else answer
            if answer is None:
                raise self.NVMLError("Not Supported")
            return answer

        return ask


@pytest.fixture
def fake_nvml(monkeypatch):
    fake = FakeNvml(
        nvmlSystemGetDriverVersion=b"580.65",
        nvmlSystemGetCudaDriverVersion_v2=13000,
        nvmlDeviceGetCount=1,
        nvmlDeviceGetHandleByIndex="handle 0",
        nvmlDeviceGetName=b"NVIDIA H200",
        nvmlDeviceGetHandleByUUID=lambda uuid: "handle" if uuid == "GPU-1234" else None,
        nvmlDeviceGetCurrPcieLinkGeneration=5,
        nvmlDeviceGetCurrPcieLinkWidth=16,
        nvmlDeviceGetMaxPcieLinkGeneration=5,
        nvmlDeviceGetMigMode=[0, 0],
        nvmlDeviceGetPciInfo=types.SimpleNamespace(busId=b"00000000:0A:00.0"),
        nvmlDeviceGetUtilizationRates=types.SimpleNamespace(gpu=40),
        nvmlDeviceGetMemoryInfo=types.SimpleNamespace(used=GIB),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    properties = types.SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    yield fake
    assert fake.users == 0


class TestNvml:
    def test_driver(self, fake_nvml):
        assert read_driver() == Driver("580.65", "13.0", ("NVIDIA H200",))

    def test_facts_what_is_not_answered_is_none(self, fake_nvml, tmp_path):
        tree(tmp_path, {"sys/bus/pci/devices/0000:0a:00.0/numa_node": "1\n"})
        facts = gpu_facts(torch.device("cuda", 0), tmp_path)
        assert facts == GpuFacts("00000000:0A:00.0", 5, 16, 5, None, mig=False, numa_node=1)

    def test_a_mig_slice_is_asked_for_its_whole_gpu(self, fake_nvml):
        fake_nvml.answers["nvmlDeviceGetHandleByUUID"] = lambda uuid: "slice" if uuid == "MIG-1234" else None
        fake_nvml.answers["nvmlDeviceGetDeviceHandleFromMigDeviceHandle"] = "whole"
        fake_nvml.answers["nvmlDeviceGetMigMode"] = [1, 1]
        assert gpu_facts(torch.device("cuda", 0)).mig is True
        assert ("nvmlDeviceGetMigMode", "whole") in fake_nvml.asked

    def test_by_pci_address_where_the_uuid_is_not_known(self, fake_nvml, monkeypatch):
        place = types.SimpleNamespace(uuid="?", pci_domain_id=0, pci_bus_id=10, pci_device_id=1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
        fake_nvml.answers["nvmlDeviceGetHandleByPciBusId"] = "handle"
        assert gpu_facts(torch.device("cuda", 0)).pcie_generation == 5
        assert ("nvmlDeviceGetHandleByPciBusId", "00000000:0a:01.0") in fake_nvml.asked

    def test_usage_while_something_runs(self, fake_nvml, monkeypatch):
        monkeypatch.setattr(nvml, "_SAMPLE_SECONDS", 0.001)
        seen = threading.Event()

        def used(handle):
            seen.set()
            return types.SimpleNamespace(used=3 * GIB)

        fake_nvml.answers["nvmlDeviceGetMemoryInfo"] = used
        with UsageSampler(torch.device("cuda", 0)) as sampler:
            assert seen.wait(20)
        assert sampler.usage() == Usage(40.0, 3 * GIB)

    def test_the_cpu_is_not_watched(self):
        with UsageSampler(CPU) as sampler:
            pass
        assert sampler.usage() == Usage(None, None)

    def test_without_the_library(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert read_driver() == Driver(None, None, (), "nvidia-ml-py is not installed")
        assert gpu_facts(torch.device("cuda", 0)) == GpuFacts()
