"""Port, disk, shared memory and limits."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.findings import Finding
from hullspeed.preflight.case import Case
from hullspeed.preflight.codes import found
from hullspeed.units import GIB, format_bytes

_NOFILE_ADVISED = (
    4096  # a socket and a pipe for each of 1,024 waiting clients, and the engine's own
)
# NCCL's shared-memory transport takes about 10 MB a channel and pair; engines advise whole GiB.
_SHM_BYTES_PER_GPU = GIB


def port(case: Case) -> Iterator[Finding]:
    """PF022 and PF023: an address that cannot be bound."""
    error = case.stack.system.port_error
    if error:
        address = f"{case.ask.host}:{case.ask.port}"
        privileged = case.ask.port < 1024 and error == "permission denied"
        yield found("PF023" if privileged else "PF022", address=address, error=error)


def disk(case: Case) -> Iterator[Finding]:
    """PF024 and PF025: a cache that cannot be written or is full."""
    seen, need = case.stack.disk, case.ask.disk_need_bytes
    if not seen.path:
        return
    if not seen.writable:
        yield found("PF024", path=seen.path)
    elif seen.free_bytes < need:
        yield found(
            "PF025", path=seen.path, free=format_bytes(seen.free_bytes), need=format_bytes(need),
            short=format_bytes(need - seen.free_bytes),
        )  # fmt: skip


def open_files(case: Case) -> Iterator[Finding]:
    """PF026: few open files."""
    if case.stack.system.nofile < _NOFILE_ADVISED:
        yield found("PF026", nofile=case.stack.system.nofile, need=_NOFILE_ADVISED)


def shared_memory(case: Case) -> Iterator[Finding]:
    """PF059: a /dev/shm too small for several GPUs."""
    seen, gpus = case.stack.system.shm_bytes, case.ask.gpus
    need = gpus * _SHM_BYTES_PER_GPU
    if case.ask.on_gpu and gpus > 1 and seen is not None and seen < need:
        yield found(
            "PF059", shm=format_bytes(seen), gpus=gpus, need=format_bytes(need),
            need_gib=max(8, need // GIB),
        )  # fmt: skip


def locked_memory(case: Case) -> Iterator[Finding]:
    """PF060: limited locked memory with several GPUs."""
    limit = case.stack.system.memlock_bytes
    if case.ask.on_gpu and case.ask.gpus > 1 and limit is not None:
        yield found("PF060", memlock=format_bytes(limit))


RULES = (port, disk, open_files, shared_memory, locked_memory)
