"""``hullspeed plan`` and ``hullspeed calibrate`` from the command line."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hullspeed.arch import catalogue
from hullspeed.cli.main import run
from hullspeed.hardware.catalogue import find_gpu

MODEL = "Qwen/Qwen3.6-27B-FP8"
SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HULLSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")


def test_a_gpu_plan_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, "--gpu", "a40", "--context", "32768", "--concurrency", "2"]) == 0
    out, err = capsys.readouterr()
    for part in ("Assumptions", "Memory", "Capacity", "Speed", "What would help", "Cost", "Engine",
                 "Flags", "KV of one token: 64 KiB", "State of one sequence: 146.8 MiB",
                 "--max-num-seqs", "what binds"):  # fmt: skip
        assert part in out, part
    assert "Derivation" not in out
    assert err == ""


def test_explain_adds_derivations(capsys: pytest.CaptureFixture[str]) -> None:
    run(["plan", MODEL, "--gpu", "a40", "--context", "32768", "--explain"])
    out = capsys.readouterr().out
    assert "Derivation" in out
    assert "27,781,427,952" in out


def test_json_is_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["plan", MODEL, "--gpu", "h100-sxm", "--context", "8192", "--json"])
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert (code == 0) == data["ok"]
    assert data["kv_bytes_per_token"] == 65536
    assert err == ""


def test_exit_code_1_when_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, "--gpu", "rtx 4090", "--context", "8192"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_several_gpus_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["plan", MODEL, "--gpu", "a40", "h100-sxm", "rtx 4090", "--context", "8192"])
    out = capsys.readouterr().out
    assert code == 0
    assert "fits: A40, H100-SXM" in out
    assert "RTX 4090" in out
    run(["plan", MODEL, "--gpu", "a40", "h100-sxm", "--context", "8192", "--json"])
    assert [plan["target"] for plan in json.loads(capsys.readouterr().out)] == ["A40", "H100-SXM"]


def test_html_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    run(["plan", MODEL, "--gpu", "a40", "--context", "8192", "--html", str(path)])
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "<svg" in text
    assert "146.8 MiB" in text
    assert str(path) in capsys.readouterr().err


def test_this_machine_without_a_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["plan", SMOL, "--isl", "200", "--osl", "20", "--concurrency", "2", "--json"])
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert code == 0
    assert "no calibration" in err
    assert "calibrate" in data["speed"]["source"]
    assert data["speed"]["itl_s"]["low"] < 0.7 * data["speed"]["itl_s"]["value"]
    assert data["engine"] == "hullspeed"


def test_prices_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('date = "2026-11-01"\nsource = "contract"\n[prices]\nA40 = 0.25\n')
    run(["plan", MODEL, "--gpu", "a40", "--context", "8192", "--prices", str(path), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["cost"]["usd_per_hour"] == 0.25
    assert "contract" in data["cost"]["price_source"]


def test_the_list_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--list-gpus"]) == 0
    assert "RTX PRO 6000" in capsys.readouterr().out
    assert run(["plan", "--list-gpus", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) >= 27


def test_this_machines_own_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = find_gpu("A40")
    monkeypatch.setattr("hullspeed.hardware.detect.detect_gpus", lambda: (gpu,))
    assert run(["plan", MODEL, "--gpu", "here", "--context", "8192", "--concurrency", "2"]) == 0
    assert "on A40" in capsys.readouterr().out
    monkeypatch.setattr("hullspeed.hardware.detect.detect_gpus", lambda: ())
    assert run(["plan", MODEL, "--gpu", "here"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err


BAD = {
    "no model": [],
    "unknown GPU": [MODEL, "--gpu", "h1000"],
    "ambiguous GPU": [MODEL, "--gpu", "h100"],
    "GPU engine without GPU": [MODEL, "--engine", "vllm"],
    "embedded engine on a GPU": [MODEL, "--engine", "hullspeed", "--gpu", "a40"],
    "unknown engine": [MODEL, "--engine", "llamacpp", "--gpu", "a40"],
    "negative context": [MODEL, "--gpu", "a40", "--context", "-5"],
    "context beyond the model": [MODEL, "--gpu", "a40", "--context", "300000"],
    "input beyond the context": [MODEL, "--gpu", "a40", "--context", "100", "--isl", "200"],
    "prefix beyond the input": [MODEL, "--gpu", "a40", "--isl", "100", "--shared-prefix", "100"],
    "zero concurrency": [MODEL, "--gpu", "a40", "--concurrency", "0"],
    "negative rate": [MODEL, "--gpu", "a40", "--rate", "-1"],
    "rate that is no number": [MODEL, "--gpu", "a40", "--rate", "nan"],
    "zero TP": [MODEL, "--gpu", "a40", "--tp", "0"],
    "TP that does not divide": [MODEL, "--gpu", "a40", "--tp", "16"],
    "fraction above one": [MODEL, "--gpu", "a40", "--memory-fraction", "92"],
    "unknown KV format": [MODEL, "--gpu", "a40", "--kv-dtype", "fp7"],
    "KV format that vLLM lacks": [MODEL, "--gpu", "a40", "--kv-dtype", "int4"],
    "KV format that SGLang lacks": [
        MODEL,
        "--gpu",
        "a40",
        "--engine",
        "sglang",
        "--kv-dtype",
        "int8_per_token_head",
    ],
    "KV format that TensorRT-LLM lacks": [
        MODEL,
        "--gpu",
        "a40",
        "--engine",
        "trtllm",
        "--kv-dtype",
        "int4",
    ],
    "KV format that vLLM lacked then": [
        MODEL,
        "--gpu",
        "a40",
        "--engine-version",
        "0.19.1",
        "--kv-dtype",
        "fp8_per_token_head",
    ],
    "negative MTP": [MODEL, "--gpu", "a40", "--mtp", "-1"],
    "size without sense": [MODEL, "--gpu", "a40", "--kv-cache", "lots"],
    "time without sense": [MODEL, "--gpu", "a40", "--ttft", "soon"],
    "success above one": [MODEL, "--gpu", "a40", "--task-success", "1.5"],
    "price below zero": [MODEL, "--gpu", "a40", "--price", "-1"],
    "prices file that is not there": [MODEL, "--gpu", "a40", "--prices", "/nowhere/prices.toml"],
    "unknown option": [MODEL, "--gpu", "a40", "--colour", "red"],
    "folder that is not there": ["./no/such/folder", "--gpu", "a40"],
}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_pool_larger_than_the_card_does_not_fit(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["plan", MODEL, "--gpu", "h100-sxm", "--engine", engine, "--context", "8192", "--json"]
    assert run([*named, "--kv-cache", "500GiB"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "does not fit"
    assert "500.00 GiB is asked for" in data["summary"]
    assert "MEM009" in [finding["code"] for finding in data["findings"]]
    run([*named, "--kv-cache", "20GiB"])
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] != "does not fit"
    assert "MEM009" not in [finding["code"] for finding in data["findings"]]


def test_a_pool_larger_than_this_machine_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", SMOL, "--kv-cache", "900TiB", "--context", "2048"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "used"), [("vllm", "0.33"), ("sglang", "0.5"), ("trtllm", "1.3")]
)
def test_a_version_without_rules_says_whose_are_used(
    engine: str, used: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["plan", MODEL, "--gpu", "h100-sxm", "--engine", engine, "--context", "8192", "--json"]
    run([*named, "--engine-version", "9.9"])
    found = json.loads(capsys.readouterr().out)["findings"]
    said = [finding["what"] for finding in found if finding["code"] == "MEM006"]
    assert len(said) == 1
    assert f"rules of {used} are used" in said[0]
    run([*named, "--engine-version", used])
    assert "MEM006" not in capsys.readouterr().out


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(["plan", *BAD[name]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": -64},
        {"num_hidden_layers": "64"},
        {"hidden_size": 0},
        {"num_key_value_heads": 0},
        {"head_dim": None, "hidden_size": 5121},
    ],
)
def test_a_malformed_config_is_refused(
    change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dict(catalogue.lookup("Qwen/Qwen3-32B") or {}) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["plan", str(tmp_path), "--gpu", "h100-sxm"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error" in err


TESTS = Path(__file__).parents[1]
PLAN = (
    "from hullspeed.cli.main import run; "
    f"run(['plan', {MODEL!r}, '--gpu', 'a40', '--context', '8192'])"
)


def test_a_cold_process_takes_no_torch_and_few_calls() -> None:
    """From the first import to the plan: what a core does in well under a second."""
    code = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); from support.patience import calls_of; "
        f"calls = calls_of(lambda: exec({PLAN!r})); print(calls, file=sys.stderr); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numba', 'transformers', 'pydantic')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 1_500_000


@pytest.mark.deep
def test_a_cold_process_takes_little_time() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", PLAN], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr.decode()
    # CPU time, since other processes share the cores: the bar is 1 s on a quiet machine.
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert spent < 1.5
