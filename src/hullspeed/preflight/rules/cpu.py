"""Processor and main memory, for runs on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.findings import Finding
from hullspeed.preflight.case import Case
from hullspeed.preflight.codes import found
from hullspeed.units import format_bytes

_X86 = ("x86_64", "AMD64", "amd64", "i686")


def avx2(case: Case) -> Iterator[Finding]:
    """PF011: an x86 processor without AVX2."""
    cpu = case.stack.cpu
    if not case.ask.on_gpu and cpu.arch in _X86 and "avx2" not in cpu.flags:
        yield found("PF011", cpu=cpu.model)


def threads(case: Case) -> Iterator[Finding]:
    """PF013: more compute threads than cores."""
    usable, asked = case.stack.cpu.usable_cores, case.ask.threads
    if asked is not None and asked > usable and not case.ask.on_gpu:
        yield found("PF013", threads=asked, usable=usable)


def quota(case: Case) -> Iterator[Finding]:
    """PF014: a cgroup quota below the affinity."""
    cpu = case.stack.cpu
    if cpu.quota_cores is not None and cpu.quota_cores < cpu.affinity_cores:
        yield found("PF014", quota=f"{cpu.quota_cores:g}", affinity=cpu.affinity_cores)


def memory(case: Case) -> Iterator[Finding]:
    """PF015 and PF016: less memory than the plan needs, in the machine or in the cgroup."""
    need, seen = case.ask.need_bytes, case.stack.memory
    if need is None or case.ask.on_gpu or not seen.total_bytes:
        return
    if need > seen.available_bytes:
        yield found(
            "PF015",
            need=format_bytes(need),
            available=format_bytes(seen.available_bytes),
            short=format_bytes(need - seen.available_bytes),
        )
    elif seen.limit_bytes is not None and need > seen.limit_bytes - seen.limit_used_bytes:
        yield found(
            "PF016",
            need=format_bytes(need),
            allowed=format_bytes(max(0, seen.limit_bytes - seen.limit_used_bytes)),
            total=format_bytes(seen.total_bytes),
        )


RULES = (avx2, threads, quota)
MEMORY_RULES = (memory,)
