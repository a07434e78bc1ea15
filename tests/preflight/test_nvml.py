"""NVML read through a stand-in that behaves like the ``pynvml`` module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hullspeed.preflight import nvml


class NVMLError(Exception):
    pass


class FakeNvml:
    """One H100 with a process; ``broken`` names functions that raise."""

    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def __init__(self, broken: tuple[str, ...] = (), mig: bool = False) -> None:
        self.broken = broken
        self.shut_down = 0
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": b"580.95.05",
            "nvmlSystemGetCudaDriverVersion_v2": 13020,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "device",
            "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetUUID": "GPU-1234",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 << 30, free=70 << 30),
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=None)],
            "nvmlSystemGetProcessName": b"python",
            "nvmlDeviceGetMigMode": (1 if mig else 0, 0),
            "nvmlDeviceGetMaxMigDeviceCount": 2,
            "nvmlDeviceGetMigDeviceHandleByIndex": "slice",
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetRemappedRows": (0, 0, 1, 0),
            "nvmlDeviceGetComputeMode": 3,
            "nvmlDeviceGetGpuFabricInfo": None,
        }

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut_down += 1

    def __getattr__(self, name: str) -> Any:
        if name in self.broken or name not in self.answers:
            if name in self.broken:
                return self._raise
            raise AttributeError(name)
        return lambda *args: self.answers[name]

    def _raise(self, *args: object) -> None:
        raise NVMLError("Not Supported")


def test_a_device_is_read() -> None:
    fake = FakeNvml()
    seen = nvml.read(fake)
    assert (seen.driver, seen.driver_cuda, seen.error) == ("580.95.05", "13.2", "")
    (gpu,) = seen.gpus
    assert (gpu.name, gpu.compute_capability, gpu.total_bytes) == (
        "NVIDIA H100 80GB HBM3", "9.0", 80 << 30,
    )  # fmt: skip
    assert gpu.capability == (9, 0)
    assert (gpu.processes[0].pid, gpu.processes[0].name) == (7, "python")
    assert (gpu.ecc_uncorrected, gpu.remap_pending, gpu.compute_mode) == (2, True, "exclusive")
    assert gpu.fabric == "none"  # the stand-in's binding is older than the question
    assert fake.shut_down == 1


def test_mig_slices_are_read() -> None:
    (gpu,) = nvml.read(FakeNvml(mig=True)).gpus
    assert gpu.mig
    assert gpu.mig_slices == (80 << 30, 80 << 30)


def test_what_a_device_does_not_know_has_its_default() -> None:
    questions = (
        "nvmlDeviceGetMigMode", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetComputeMode", "nvmlDeviceGetComputeRunningProcesses",
    )  # fmt: skip
    (gpu,) = nvml.read(FakeNvml(broken=questions)).gpus
    assert (gpu.mig, gpu.ecc_uncorrected, gpu.remap_pending) == (False, 0, False)
    assert (gpu.compute_mode, gpu.processes) == ("default", ())


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetName"])
def test_a_driver_that_does_not_answer_is_an_error_not_a_crash(broken: str) -> None:
    seen = nvml.read(FakeNvml(broken=(broken,)))
    assert seen.error == "Not Supported"
    assert seen.gpus == ()
