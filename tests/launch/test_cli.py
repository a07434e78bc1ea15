"""``hullspeed launch``: check, emit, refuse, and run a stand-in engine behind the gate."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
import yaml

import hullspeed.cli.launch as cli
from hullspeed.cli.main import run
from hullspeed.errors import UsageError
from hullspeed.launch.command import build_command
from hullspeed.launch.settings import Settings
from support.patience import PATIENCE_S

ENGINE = Path(__file__).with_name("fake_engine.py")
SEEDS = Path(__file__).with_name("seeds.sh")


def test_check_prints_reasons_and_today_s_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--check", "vllm serve m --swap-space 4"]) == 1
    out = capsys.readouterr().out
    assert "✗ LC001 vllm 0.33.0 does not take --swap-space" in out
    assert out.rstrip().endswith("vllm serve m")


def test_check_of_a_sound_command_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--check", "vllm serve m --max-num-seqs 4", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["findings"] == []
    assert one["today"] == "vllm serve m --max-num-seqs 4"


def test_check_reads_a_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with SEEDS.open() as script:
        monkeypatch.setattr(sys, "stdin", script)
        assert run(["launch", "--check", "-", "--json"]) == 1
    assert [one["engine"] for one in json.loads(capsys.readouterr().out)] == [
        "vllm", "sglang", "trtllm",
    ]  # fmt: skip


def test_emit_to_stdout_and_to_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["launch", "Qwen/Qwen3-32B", "--kv-dtype", "fp8", "--emit", "compose"]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["services"]["vllm"]
    assert run([*arguments, "--out", str(tmp_path / "deploy")]) == 0
    assert (tmp_path / "deploy" / "compose.yaml").read_text() == printed
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compose.yaml"] == printed


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["m", "--emit", "nothing"],
        ["m", "--engine", "llama.cpp"],
        ["m", "--tp", "0"],
        ["m", "--context", "-1", "--emit", "docker"],
        ["m", "--kv-cache", "many", "--emit", "docker"],
        ["m", "--flags", "'", "--emit", "docker"],
        ["m", "--flags", "--swap-space 4", "--emit", "docker"],
        ["m", "--gpu", "H1000", "--emit", "docker"],
        ["--check", "echo nothing"],
        ["--check", "vllm serve m", "--engine-version", "0.1"],
        ["m", "--memory-share", "0.9", "--kv-cache", "1GiB", "--emit", "docker"],
    ],
)
def test_a_wrong_command_line_exits_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error:") == 1


def test_the_gate_refuses_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", str(tmp_path / "none"), "--port", "18432"]) == 2
    assert "not a model's name" in capsys.readouterr().err
    code = run(["launch", "never/pulled", "--port", "18432"])
    assert code == 3
    err = capsys.readouterr().err
    assert "the gate is closed by" in err
    assert "$ vllm" not in err


def test_a_launch_runs_until_it_is_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = tmp_path / "vllm"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {ENGINE} {port}\n")
    program.chmod(0o755)
    (tmp_path / "python").write_text("")
    said = cli._say

    def say(text: str) -> None:
        said(text)
        if text.startswith("· ready"):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    monkeypatch.setattr(cli, "_say", say)
    settings = Settings(model="m", port=port)
    assert cli._run(settings, str(tmp_path / "python"), PATIENCE_S, PATIENCE_S, None) == 0
    err = capsys.readouterr().err
    for words in ("$ vllm serve m", "· loading weights", "· ready", "· draining", "exit code 0"):
        assert words in err


def test_an_address_beyond_loopback_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    command = build_command(Settings(model="m", host="0.0.0.0"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UsageError, match="VLLM_API_KEY"):
        cli._with_key(command, None)
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert cli._with_key(command, "/env/bin/python")[0] == "/env/bin/vllm"
    assert "k" not in cli._with_key(command, None)
    monkeypatch.setenv("SGLANG_API_KEY", "k")
    sglang = build_command(Settings(model="m", engine="sglang", host="0.0.0.0"))
    assert cli._with_key(sglang, None)[-2:] == ("--api-key", "k")
    trtllm = build_command(Settings(model="m", engine="trtllm", host="0.0.0.0"))
    with pytest.raises(UsageError, match=r"listen on 127\.0\.0\.1"):
        cli._with_key(trtllm, None)


def test_a_crash_log_is_explained() -> None:
    log = (
        "INFO [core.py:70] Initializing a V1 LLM engine (v0.28.0) with config: model='m'\n"
        "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (969).\n"
    )
    findings = cli.explained("vllm", log)
    assert findings
    assert "969" in str(findings[0])
    assert cli.explained("vllm", "nothing of an engine") == ()
    assert cli.explained("trtllm", log) == ()
