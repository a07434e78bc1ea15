"""The command: text, JSON, standard input, exit codes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hullspeed.cli.main import run

Log = Callable[..., str]


@pytest.fixture
def good(tmp_path: Path, vllm_log: Log) -> Path:
    path = tmp_path / "vllm.log"
    text = vllm_log(
        "Qwen/Qwen3.8-27B-FP8", config="tensor_parallel_size=2", gib=4.99, tokens="302,921",
        length="131,072", concurrency="2.31",
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")
    return path


def test_text(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain-log", str(good)]) == 0
    out = capsys.readouterr().out
    for words in (
        "208 blocks of 1568 tokens",
        "KV fp8",
        "prefix cache on",
        "What would serve more",
    ):
        assert words in out


def test_json_and_standard_input(
    good: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stdin:
        buffer = io.BytesIO(good.read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert run(["explain-log", "-", "--json"]) == 0
    report = json.loads(capsysbinary.readouterr().out)
    assert report["fitted"][0]["blocks"] == 208
    assert report["fitted"][0]["block_tokens"] == 1568
    assert {event["name"] for event in report["events"]} >= {"config", "kv_gib", "tokens"}


def test_a_failed_start_is_exit_1(
    tmp_path: Path, vllm_log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.log"
    more = "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (969)."
    path.write_text(vllm_log("Qwen/Qwen3.8-27B", more=more), encoding="utf-8")
    assert run(["explain-log", str(path)]) == 1
    assert "--max-num-seqs 969" in capsys.readouterr().out


def test_a_model_can_be_named(
    tmp_path: Path, vllm_log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.log"
    text = vllm_log(
        "/models/mine", gib=4.99, tokens="302,921", length="131,072", concurrency="2.31"
    )
    path.write_text(text, encoding="utf-8")
    assert run(["explain-log", str(path), "--model", "Qwen/Qwen3.8-27B", "--tp", "2", "-v"]) == 0
    assert "208 blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-file.log"],
        ["{empty}"],
        ["{good}", "--tp", "0"],
        ["{good}", "--model", "nobody/NoSuchModel"],
        ["{good}", "--tp", "five"],
    ],
)
def test_bad_usage_is_exit_2(
    arguments: list[str], good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("nothing here\n", encoding="utf-8")
    filled = [a.format(good=good, empty=empty) for a in arguments]
    assert run(["explain-log", *filled]) == 2
    err = capsys.readouterr().err
    assert err.count("error:") == 1
    assert "Traceback" not in err
