"""This machine, as far as a process may use it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from hullspeed.hardware.detect import detect, detect_gpus, gpu_from_driver
from hullspeed.hardware.machine import detect_machine
from hullspeed.units import GIB, MIB

CPUINFO = """processor\t: 0
model name\t: AMD EPYC 9B14
cpu family\t: 25
model\t\t: 17
flags\t\t: fpu avx avx2 fma f16c
"""


def tree(root: Path, **files: str) -> Path:
    (root / "proc").mkdir(exist_ok=True)
    (root / "sys/fs/cgroup/cpu").mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup/memory").mkdir(exist_ok=True)
    (root / "proc/cpuinfo").write_text(CPUINFO)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")).write_text(text)
    return root


def test_reads_the_processor(tmp_path: Path) -> None:
    machine = detect_machine(tree(tmp_path))
    assert machine.cpu_model.startswith("AMD EPYC 9B14")
    assert machine.isa == ("avx", "avx2", "fma", "f16c")


def test_affinity_bounds_the_cores() -> None:
    machine = detect()
    assert machine.cores <= len(os.sched_getaffinity(0))
    assert 0 < machine.available_bytes <= machine.memory_bytes <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000\n", 1), ("50000 100000\n", None), ("max 100000\n", None)]
)
def test_cgroup_quota_bounds_the_cores(tmp_path: Path, quota: str, cores: int | None) -> None:
    allowed = len(os.sched_getaffinity(0))
    machine = detect_machine(tree(tmp_path, cpu_dot_max=quota))
    assert machine.cores == (cores or allowed)


def test_old_cgroups_count_as_well(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("100000\n")
    (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000\n")
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text(f"{300 * MIB}\n")
    machine = detect_machine(root)
    assert machine.cores == 1
    assert machine.memory_bytes == 300 * MIB


def test_cgroup_memory_bounds_the_memory(tmp_path: Path) -> None:
    assert detect_machine(tree(tmp_path, memory_dot_max=f"{GIB}\n")).memory_bytes == GIB
    unlimited = detect_machine(tree(tmp_path, memory_dot_max="max\n"))
    assert unlimited.memory_bytes == psutil.virtual_memory().total


def test_a_machine_without_proc_is_still_one(tmp_path: Path) -> None:
    machine = detect_machine(tmp_path)
    assert machine.cores >= 1
    assert machine.isa == ()


def test_the_fingerprint_changes_with_what_changes_speed(tmp_path: Path) -> None:
    machine = detect_machine(tree(tmp_path))
    assert machine.fingerprint("1") == detect_machine(tree(tmp_path)).fingerprint("1")
    assert machine.fingerprint("1") != machine.fingerprint("2")
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO.replace("avx2 ", ""))
    assert detect_machine(tmp_path).fingerprint("1") != machine.fingerprint("1")


def test_without_nvml_there_are_no_gpus() -> None:
    assert isinstance(detect_gpus(), tuple)


def test_a_driver_name_finds_its_row() -> None:
    gpu = gpu_from_driver("NVIDIA GeForce RTX 5090", 32607 * MIB, "12.0")
    assert gpu.name == "RTX 5090"
    assert gpu.memory_gib == pytest.approx(31.4)


def test_a_driver_name_with_another_size_is_not_that_row() -> None:
    """A MIG slice or a vGPU carries the card's name, not its memory."""
    gpu = gpu_from_driver("NVIDIA H200 MIG 1g.18gb", 16 * GIB, "9.0")
    assert gpu.memory_bytes == 16 * GIB
    assert gpu.bandwidth_bytes_per_s == 0


def test_h100_sizes_tell_the_variants_apart() -> None:
    assert gpu_from_driver("NVIDIA H100 NVL", 95830 * MIB, "9.0").name == "H100-NVL"
    assert gpu_from_driver("NVIDIA H100 PCIe", 81559 * MIB, "9.0").name == "H100-PCIe"
    assert gpu_from_driver("NVIDIA H100 80GB HBM3", 81559 * MIB, "9.0").name == "H100-SXM"
    assert gpu_from_driver("NVIDIA A100-SXM4-80GB", 81920 * MIB, "8.0").name == "A100-80GB-SXM"
