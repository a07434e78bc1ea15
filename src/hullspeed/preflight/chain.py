"""The chain: its links in the order in which one depends on the other, and what each showed.

GPU -> driver -> CUDA -> torch -> engine -> model on a GPU; Python -> processor -> memory -> torch
-> engine -> model on a CPU; then parallelism, capacity and the operating system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hullspeed.findings import Finding, Severity
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.case import Case
from hullspeed.preflight.codes import codes
from hullspeed.preflight.rules import (
    capacity,
    cpu,
    driver,
    engine,
    gpu,
    model,
    parallel,
    python,
    system,
    torch,
)  # fmt: skip
from hullspeed.preflight.stack import Stack
from hullspeed.units import format_bytes, format_tokens

Rule = Callable[[Case], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class LinkResult:
    """One link of the chain.

    Attributes:
        seen: What was looked at, in a few words.
        findings: What is wrong with it; empty for a sound link.
        looked: Whether there was anything to look at: behind a missing driver there is no CUDA.
    """

    name: str
    seen: str
    findings: tuple[Finding, ...]
    looked: bool = True

    @property
    def ok(self) -> bool:
        """Whether nothing in it closes the gate."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)


_RULES: dict[str, tuple[Rule, ...]] = {
    "python": python.RULES,
    "cpu": cpu.RULES,
    "memory": cpu.MEMORY_RULES,
    "gpu": gpu.RULES,
    "driver": driver.DRIVER_RULES,
    "cuda": driver.CUDA_RULES,
    "torch": torch.RULES,
    "engine": engine.RULES,
    "model": model.RULES,
    "parallel": parallel.RULES,
    "capacity": capacity.RULES,
    "system": system.RULES,
}
_GPU_LINKS = ("gpu", "driver", "cuda", "parallel", "capacity")


def check(ask: Ask, stack: Stack) -> list[Finding]:
    """Everything wrong with ``stack`` for ``ask``, in the order of the chain."""
    return [finding for link in links(ask, stack) for finding in link.findings]


def links(ask: Ask, stack: Stack) -> list[LinkResult]:
    """The chain link by link; a CPU run has no GPU links."""
    case = Case(ask, stack)
    names = [name for name in _RULES if ask.on_gpu or name not in _GPU_LINKS]
    raised = [finding for name in names for rule in _RULES[name] for finding in rule(case)]
    by_link = _by_link(raised)
    return [
        LinkResult(name, _SEEN[name](case), by_link.get(name, ()), looked=_looked(case, name))
        for name in names
    ]


def _looked(case: Case, name: str) -> bool:
    nvidia = case.stack.nvidia
    driver = nvidia is not None and bool(nvidia.driver)
    match name:
        case "driver":
            return driver
        case "cuda":
            return driver and case.torch is not None and case.torch.cuda is not None
        case "parallel":
            return bool(case.stack.model.heads) or case.ask.tensor_parallel == 1
        case "capacity":
            return bool(case.used_gpus)
    return True


def _by_link(findings: Iterable[Finding]) -> dict[str, tuple[Finding, ...]]:
    """A finding belongs to the link its code names, whichever module raised it."""
    grouped: dict[str, tuple[Finding, ...]] = {}
    for finding in findings:
        link = codes()[finding.code].link
        grouped[link] = (*grouped.get(link, ()), finding)
    return grouped


def _seen_gpu(case: Case) -> str:
    if not case.gpus:
        return "none visible"
    return ", ".join(
        f"{gpu.name} ({gpu.compute_capability}, {format_bytes(gpu.total_bytes)})"
        for gpu in case.used_gpus
    )


def _seen_driver(case: Case) -> str:
    nvidia = case.stack.nvidia
    return nvidia.driver if nvidia and nvidia.driver else "none"


def _seen_cuda(case: Case) -> str:
    nvidia, torch = case.stack.nvidia, case.torch
    offered = (nvidia.driver_cuda if nvidia else "") or "none"
    build = (torch.cuda if torch else None) or "none"
    return f"driver offers {offered}, torch is built for {build}"


def _seen_torch(case: Case) -> str:
    torch = case.stack.python.torch
    if torch is None:
        return "not installed"
    return f"{torch.version} ({'CUDA ' + torch.cuda if torch.cuda else 'CPU'} build)"


def _seen_cpu(case: Case) -> str:
    cpu = case.stack.cpu
    wide = [name for name in ("avx512f", "avx2", "asimd") if name in cpu.flags]
    return f"{cpu.model}, {cpu.usable_cores} usable cores, {wide[0] if wide else cpu.arch}"


def _seen_memory(case: Case) -> str:
    seen, need = case.stack.memory, case.ask.need_bytes
    available = f"{format_bytes(seen.available_bytes)} available"
    return f"{available}, {format_bytes(need)} needed" if need is not None else available


def _seen_engine(case: Case) -> str:
    return f"{case.ask.engine} {case.engine_version or 'not installed'}"


def _seen_model(case: Case) -> str:
    model = case.stack.model
    if not model.found or model.error:
        return case.ask.model
    kind = " ".join(word for word in (model.family, model.quant) if word)
    return f"{case.ask.model}: {kind}, {format_bytes(model.size_bytes)}"


def _seen_parallel(case: Case) -> str:
    heads = ", ".join(f"{count} {name}" for name, count in case.stack.model.heads.items())
    return f"tensor {case.ask.tensor_parallel}" + (f" over {heads} heads" if heads else "")


def _seen_capacity(case: Case) -> str:
    if not case.used_gpus:
        return "no GPU"
    smallest = min(gpu.total_bytes for gpu in case.used_gpus)
    usable = format_bytes(capacity.usable_bytes(case, smallest))
    weights = case.ask.weight_bytes_per_gpu or case.stack.model.size_bytes // case.ask.gpus
    text = f"weights {format_bytes(weights)} of {usable} usable a GPU"
    pool = case.ask.pool_tokens
    return f"{text}, pool {format_tokens(pool)} tokens" if pool is not None else text


def _seen_system(case: Case) -> str:
    seen, ask = case.stack.system, case.ask
    shm = f", shm {format_bytes(seen.shm_bytes)}" if seen.shm_bytes is not None else ""
    disk = format_bytes(case.stack.disk.free_bytes)
    return f"{ask.host}:{ask.port}, {disk} disk free, {seen.nofile} open files{shm}"


_SEEN: dict[str, Callable[[Case], str]] = {
    "python": lambda case: f"{case.stack.python.implementation} {case.stack.python.version}",
    "cpu": _seen_cpu,
    "memory": _seen_memory,
    "gpu": _seen_gpu,
    "driver": _seen_driver,
    "cuda": _seen_cuda,
    "torch": _seen_torch,
    "engine": _seen_engine,
    "model": _seen_model,
    "parallel": _seen_parallel,
    "capacity": _seen_capacity,
    "system": _seen_system,
}
