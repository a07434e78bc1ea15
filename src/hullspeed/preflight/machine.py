"""The machine: processor, memory, disk and limits of the operating system."""

from __future__ import annotations

import errno
import os
import platform
import resource
import socket
from pathlib import Path

import psutil

from hullspeed.preflight.stack import Cpu, Disk, Memory, System

_SHM = Path("/dev/shm")  # noqa: S108 - looked at, never written
_ENV = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "VLLM_ENABLE_CUDA_COMPATIBILITY", "HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "OMP_NUM_THREADS",
    "PYTHONPATH",
)  # fmt: skip


def look_at_cpu(root: Path = Path("/")) -> Cpu:
    """Processor, instruction sets, affinity and quota; ``root`` holds ``proc`` and ``sys``."""
    info: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        info.setdefault(key.strip().lower(), value.strip())
    logical = os.cpu_count() or 1
    # macOS has neither affinity nor cgroups
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return Cpu(
        model=info.get("model name") or platform.processor() or platform.machine(),
        arch=platform.machine(),
        logical_cores=logical,
        affinity_cores=affinity,
        quota_cores=_quota(root),
        flags=frozenset((info.get("flags") or info.get("features") or "").split()),
    )


def _quota(root: Path) -> float | None:
    """Cores' worth of time of the tightest cgroup (v2 or v1); ``None`` if unlimited."""
    quotas = []
    for folder in _cgroups(root, "cpu"):
        fields = _text(folder / "cpu.max").split()
        if not fields:
            quota = _text(folder / "cpu.cfs_quota_us").strip()
            fields = [quota, _text(folder / "cpu.cfs_period_us").strip()]
        if len(fields) == 2 and all(field.isdigit() for field in fields) and int(fields[1]):
            quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas, default=None)


def look_at_memory(root: Path = Path("/")) -> Memory:
    """Main memory and the cgroup's limit, of the level that leaves least."""
    seen = psutil.virtual_memory()
    limits = []
    for folder in _cgroups(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
            if limit.isdigit() and int(limit) < seen.total:
                limits.append((int(limit), int(used) if used.isdigit() else 0))
    if not limits:
        return Memory(total_bytes=seen.total, available_bytes=seen.available)
    limit_bytes, used_bytes = min(limits, key=lambda level: level[0] - level[1])
    return Memory(
        total_bytes=seen.total,
        available_bytes=seen.available,
        limit_bytes=limit_bytes,
        limit_used_bytes=used_bytes,
    )


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroup and of those above it; v2 and v1."""
    base = root / "sys/fs/cgroup"
    folders = [base, base / controller]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = base
        elif controller in controllers.split(","):
            top = base / controller
        else:
            continue
        steps = Path(path.strip().lstrip("/")).parts
        folders += [top.joinpath(*steps[:depth]) for depth in range(1, len(steps) + 1)]
    return folders


def cache_folder(given: str | None = None) -> Path:
    """Where models and compiled kernels are kept: given, ``HULLSPEED_CACHE``, or the user's."""
    if given or os.environ.get("HULLSPEED_CACHE"):
        return Path(given or os.environ["HULLSPEED_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hullspeed"


def look_at_disk(cache_dir: str | None) -> Disk:
    """The file system that holds, or will hold, the cache."""
    folder = cache_folder(cache_dir)
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = psutil.disk_usage(str(existing)).free
    return Disk(path=str(folder), free_bytes=free, writable=os.access(existing, os.W_OK))


def look_at_system(host: str, port: int, glibc: str = "") -> System:
    """Port, shared memory, limits and the variables that engines read."""
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return System(
        os=platform.system().lower(),
        kernel=platform.release(),
        glibc=glibc,
        port_error=_port_error(host, port),
        shm_bytes=psutil.disk_usage(str(_SHM)).total if _SHM.is_dir() else None,
        nofile=_finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) or 1 << 30,
        memlock_bytes=_finite(memlock),
        offline=os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
        env={name: os.environ[name] for name in _ENV if name in os.environ},
    )


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _port_error(host: str, port: int) -> str:
    """Why ``host:port`` cannot be bound; empty when it can."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        return f"unknown host: {error.strerror}"
    with socket.socket(family, kind, proto) as probe:
        # as servers do: a port whose last connections only linger is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except PermissionError:
            return "permission denied"
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            return "address in use" if in_use else (error.strerror or str(error))
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not this kind of system
        return ""
