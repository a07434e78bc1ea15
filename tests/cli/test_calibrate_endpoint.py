"""`hullspeed calibrate --endpoint` on a live endpoint: a box with known factors is learnt over
HTTP, and what plan and simulate then say holds on a load that was not used.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hullspeed.arch import catalogue
from hullspeed.bench import BenchSpec, run_sync
from hullspeed.bench import run as run_bench
from hullspeed.cli.main import run as run_all
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf.calibration import DECODE, PROMPT
from hullspeed.perf.fitted import FittedCost, coefficients_of, engine_of
from support.box_endpoint import Box, serving
from support.patience import output_of, until

MODEL = "Qwen/Qwen3-8B"
SERVED = ["calibrate", MODEL, "--gpu", "h200"]
SMALL = ["--isl", "600", "--osl", "12", "--quiet"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HULLSPEED_CACHE", str(tmp_path))
    monkeypatch.delenv("HULLSPEED_API_KEY", raising=False)
    return tmp_path


def box(decode: float = 1.6, prompt: float = 1.3) -> Box:
    coefficients = coefficients_of("vllm")
    factors = dict.fromkeys(DECODE, decode) | dict.fromkeys(PROMPT, prompt)
    gpu = find_gpu("H200")
    cost = FittedCost(
        catalogue.load(MODEL), gpu, coefficients=coefficients.scaled(factors, "a box")
    )
    return Box(cost, engine_of("vllm", gpu).request_s + coefficients.first_token_s)


def kept(folder: Path) -> list[Path]:
    return list(folder.glob("calibration-*"))


def test_a_box_is_learnt_and_simulate_is_right_on_another_load(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["simulate", MODEL, "--gpu", "h200", "--concurrency", "8", "--isl", "900", "--osl", "96",
           "--requests", "16", "--json"]  # fmt: skip
    assert run_all(ask) == 0
    before = json.loads(capsys.readouterr().out)["summary"]["tpot_s"]["p50"]
    with serving(box()) as live:
        assert run_all([*SERVED, "--endpoint", live.url, *SMALL, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        spec = BenchSpec(
            url=live.url, model="box", isl_tokens=900, osl_tokens=96, requests=16, concurrency=(8,)
        )
        seen = run_sync(run_bench(spec)).cells[0]
    assert found["decode"] == pytest.approx(1.6, rel=0.12)
    assert found["prompt"] == pytest.approx(1.3, rel=0.35)  # short prompts show little of it
    assert live.url in found["origin"]
    assert run_all(ask) == 0
    after = json.loads(capsys.readouterr().out)["summary"]
    assert after["tpot_s"]["p50"] > 1.3 * before
    assert after["tpot_s"]["p50"] == pytest.approx(seen.tpot_s.p50, rel=0.2)
    assert after["ttft_s"]["p50"] == pytest.approx(seen.ttft_s.p50, rel=0.25)
    # Another number of GPUs, engine or model is another box.
    for other in (["--tp", "2"], ["--engine", "sglang"]):
        assert run_all([*ask[:-1], *other]) == 0
        assert "scaled to this box" not in capsys.readouterr().out


def test_no_usage_and_ends_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = box()
    live.ends_early = True
    with serving(live):
        assert run_all([*SERVED, "--endpoint", live.url, *SMALL, "--json"]) == 0
    said = capsys.readouterr()
    assert "ends answers early" in said.err
    assert json.loads(said.out)["decode"] == pytest.approx(1.6, rel=0.15)
    live = box()
    live.usage = False
    with serving(live):
        assert run_all([*SERVED, "--endpoint", live.url, *SMALL, "--json"]) == 0
    said = capsys.readouterr()
    assert "no usage" in said.err
    assert json.loads(said.out)["decode"] == pytest.approx(1.6, rel=0.15)


def test_limits_of_the_endpoint_are_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = box()
    live.most_requests = 8
    with serving(live):
        assert run_all([*SERVED, "--endpoint", live.url, *SMALL, "--json"]) == 0
    said = capsys.readouterr()
    assert "concurrency 16 does not count" in said.err
    assert "429" in said.err
    assert json.loads(said.out)["observations"] == 6


def test_dying_half_way_uses_what_came_before(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = box()
    live.dies_after = 17  # the warm-up and the first load
    with serving(live):
        assert run_all([*SERVED, "--endpoint", live.url, *SMALL, "--json"]) == 0
    said = capsys.readouterr()
    assert "concurrency 4 does not count: 16 of 16" in said.err
    assert "out of memory" in said.err
    assert json.loads(said.out)["observations"] == 3


def test_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = box()
    live.key = "sesame"
    with serving(live):
        assert run_all([*SERVED, "--endpoint", live.url, *SMALL]) == 3
        assert "401" in capsys.readouterr().err
        assert kept(folder) == []
        key = ["--api-key", "sesame"]
        assert run_all([*SERVED, "--endpoint", live.url, *SMALL, *key]) == 0
    (path,) = kept(folder)
    assert "sesame" not in path.read_text(encoding="utf-8")


def test_ctrl_c_keeps_nothing(folder: Path) -> None:
    with serving(box()) as live:
        command = [sys.executable, "-m", "hullspeed", *SERVED, "--endpoint", live.url, *SMALL]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert until(lambda: live.seen >= 5)
            process.send_signal(signal.SIGINT)
            _, error = output_of(process)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert list(folder.iterdir()) == []
