"""Detection: this machine and its GPUs. NVML is loaded only here, and only when asked."""

from __future__ import annotations

import msgspec

from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.hardware.gpu import Gpu
from hullspeed.hardware.machine import Machine, detect_machine


def detect() -> Machine:
    """This machine with the GPUs that NVML shows."""
    return detect_machine(gpus=detect_gpus())


def detect_gpus() -> tuple[Gpu, ...]:
    """GPUs visible through NVML; empty without the binding, the driver or a device."""
    try:
        import pynvml  # noqa: PLC0415 - optional, and slow to load
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or no permission: no GPU for us either
        return ()
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            text = name.decode() if isinstance(name, bytes) else str(name)
            found.append(gpu_from_driver(text, total, f"{major}.{minor}"))
        return tuple(found)
    except pynvml.NVMLError:  # a device that fell off the bus or a MIG state NVML cannot read
        return ()
    finally:
        pynvml.nvmlShutdown()


def gpu_from_driver(name: str, nvml_total_bytes: int, compute_capability: str) -> Gpu:
    """The catalogue's row for a driver's device name; an unknown device keeps zero speeds.

    NVML's total includes what the driver keeps for itself, so the catalogue's memory, which is
    what a process sees, wins where the two describe the same card.
    """
    for candidate in _spellings(name):
        try:
            gpu = find_gpu(candidate)
        except UsageError:
            continue
        if 0.9 < gpu.memory_bytes / nvml_total_bytes <= 1.02:
            return msgspec.structs.replace(gpu, compute_capability=compute_capability)
    return Gpu(
        name=name,
        memory_bytes=nvml_total_bytes,
        memory_origin="detected",
        bandwidth_bytes_per_s=0.0,
        flops_per_s={"bf16": 0.0, "fp32": 0.0},
        compute_capability=compute_capability,
        source="NVML; not in the catalogue",
    )


def _spellings(name: str) -> list[str]:
    short = name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    words = short.split()
    return [short, *(" ".join(words[:n]) for n in range(len(words) - 1, 0, -1))]
