"""The torch build."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.findings import Finding
from hullspeed.preflight import tables
from hullspeed.preflight.case import Case, below
from hullspeed.preflight.codes import found


def present(case: Case) -> Iterator[Finding]:
    """PF003 and PF004: torch that is not there or does not import."""
    python = case.stack.python
    if python.torch is None:
        needs = case.row.torch if case.row else ""
        requirement = f"'torch{needs}'" if needs else "torch"
        yield found("PF003", requirement=requirement, executable=python.executable, **case.named)
    elif not python.torch.imports:
        base = tables.base_version(python.torch.version)
        yield found("PF004", error=python.torch.error, torch=base)


def version(case: Case) -> Iterator[Finding]:
    """PF005: a torch that the engine was not compiled against."""
    torch, row = case.stack.python.torch, case.row
    if torch is not None and row is not None and not tables.fits(torch.version, row.torch):
        yield found("PF005", torch=torch.version, needs=row.torch, **case.named)


def build(case: Case) -> Iterator[Finding]:
    """PF006 and PF007: a CPU build for a GPU run, and the reverse."""
    torch = case.torch
    if torch is None:
        return
    gpu_build = torch.cuda is not None or torch.hip is not None
    base = tables.base_version(torch.version)
    if case.ask.on_gpu and not gpu_build:
        yield found("PF006", torch=torch.version, base=base, **case.named)
    elif not case.ask.on_gpu and gpu_build:
        yield found("PF007", torch=torch.version, base=base)


def packed_fp16(case: Case) -> Iterator[Finding]:
    """PF012: the embedded engine without FBGEMM's fp16 product."""
    torch = case.torch
    if torch is not None and case.ask.engine == "hullspeed" and not torch.fp16_linear:
        yield found("PF012", torch=torch.version)


def knows_gpu(case: Case) -> Iterator[Finding]:
    """PF039 and PF040: a build older than the GPU, or without its target."""
    torch = case.torch
    if torch is None or torch.cuda is None:
        return
    for gpu in case.used_gpus:
        capability = gpu.compute_capability
        needs = tables.cuda().first_cuda.get(capability, "")
        if needs and below(torch.cuda, needs):
            yield found("PF039", gpu=gpu.name, capability=capability, needs=needs, cuda=torch.cuda)
            return
        if torch.arch_list and not _covers(torch.arch_list, gpu.capability):
            major, minor = gpu.capability
            targets = ", ".join(torch.arch_list)
            yield found(
                "PF040", gpu=gpu.name, sm=f"{major}{minor}", torch=torch.version, targets=targets
            )
            return


def _covers(arch_list: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether a compiled target runs on ``capability``: same major and at most its minor (binary
    compatibility), or PTX (``compute_``) of at most its version.
    """
    major, minor = capability
    for target in arch_list:
        kind, _, digits = target.partition("_")
        number = digits.rstrip("af")
        if not number.isdigit():
            continue
        target_major, target_minor = int(number[:-1]), int(number[-1])
        if kind == "sm" and target_major == major and target_minor <= minor:
            return True
        if kind == "compute" and (target_major, target_minor) <= capability:
            return True
    return False


RULES = (present, version, build, packed_fp16, knows_gpu)
