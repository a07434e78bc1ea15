"""`hullspeed calibrate` of a served model: what it learns is what plan then says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hullspeed.arch import catalogue
from hullspeed.cli.main import run as run_all
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf.fitted import FittedCost

MODEL = "Qwen/Qwen3-8B"
SERVED = ["calibrate", MODEL, "--gpu", "h200"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HULLSPEED_CACHE", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> int:
    return run_all(arguments)


def slow_log(folder: Path, factor: float) -> Path:
    """A box whose decode steps take ``factor`` times what is expected of them."""
    cost = FittedCost(catalogue.load(MODEL), find_gpu("H200"))
    lines = []
    for n in (4, 16, 64):
        rate = n / (cost.batch_seconds(n, 2000 * n, ()) * factor)
        lines += 2 * [
            f"Decode batch. #running-req: {n}, #token: {2000 * n}, token usage: 0.1, "
            f"gen throughput (token/s): {rate:.1f}, #queue-req: 0"
        ]
    path = folder / "engine.log"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_log_scales_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", MODEL, "--gpu", "h200", "--concurrency", "16", "--json"]
    assert run(*ask) == 0
    before = json.loads(capsys.readouterr().out)
    assert run(*SERVED, "--log", str(slow_log(folder, 1.5)), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["decode"] == pytest.approx(1.5, rel=0.05)
    assert run(*ask) == 0
    after = json.loads(capsys.readouterr().out)
    first, then = (plan[0] if isinstance(plan, list) else plan for plan in (before, after))
    assert then["speed"]["itl_s"]["value"] > 1.2 * first["speed"]["itl_s"]["value"]
    assert "scaled to this box" in then["speed"]["source"]
    assert "engine.log" in then["speed"]["source"]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--log", "/nowhere.log"], "cannot read the log"),
        ([], "takes one source"),
        (["--log", "a", "--bench", "b"], "takes one source"),
        (["--bench", "/nowhere.json"], "cannot read the benchmark"),
        (["--endpoint", "http://127.0.0.1:9"], "127.0.0.1:9"),
    ],
)
def test_bad_input_is_one_error(
    arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SERVED, *arguments) in {2, 3}
    captured = capsys.readouterr()
    assert captured.out == ""
    assert wrong in captured.err


def test_the_model_and_the_gpu_must_be_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("calibrate", "--log", str(slow_log(folder, 1.0))) == 2
    assert "say what is served" in capsys.readouterr().err
