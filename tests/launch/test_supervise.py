"""Supervision of a stand-in engine: start, ready, drain, crash, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hullspeed.errors import BrokenStackError, EngineError
from hullspeed.findings import Finding, Severity
from hullspeed.launch.command import build_command
from hullspeed.launch.settings import Settings
from hullspeed.launch.startlog import Stage, StartLog
from hullspeed.launch.supervise import EngineCrashedError, Launch, Supervisor, launch_of
from support.patience import PATIENCE_S, until

ENGINE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture
def launch() -> Callable[..., Launch]:
    def make(*flags: str, **changes: float) -> Launch:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return Launch(
            engine="vllm",
            argv=(sys.executable, str(ENGINE), str(port), *flags),
            env={},
            base_url=f"http://127.0.0.1:{port}",
            start_timeout_s=changes.get("start_timeout_s", PATIENCE_S),
            drain_s=changes.get("drain_s", PATIENCE_S),
        )

    return make


def test_start_ready_drain(launch: Callable[..., Launch], tmp_path: Path) -> None:
    stages: list[Stage] = []
    one = launch("--linger", "0.2")
    log_path = tmp_path / "engine.log"
    one = Launch(
        engine=one.engine, argv=one.argv, env=one.env, base_url=one.base_url, log_path=log_path
    )
    with Supervisor(one, on_stage=stages.append) as engine:
        assert 0 < engine.wait_ready() < one.start_timeout_s
        ended = engine.stop()
    assert (ended.exit_code, ended.stopped, ended.drained) == (0, True, True)
    assert [stage.name for stage in stages] == [
        "starting the engine", "loading weights", "loading weights", "weights loaded",
        "sizing the cache", "server up",
    ]  # fmt: skip
    assert stages[2].detail == "50% Completed"
    assert stages[4].detail == "381,700 tokens"
    assert "draining" in log_path.read_text()


@pytest.mark.parametrize("stage", ["start", "weights", "cache"])
def test_a_crash_at_start_is_explained(launch: Callable[..., Launch], stage: str) -> None:
    def explain(log: str) -> list[Finding]:
        assert "Mamba cache blocks" in log
        return [Finding(code="LOG1", severity=Severity.ERROR, what="too many", fix="fewer")]

    with (
        pytest.raises(EngineCrashedError, match=r"exit code 1.*too many\. fewer") as caught,
        Supervisor(launch("--crash", stage), explain=explain) as engine,
    ):
        engine.wait_ready()
    assert [finding.code for finding in caught.value.findings] == ["LOG1"]


def test_without_an_explanation_the_root_cause_is_quoted(launch: Callable[..., Launch]) -> None:
    with (
        pytest.raises(EngineCrashedError, match=r"ValueError: max_num_seqs \(1024\) exceeds"),
        Supervisor(launch("--crash", "loaded")) as engine,
    ):
        engine.wait_ready()


def test_a_crash_while_serving(launch: Callable[..., Launch]) -> None:
    with Supervisor(launch("--crash", "serving")) as engine:
        engine.wait_ready()
        with pytest.raises(EngineCrashedError, match=r"while serving.*exit code 9"):
            engine.wait()


def test_a_start_that_takes_too_long_is_stopped(launch: Callable[..., Launch]) -> None:
    with (
        pytest.raises(EngineError, match=r"not ready after 5 s.*server up"),
        Supervisor(launch("--deaf", start_timeout_s=5.0)) as engine,
    ):
        engine.wait_ready()
    assert engine.pid is not None
    assert not psutil.pid_exists(engine.pid)


def test_what_does_not_drain_is_killed(launch: Callable[..., Launch]) -> None:
    with Supervisor(launch("--linger", "60", drain_s=0.5)) as engine:
        engine.wait_ready()
        ended = engine.stop()
    assert not ended.drained
    assert ended.exit_code == -signal.SIGKILL


def test_children_end_with_the_engine(launch: Callable[..., Launch]) -> None:
    lines: list[str] = []
    with Supervisor(launch("--child"), on_line=lines.append) as engine:
        engine.wait_ready()
        child = int(lines[0].split()[1])
        assert psutil.pid_exists(child)

    def ended() -> bool:
        try:
            return psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    assert until(ended)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_drains_on_a_signal(launch: Callable[..., Launch], number: signal.Signals) -> None:
    stages: list[Stage] = []

    def on_stage(stage: Stage) -> None:
        stages.append(stage)
        if stage.name == "ready":
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()

    ended = Supervisor(launch(), on_stage=on_stage).run()
    assert (ended.exit_code, ended.stopped, ended.drained) == (0, True, True)
    assert [stage.name for stage in stages][-2:] == ["ready", "draining"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_that_is_not_there_is_a_broken_stack() -> None:
    missing = Launch(engine="vllm", argv=("/no/such/vllm",), env={}, base_url="http://127.0.0.1:1")
    with pytest.raises(BrokenStackError, match="cannot be run"):
        Supervisor(missing).start()
    assert Supervisor(missing).stop().exit_code == 0


def test_a_command_becomes_a_launch(tmp_path: Path) -> None:
    command = build_command(Settings(model="m", engine="trtllm", host="::1", port=9000))
    launched = launch_of(command, cwd=tmp_path)
    assert launched.base_url == "http://[::1]:9000"
    assert (tmp_path / "serve.yaml").read_text() == command.files["serve.yaml"]


def test_stages_do_not_go_back() -> None:
    log = StartLog("vllm")
    assert log.add("\x1b[32mINFO\x1b[0m Model loading took 3 GiB") == Stage(
        "weights loaded", "3 GiB"
    )
    assert log.add("(Worker_TP1) Starting to load model") is None
    assert log.add("(Worker_TP1) Model loading took 3 GiB") is None
    assert log.stage.name == "weights loaded"
    assert StartLog("unknown").add("Application startup complete") is None


def test_the_last_error_of_a_log() -> None:
    log = StartLog("vllm")
    assert log.last_error() == "no output"
    log.add("plain line")
    assert log.last_error() == "plain line"
    log.add("(EngineCore pid=7) torch.OutOfMemoryError: CUDA out of memory.")
    log.add("RuntimeError: Engine core initialization failed. See root cause above.")
    assert log.last_error() == "torch.OutOfMemoryError: CUDA out of memory."


def test_the_stand_in_is_a_program() -> None:
    subprocess.run([sys.executable, str(ENGINE), "--help"], check=True, capture_output=True)
