"""nvidia-smi read through scripts that print what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from hullspeed.preflight.nvidia_smi import look_with_smi

DEVICE = "0, NVIDIA H100 80GB HBM3, GPU-12, 9.0, 81559, 81000, Disabled, Default, 580.95.05, 0"
GEFORCE = (
    "1, NVIDIA GeForce RTX 3090, GPU-34, 8.6, 24576, 1000, [N/A], Exclusive_Process, 580.95.05,"
    " [N/A]"
)
MIG = "0, NVIDIA A100-SXM4-80GB, GPU-56, 8.0, 81920, 40000, Enabled, Default, 550.54.15, 3"


def smi(tmp_path: Path, gpus: str, processes: str = "", code: int = 0) -> str:
    path = tmp_path / "nvidia-smi"
    path.write_text(
        f"#!/bin/sh\ncase \"$1\" in *query-gpu*) cat <<'E'\n{gpus}\nE\n;; *) cat <<'E'\n"
        f"{processes}\nE\n;; esac\nexit {code}\n"
    )
    path.chmod(0o755)
    return str(path)


def test_devices_and_processes(tmp_path: Path) -> None:
    seen = look_with_smi(smi(tmp_path, f"{DEVICE}\n{GEFORCE}", "GPU-34, 77, python train.py, 500"))
    assert seen is not None
    assert (seen.driver, seen.driver_cuda, seen.error) == ("580.95.05", "13.0", "")
    h100, geforce = seen.gpus
    assert (h100.compute_capability, h100.total_bytes >> 20) == ("9.0", 81559)
    assert (h100.mig, h100.compute_mode, h100.processes) == (False, "default", ())
    assert (geforce.compute_mode, geforce.ecc_uncorrected) == ("exclusive", 0)
    (process,) = geforce.processes
    assert (process.pid, process.name, process.used_bytes) == (77, "python train.py", 500 << 20)


def test_mig_and_memory_errors(tmp_path: Path) -> None:
    seen = look_with_smi(smi(tmp_path, MIG))
    assert seen is not None
    (gpu,) = seen.gpus
    assert gpu.mig
    assert gpu.ecc_uncorrected == 3
    assert seen.driver_cuda == "12.4"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9),
        ("Failed to initialize NVML: Driver/library version mismatch", 18),
    ],
)
def test_its_complaint_is_the_error(tmp_path: Path, text: str, code: int) -> None:
    seen = look_with_smi(smi(tmp_path, text, code=code))
    assert seen is not None
    assert seen.error == text
    assert seen.gpus == ()


def test_no_program_and_no_device(tmp_path: Path) -> None:
    assert look_with_smi(str(tmp_path / "none")) is None
    seen = look_with_smi(smi(tmp_path, ""))
    assert seen is not None
    assert (seen.gpus, seen.driver) == ((), "")
