"""NVIDIA driver and devices through ``nvidia-smi``, where the NVML binding is not installed.

It ships with the driver. It says less than NVML: no fabric state and no row remapping before it is
asked device by device.
"""

from __future__ import annotations

import csv
import shutil
import subprocess

from hullspeed.preflight import tables
from hullspeed.preflight.stack import Gpu, GpuProcess, Nvidia
from hullspeed.units import MIB

_TIMEOUT_S = 30  # without persistence mode the first call initialises every device
_FIELDS = (
    "index", "name", "uuid", "compute_cap", "memory.total", "memory.free", "mig.mode.current",
    "compute_mode", "driver_version", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
_PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")


def look_with_smi(program: str | None = None) -> Nvidia | None:
    """Driver and devices; ``None`` when there is no ``nvidia-smi``."""
    found = shutil.which(program or "nvidia-smi")
    if found is None:
        return None
    try:
        devices = _query(found, "gpu", _FIELDS)
        processes = _query(found, "compute-apps", _PROCESS_FIELDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Nvidia(error=f"nvidia-smi does not answer: {error}")
    if isinstance(devices, str):
        return Nvidia(error=devices)
    running = [] if isinstance(processes, str) else processes
    driver = devices[0]["driver_version"] if devices else ""
    return Nvidia(
        driver=driver,
        driver_cuda=tables.cuda().offered_by(driver) if driver else "",
        gpus=tuple(_gpu(row, running) for row in devices),
    )


def _query(program: str, what: str, fields: tuple[str, ...]) -> list[dict[str, str]] | str:
    """Rows of a query, or the complaint instead."""
    command = [program, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if result.returncode:
        lines = (result.stdout + result.stderr).strip().splitlines()
        return lines[0] if lines else f"nvidia-smi ended with {result.returncode}"
    rows = csv.reader(result.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=False)) for row in rows if len(row) == len(fields)]


def _gpu(row: dict[str, str], running: list[dict[str, str]]) -> Gpu:
    return Gpu(
        index=int(row["index"]),
        name=row["name"],
        uuid=row["uuid"],
        compute_capability=row["compute_cap"],
        total_bytes=_number(row["memory.total"]) * MIB,
        free_bytes=_number(row["memory.free"]) * MIB,
        mig=row["mig.mode.current"] == "Enabled",
        # nvidia-smi does not list slices here; that there are none would be a guess
        mig_slices=(_number(row["memory.free"]) * MIB,)
        if row["mig.mode.current"] == "Enabled"
        else (),
        compute_mode=row["compute_mode"].partition("_")[0].lower(),
        ecc_uncorrected=_number(row["ecc.errors.uncorrected.volatile.total"]),
        processes=tuple(
            GpuProcess(
                pid=_number(process["pid"]),
                name=process["process_name"],
                used_bytes=_number(process["used_gpu_memory"]) * MIB or None,
            )
            for process in running
            if process["gpu_uuid"] == row["uuid"]
        ),
    )


def _number(text: str) -> int:
    """A whole number; 0 for ``[N/A]`` and ``[Not Supported]``."""
    return int(text) if text.strip().isdigit() else 0
