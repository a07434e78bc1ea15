"""The command: same bytes for the same seed, one error for bad input, every mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hullspeed.cli.main import run

BASE = ["simulate", "Qwen/Qwen3.6-27B-FP8", "--gpu", "h100-sxm", "--requests", "40"]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,480,10\n"


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run([*BASE, *arguments]) == code
    return capsys.readouterr().out


def test_the_same_seed_gives_the_same_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("--rate", "3", "--shared-prefix", "900", "--isl-sigma", "0.5", "--json")
    pages = []
    for name in ("a.html", "b.html"):
        output(capsys, *arguments[:-1], "--html", str(tmp_path / name))
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]
    assert b"<svg" in pages[0]
    assert b"<script" not in pages[0]
    first, again = output(capsys, *arguments), output(capsys, *arguments)
    assert first == again
    assert output(capsys, *arguments, "--seed", "1") != first
    data = json.loads(first)
    assert data["requests"] == data["summary"]["requests"] == 40
    assert set(data["summary"]["ttft_s"]) == {"p50", "p90", "p95", "p99"}
    assert data["timeline"]
    assert 0 < data["summary"]["usd_per_task"] < 0.01


def test_an_objective_that_is_missed_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--rate", "3", "--slo-ttft", "1ms", "--capacity", code=1)
    assert "0.0% of requests keep the objective" in text
    assert "No load keeps the objective" in text


def test_sweep_what_if_and_cache_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(
        output(capsys, "--rate", "3", "--sweep", "gpu=h100-sxm,a40", "tp=1,2", "--json",
               "--workers", "1")
    )  # fmt: skip
    assert [o["label"] for o in data["outcomes"]][1] == "gpu=h100-sxm tp=2"
    assert set(data["pareto"]) <= {o["label"] for o in data["outcomes"]}
    text = output(capsys, "--rate", "3", "--what-if", "--workers", "1")
    assert "as asked" in text
    agents = [*BASE[:4], "--agents", "6", "--compare-cache", "--cache-budget", "4GiB",
              "--policy", "align", "segment", "--json"]  # fmt: skip
    assert run(agents) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["policy"] for row in data["cache"]} >= {"align", "segment"}
    assert all(0 <= row["hit_rate"] < 1 for row in data["cache"])


def test_a_trace_of_our_own_is_the_same_workload(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = str(tmp_path / "trace.jsonl")
    drawn = json.loads(output(capsys, "--rate", "3", "--save-trace", saved, "--json"))
    read = json.loads(output(capsys, "--trace", saved, "--json"))
    assert read["summary"] == drawn["summary"]


def test_the_embedded_engine_is_simulated_on_this_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(
        ["simulate", "HuggingFaceTB/SmolLM2-135M-Instruct", "--isl", "64", "--osl", "8",
         "--requests", "6", "--concurrency", "2", "--json"]
    )  # fmt: skip
    assert code == 0
    assert json.loads(capsys.readouterr().out)["summary"]["requests"] == 6


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--rate", "-1"], "rate"),
        (["--sweep"], "axes: gpu, engine"),
        (["--rate", "0"], "rate"),
        (["--rate", "1", "--concurrency", "2"], "not both"),
        (["--concurrency", "0"], "--concurrency"),
        (["--isl", "0"], "--isl"),
        (["--slo-ttft", "5"], "not a time"),
        (["--attainment", "2"], "attainment"),
        (["--trace", "/nowhere/at/all.jsonl"], "cannot be read"),
        (["--engine", "hullspeed"], "run on a GPU"),
        (["--cache", "magic"], "unknown prefix cache"),
        (["--sweep", "colour=red"], "no such axis"),
        (["--task-success", "0"], "task"),
        (["--tp", "0"], "tp"),
        (["--requests", "100000000000"], "--requests"),
        (["--isl", "10000000000"], "--isl is at most"),
        (["--price", "nan"], "--price"),
        (["--price", "-1"], "--price"),
        (["--context", "100000000"], "262,144"),
        (["--workers", "0", "--what-if"], "--workers"),
        (["--html", "/nowhere/at/all.html"], "no such folder"),
        (["--html", "/"], "names a folder"),
        (["--save-trace", "/nowhere/at/all.jsonl"], "no such folder"),
        (["--resume", "/dev/null", "--sweep", "tp=x"], "tp cannot be this"),
        # What would be ignored is refused.
        (["--trace", "/dev/null", "--isl", "5"], "--isl is an option of drawn"),
        (["--thin"], "--thin"),
        (["--keep-thinking"], "--keep-thinking is an option of --agents"),
        (["--agents", "3"], "--requests"),
        (["--burst", "3"], "--arrival gamma"),
        (["--arrival", "ramp", "--end-rate", "3"], "--arrival is an option of --rate"),
        (["--format", "azure"], "--trace"),
        (["--warmup", "3", "--rate", "2"], "closed loops"),
        (["--capacity"], "an objective"),
        (["--capacity", "--slo-ttft", "1s", "--sweep", "tp=1,2"], "one configuration"),
        (["--what-if", "--sweep", "tp=1,2"], "--what-if"),
        (["--policy", "lru"], "--compare-cache"),
        (["--ray", "local"], "--sweep"),
        (["--prefixes", "3"], "--shared-prefix"),
        (["--isl-sigma", "1", "--range-ratio", "0.5"], "--range-ratio"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wrong: str
) -> None:
    assert run([*BASE, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert wrong in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("error:") == 1


def test_an_unknown_gpu_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "Qwen/Qwen3.6-27B-FP8", "--gpu", "abacus"]) == 2
    assert "unknown GPU (got 'abacus')" in capsys.readouterr().err


def test_a_malformed_row_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + "2023-11-16 18:17:04,-5,10\n")
    assert run([*BASE, "--trace", str(path), "--format", "azure"]) == 2
    assert "azure.csv, row 3: ContextTokens" in capsys.readouterr().err


def test_an_infinite_rate_is_all_at_once_or_as_places_are_free(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def asked(*arguments: str) -> object:
        return json.loads(output(capsys, *arguments, "--json"))["summary"]

    assert asked("--rate", "inf") == asked("--concurrency", "40")
    assert asked("--rate", "inf", "--concurrency", "4") == asked("--concurrency", "4")


def test_every_figure_comes_with_its_interval_and_the_nearest_points(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = json.loads(output(capsys, "--rate", "2", "--json"))
    sure, summary = data["certainty"], data["summary"]
    for name, value in (
        ("ttft_s", summary["ttft_s"]["p50"]),
        ("tpot_s", summary["tpot_s"]["p50"]),
        ("output_tokens_per_s", summary["output_tokens_per_s"]),
    ):
        low, high = sure["intervals"][name]
        assert low < value < high
    assert len(sure["nearest"]) == 3
    text = output(capsys, "--rate", "2")
    assert "no objective was given" in text
    assert "90 % interval" in text
    # vLLM's default of 1,024 sequences would not start here.
    assert "left at the engine's default max_num_seqs" in text


def test_requests_that_no_pool_could_hold_are_refused_without_being_spelled_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = output(capsys, "--isl", "100000000", code=1)
    assert "all 40 requests are refused" in text


def test_an_interrupted_sweep_goes_on_where_it_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "sweep.jsonl"
    sweep = ("--rate", "3", "--sweep", "gpu=h100-sxm,a40", "tp=1,2", "--workers", "1", "--json",
             "--resume", str(kept))  # fmt: skip
    whole = output(capsys, *sweep)
    lines = kept.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    kept.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # killed while it wrote the third
    assert run([*BASE, *sweep]) == 0
    captured = capsys.readouterr()
    assert captured.out == whole
    assert "2 of 4 configurations are in" in captured.err
    assert kept.read_bytes().splitlines(keepends=True) == lines
    assert run([*BASE, *sweep, "--seed", "1"]) == 2
    assert "another sweep" in capsys.readouterr().err
    for junk in (b"\x00\xff junk\n", b"no end", b'{"place": 1}\n'):
        kept.write_bytes(junk)
        assert run([*BASE, *sweep]) == 2
        assert "holds no sweep" in capsys.readouterr().err
        assert kept.read_bytes() == junk
