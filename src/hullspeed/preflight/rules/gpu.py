"""The GPUs: there, whole, idle, and new enough."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.findings import Finding
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.hardware.detect import gpu_from_driver
from hullspeed.preflight.case import Case, below, find_device
from hullspeed.preflight.codes import found
from hullspeed.preflight.stack import Gpu
from hullspeed.units import format_bytes


def driver_answers(case: Case) -> Iterator[Finding]:
    """PF030 to PF032: no driver, a half-upgraded one, no device."""
    nvidia = case.stack.nvidia
    if not case.ask.on_gpu:
        return
    if nvidia is None or nvidia.error:
        error = nvidia.error if nvidia else "not looked at"
        mismatch = "mismatch" in error.lower()
        yield found("PF031" if mismatch else "PF030", error=error, **case.named)
    elif not nvidia.gpus:
        visible = case.stack.system.env.get("NVIDIA_VISIBLE_DEVICES", "not set")
        yield found("PF032", driver=nvidia.driver, visible=visible)


def visible_devices(case: Case) -> Iterator[Finding]:
    """PF034: entries that CUDA does not know, after which it stops reading."""
    nvidia = case.stack.nvidia
    value = case.stack.system.env.get("CUDA_VISIBLE_DEVICES")
    if not case.ask.on_gpu or nvidia is None or not nvidia.gpus or value is None:
        return
    entries = [entry.strip() for entry in value.split(",")]
    valid = ",".join(str(gpu.index) for gpu in nvidia.gpus)
    for place, entry in enumerate(entries):
        problem = ""
        if not entry:
            problem = "it is empty and hides every GPU" if value.strip() == "" else "an empty entry"
        elif entry in entries[:place]:
            problem = f"{entry!r} is named twice"
        elif find_device(entry, nvidia.gpus) is None:
            problem = f"{entry!r} is none of the {len(nvidia.gpus)} devices"
        if problem:
            yield found("PF034", value=value, problem=problem, valid=valid)
            return


def enough(case: Case) -> Iterator[Finding]:
    """PF033: fewer GPUs than the parallelism takes."""
    nvidia = case.stack.nvidia
    if not case.ask.on_gpu or nvidia is None or not nvidia.gpus or any(visible_devices(case)):
        return
    if len(case.gpus) < case.ask.gpus:
        yield found(
            "PF033",
            tp=case.ask.tensor_parallel,
            pp=case.ask.pipeline_parallel,
            need=case.ask.gpus,
            seen=len(case.gpus),
        )


def new_enough(case: Case) -> Iterator[Finding]:
    """PF035: a compute capability below the engine's kernels."""
    needs = case.engine.min_capability
    for gpu in case.used_gpus:
        if needs and below(gpu.compute_capability, needs):
            seen = gpu.compute_capability
            yield found("PF035", gpu=gpu.name, seen=seen, needs=needs, **case.named)
            return


def idle(case: Case) -> Iterator[Finding]:
    """PF054: processes of others."""
    for gpu in case.used_gpus:
        if gpu.processes:
            shown = ", ".join(
                f"{process.name or 'pid'} {process.pid}"
                + (f" ({format_bytes(process.used_bytes)})" if process.used_bytes else "")
                for process in gpu.processes
            )
            yield found("PF054", index=gpu.index, processes=shown)


def healthy(case: Case) -> Iterator[Finding]:
    """PF055 to PF057 and PF061: memory errors, MIG, compute mode, fabric."""
    for gpu in case.used_gpus:
        if gpu.ecc_uncorrected or gpu.remap_pending:
            problem = (
                f"{gpu.ecc_uncorrected} uncorrected memory errors"
                if gpu.ecc_uncorrected
                else "a row remap that is pending or failed"
            )
            yield found("PF055", index=gpu.index, gpu=gpu.name, problem=problem)
        if gpu.mig and not gpu.mig_slices:
            yield found("PF056", index=gpu.index)
        if gpu.compute_mode in ("exclusive", "prohibited"):
            yield found("PF057", index=gpu.index, mode=gpu.compute_mode)
        if gpu.fabric not in ("none", "ready"):
            yield found("PF061", index=gpu.index, fabric=gpu.fabric)


def alike(case: Case) -> Iterator[Finding]:
    """PF058: unlike GPUs in one group."""
    kinds: dict[tuple[str, int], Gpu] = {(g.name, g.total_bytes): g for g in case.used_gpus}
    if len(kinds) > 1:
        names = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds)
        yield found("PF058", names=names)


def as_planned(case: Case) -> Iterator[Finding]:
    """PF066: another GPU than the plan's."""
    if case.ask.gpu is None:
        return
    planned = find_gpu(case.ask.gpu).name
    for gpu in case.used_gpus:
        seen = gpu_from_driver(gpu.name, gpu.total_bytes, gpu.compute_capability).name
        if seen != planned:
            yield found("PF066", seen=seen, planned=planned, model=case.ask.model)
            return


RULES = (driver_answers, visible_devices, enough, as_planned, new_enough, idle, healthy, alike)
