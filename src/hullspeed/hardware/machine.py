"""Machine: this computer in numbers, as far as this process may use it."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import msgspec
import psutil

from hullspeed.hardware.gpu import Gpu

_ISA = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni",
        "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "sve", "bf16")  # fmt: skip


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A host.

    Attributes:
        cores: Whole cores this process may use: affinity and cgroup quota, whichever is smaller.
        memory_bytes: Physical memory or the cgroup's limit, whichever is smaller.
        available_bytes: What could be taken now without swapping.
        isa: Instruction sets that matter to the kernels.
        gpus: Found through NVML; empty without driver or binding.
    """

    cpu_model: str
    cores: int
    memory_bytes: int
    available_bytes: int
    isa: tuple[str, ...]
    gpus: tuple[Gpu, ...] = ()

    def fingerprint(self, kernels_version: str) -> str:
        """Key of everything measured here: the processor, the cores and the kernels' version."""
        text = "|".join((self.cpu_model, str(self.cores), *self.isa, kernels_version))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def detect_machine(root: Path = Path("/"), *, gpus: tuple[Gpu, ...] = ()) -> Machine:
    """This machine. ``root`` holds ``proc`` and ``sys``; a test gives its own."""
    model, flags = _cpu(root)
    memory = psutil.virtual_memory()
    limit = _cgroup_memory(root)
    total = min(memory.total, limit or memory.total)
    return Machine(
        cpu_model=model,
        cores=_cores(root),
        memory_bytes=total,
        available_bytes=min(memory.available, total),
        isa=tuple(name for name in _ISA if name in flags),
        gpus=gpus,
    )


def _cpu(root: Path) -> tuple[str, frozenset[str]]:
    info: dict[str, str] = {}
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        info.setdefault(key.strip().lower(), value.strip())
    name = info.get("model name") or info.get("cpu part") or platform.processor()
    details = (info.get("cpu family"), info.get("model"), info.get("stepping"))
    detail = "/".join(part for part in details if part)
    flags = info.get("flags") or info.get("features") or ""
    model = f"{name or platform.machine()} ({detail})" if detail else name or platform.machine()
    return model, frozenset(flags.split())


def _cores(root: Path) -> int:
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:  # macOS has no affinity
        allowed = os.cpu_count() or 1
    quota = _cgroup_cpus(root)
    return max(1, min(allowed, int(quota) if quota and quota >= 1 else allowed))


def _cgroup_cpus(root: Path) -> float | None:
    """CPU quota in cores, of cgroup v2 or v1; ``None`` when unlimited."""
    fields = " ".join(_lines(root / "sys/fs/cgroup/cpu.max")).split()
    if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]):
        return int(fields[0]) / int(fields[1])
    quota = " ".join(_lines(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
    period = " ".join(_lines(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us"))
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    return None


def _cgroup_memory(root: Path) -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = " ".join(_lines(root / "sys/fs/cgroup" / name))
        if text.isdigit():
            return int(text)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not this kind of system
        return []
