"""NVIDIA driver and devices through NVML, loaded only here and only when a probe asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hullspeed.preflight.nvidia_smi import look_with_smi
from hullspeed.preflight.stack import Gpu, GpuProcess, Nvidia

T = TypeVar("T")

_COMPUTE_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
_FABRIC_STATES = {0: "none", 1: "pending", 2: "pending", 3: "ready"}


def look_at_nvidia() -> Nvidia:
    """Driver and devices; ``error`` says why there are none."""
    try:
        import pynvml  # noqa: PLC0415 - optional, and slow to load
    except ImportError:
        seen = look_with_smi()
        if seen is not None:
            return seen
        return Nvidia(error="no nvidia-smi, and no NVML binding (pip install nvidia-ml-py)")
    return read(pynvml)


def read(nvml: Any) -> Nvidia:
    """Everything the gate asks of the ``pynvml`` module, or of one that behaves like it."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Nvidia(error=str(error))
    try:
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        count = int(nvml.nvmlDeviceGetCount())
        return Nvidia(
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=tuple(_gpu(nvml, index) for index in range(count)),
        )
    except nvml.NVMLError as error:  # a device that fell off the bus
        return Nvidia(error=str(error), driver=_text(nvml.nvmlSystemGetDriverVersion()))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
    mig = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMigMode(device)[0]) == 1, default=False)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(device)),
        uuid=_text(nvml.nvmlDeviceGetUUID(device)),
        compute_capability=f"{major}.{minor}",
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        processes=_processes(nvml, device),
        mig=mig,
        mig_slices=_slices(nvml, device) if mig else (),
        ecc_uncorrected=_ask(nvml, lambda: _uncorrected(nvml, device), default=0),
        remap_pending=_ask(nvml, lambda: _remap_pending(nvml, device), default=False),
        compute_mode=_ask(
            nvml,
            lambda: _COMPUTE_MODES.get(int(nvml.nvmlDeviceGetComputeMode(device)), "unknown"),
            default="default",
        ),
        fabric=_ask(nvml, lambda: _fabric(nvml, device), default="none"),
    )


def _ask(nvml: Any, question: Callable[[], T], *, default: T) -> T:
    """The answer, or ``default`` where the device or driver does not know the question."""
    try:
        return question()
    except (nvml.NVMLError, AttributeError):  # AttributeError: a binding older than the question
        return default


def _processes(nvml: Any, device: Any) -> tuple[GpuProcess, ...]:
    def name(pid: int) -> str:
        return _ask(nvml, lambda: _text(nvml.nvmlSystemGetProcessName(pid)), default="")

    none: list[Any] = []
    running = _ask(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(device), default=none)
    return tuple(
        GpuProcess(
            pid=int(process.pid),
            name=name(process.pid),
            used_bytes=None if process.usedGpuMemory is None else int(process.usedGpuMemory),
        )
        for process in running
    )


def _slices(nvml: Any, device: Any) -> tuple[int, ...]:
    def size(index: int) -> int:
        return _ask(nvml, lambda: _slice_bytes(nvml, device, index), default=0)

    most = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(device)), default=0)
    return tuple(found for index in range(most) if (found := size(index)))


def _slice_bytes(nvml: Any, device: Any, index: int) -> int:
    instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)
    return int(nvml.nvmlDeviceGetMemoryInfo(instance).total)


def _uncorrected(nvml: Any, device: Any) -> int:
    return int(
        nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )


def _remap_pending(nvml: Any, device: Any) -> bool:
    _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(device)
    return bool(pending or failed)


def _fabric(nvml: Any, device: Any) -> str:
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(device, nvml.byref(info))
    if info.state == 3 and info.status != 0:
        return f"failed (status {info.status})"
    return _FABRIC_STATES.get(int(info.state), "none")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
