"""Published points are read, played and predicted; a sample of them holds the bars."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest

from hullspeed.errors import BrokenStackError, UsageError
from hullspeed.perf.fitted import spread_of
from hullspeed.perf.measured_tables import TableCost, load_tables, table_cost
from hullspeed.perf.nearest import public_points
from hullspeed.perf.points import Point, read_points
from hullspeed.perf.work import Shape
from hullspeed.plan.measured import asks_of, cost_of, engine_for, predict_point

COLUMNS = ("source", "model", "gpu", "n_gpus", "precision", "engine", "version", "isl", "osl",
           "concurrency_or_rate", "ttft_ms", "itl_ms", "output_tok_s", "total_tok_s",
           "notes")  # fmt: skip
PRECISION = {"none": "bf16", "fp8": "fp8", "nvfp4": "nvfp4", "awq": "nvfp4(W4A16)"}


def row(**given: str) -> dict[str, str]:
    base = dict.fromkeys(COLUMNS, "") | {
        "source": "pypi:silicon_sample.csv", "model": "Qwen/Qwen3-32B", "gpu": "h100_sxm",
        "n_gpus": "2", "precision": "bf16", "engine": "vllm", "version": "0.12.0", "isl": "1024",
        "osl": "512", "concurrency_or_rate": "concurrency 16", "ttft_ms": "190", "itl_ms": "17.9",
    }  # fmt: skip
    return base | given


@pytest.fixture
def write(tmp_path: Path) -> object:
    def file(*rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
        path = tmp_path / "points.csv"
        with path.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        return path

    return file


def test_what_a_row_says_and_what_is_assumed(write) -> None:  # type: ignore[no-untyped-def]
    one, burst, opened, drafted = read_points(
        write(
            row(),
            row(source="gpustack/gpustack docs", concurrency_or_rate=(
                "rate inf, 1000 prompts, max/peak concurrency 1000.0"),
                notes="mean TPOT 22.5 ms; cmd: vllm serve Qwen/Qwen3-32B-FP8; case: x"),
            row(source="FreedomIntelligence/AccelMark x", isl="sharegpt std", osl="sharegpt std",
                concurrency_or_rate="open-loop 5 qps", version="0.7.3", notes="P50; suite_C",
                gpu="NVIDIA H200"),
            row(source="sgl-project/sglang:x", engine="sglang", concurrency_or_rate="16",
                notes="MTP on, accept len ~3.2; P50; num_prompts 64, mem-fraction 0.8"),
        )
    )  # fmt: skip
    assert (one.protocol, one.concurrency, one.prompts) == ("closed", 16, 160)
    assert "10 prompts a client" in one.assumed
    assert one.group == "sweep | Qwen/Qwen3-32B | none | 2xH100-SXM | vllm"
    assert (burst.protocol, burst.prompts, burst.quant) == ("burst", 1000, "fp8")
    assert burst.tpot_s == pytest.approx(0.0225)
    assert (opened.protocol, opened.rate, opened.engine) == ("open", 5.0, "vllm-0.7")
    assert (opened.prompts, opened.step_tokens, opened.max_running) == (300, 4096, 256)
    assert opened.in_process
    assert opened.machine == "accelmark NVIDIA H200"
    assert (drafted.accept, drafted.prompts, drafted.memory_fraction) == (3.2, 64, 0.8)
    assert drafted.median
    assert drafted.group.endswith("speculative")


def test_scenarios_of_a_suite_and_flags_of_a_command(write) -> None:  # type: ignore[no-untyped-def]
    ours = {"source": "FreedomIntelligence/AccelMark x", "isl": "p50 28650", "osl": "256"}
    batch, alone, new, rated, queued, flagged = read_points(
        write(
            row(**ours, version="0.7.3", notes="suite_D offline",
                concurrency_or_rate="offline, client_concurrency 4 (engine batches internally)"),
            row(**ours, version="0.7.3", notes="P50; suite_D",
                concurrency_or_rate="concurrency 1 (interactive)"),
            row(**ours, version="0.20.1", notes="P50; suite_C", precision="W4A16/gptq",
                concurrency_or_rate="open-loop 25 qps"),
            row(source="gpustack/gpustack docs", notes="mean TPOT 9 ms; case: Rate 16",
                concurrency_or_rate="rate inf, 1000 prompts, max/peak concurrency 447"),
            row(source="NVIDIA/TensorRT-LLM docs/x", engine="trtllm", output_tok_s="5174",
                concurrency_or_rate="max throughput, all requests queued"),
            row(source="gpustack/gpustack docs", notes=(
                "mean TPOT 9 ms; cmd: vllm serve X --max-num-batched-tokens 16384 --max-num-seqs=64"
                " --enforce-eager; case: x"),
                concurrency_or_rate="rate inf, 1000 prompts, max/peak concurrency 1000"),
        )
    )  # fmt: skip
    assert (batch.protocol, batch.prompts, batch.max_running) == ("burst", 50, 64)
    assert (batch.step_tokens, batch.memory_fraction) == (30208, 0.85)
    assert batch.eager  # contexts beyond what 0.7 captures in graphs
    assert (alone.protocol, alone.concurrency, alone.prompts) == ("closed", 1, 100)
    assert (new.max_running, new.step_tokens, new.eager) == (128, 2048, True)
    assert new.quant == "gptq-exllama"
    assert "| gptq |" in new.group
    assert (rated.protocol, rated.rate, rated.prompts) == ("open", 16.0, 1000)
    assert (queued.protocol, queued.prompts, queued.spread) == ("burst", 1500, 1.0)
    assert (flagged.step_tokens, flagged.max_running, flagged.eager) == (16384, 64, True)


def test_lengths_drawn_from_a_table_keep_its_mean(write) -> None:  # type: ignore[no-untyped-def]
    (point,) = read_points(
        write(row(source="FreedomIntelligence/AccelMark x", version="0.7.3", notes="P50; suite_C",
                  concurrency_or_rate="open-loop 5 qps"))
    )  # fmt: skip
    asks = asks_of(point)
    assert len(asks) == 300
    assert statistics.fmean(ask.isl for ask in asks) == pytest.approx(240, rel=0.1)
    assert statistics.fmean(ask.osl for ask in asks) == pytest.approx(317, rel=0.1)
    assert max(ask.osl for ask in asks) <= 512  # where the suite cuts
    assert asks[-1].at_s == pytest.approx(300 / 5, rel=0.2)


def test_how_long_a_request_waits(public: list[Point]) -> None:
    """A single client waits for itself alone; one among many waits for others too."""
    from dataclasses import replace

    point = next(p for p in public if p.isl == 1024 and p.engine == "vllm")
    alone = predict_point(replace(point, concurrency=1, prompts=16))
    many = predict_point(replace(point, concurrency=128, prompts=512))
    assert alone.waited == pytest.approx(1, abs=0.1)
    assert many.waited > 2 * alone.waited


def test_rows_that_say_too_little_are_left_out(write) -> None:  # type: ignore[no-untyped-def]
    path = write(
        row(model="Someone/Else-7B"), row(gpu="TPU v5"), row(isl=""), row(gpu="A40 (not stated)"),
        row(concurrency_or_rate="max throughput, all requests queued"),
        row(source="FreedomIntelligence/AccelMark x", notes="no suite"),
    )  # fmt: skip
    assert read_points(path) == []


def test_damaged_files_are_one_error(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="ttft_ms in line 3 is not a number"):
        read_points(write(row(), row(ttft_ms="fast")))
    with pytest.raises(UsageError, match="lacks a column"):
        read_points(write(row(), columns=COLUMNS[:5]))
    with pytest.raises(UsageError, match="cannot read"):
        read_points(tmp_path / "absent.csv")


def test_the_same_requests_for_the_same_seed(write) -> None:  # type: ignore[no-untyped-def]
    (point,) = read_points(write(row(source="x", notes="source_file=2026-04-06.csv")))
    asks = asks_of(point)
    assert asks == asks_of(point)
    assert {ask.isl <= 1024 and ask.isl >= 0.79 * 1024 for ask in asks} == {True}
    engine = engine_for(point)
    assert engine.pool_tokens > 100_000  # 2 x 80 GB less 64 GB of weights at 256 KiB a token
    assert engine.step_tokens == 8192


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    """The committed public points on Hopper, as rows of a points file."""
    rows = [
        row(source="pypi:x" if point.source.startswith("pypi") else point.source,
            model=point.model, gpu=point.gpu, n_gpus=str(point.tp),
            precision=PRECISION[point.quant], engine=point.engine, isl=str(point.isl),
            osl=str(point.osl), concurrency_or_rate=str(point.concurrency),
            ttft_ms=str(point.ttft_s * 1e3), itl_ms=str(point.tpot_s * 1e3),
            notes="source_file=2026" if "range ratio" in point.assumed else "")
        for point in public_points()
        if point.gpu in ("H100-SXM", "H200") and "A3B" not in point.model and not point.speculative
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("points") / "public.csv"
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return read_points(path)


def test_dense_points_on_hopper_hold_the_bars(public: list[Point]) -> None:
    """A guard against regressions: these groups were seen by the fit (docs/accuracy.md has the
    errors of groups left out).
    """
    tpot, ttft, covered = [], [], []
    for point in public:
        predicted = predict_point(point)
        tpot.append(abs(predicted.tpot_s / point.tpot_s - 1))
        ttft.append(abs(predicted.ttft_s / point.ttft_s - 1))
        low, high = spread_of("tpot")
        covered.append(low <= point.tpot_s / predicted.tpot_s <= high)
    assert len(tpot) > 40
    assert statistics.median(tpot) <= 0.08
    assert statistics.median(ttft) <= 0.25  # each group by its lightest and heaviest load
    assert 0.7 <= sum(covered) / len(covered) <= 1


class Handle:
    """Stands in for the peer's engine: a decode step of 13 ms, one bad cell of 790."""

    def decode_step_latency(self, n: int, isl: int, osl: int) -> float:
        return 790.0 if n == 1 else 13.0

    def mixed_step_latency(self, *_: int) -> float:
        return 60.0

    def predict_prefill_latency(self, *_: int) -> float:
        return 55.0


def test_bad_cells_of_a_table_give_way_to_the_guard(public: list[Point]) -> None:
    point = next(
        p for p in public if p.model == "Qwen/Qwen3-32B" and p.tp == 2 and p.quant == "none"
    )
    guard = cost_of(point)
    cost = TableCost(Handle(), guard)
    alone, eight = [Shape(1, 1000)], [Shape(1, 1000)] * 8
    assert cost.seconds(alone) == guard.seconds(alone)
    assert cost.seconds(eight) == pytest.approx(0.013)
    assert cost.seconds([*eight, Shape(1024, 0)]) == pytest.approx(0.060)
    assert cost.seconds([Shape(1024, 0)]) == pytest.approx(0.055)
    assert (cost.replaced, cost.asked) == (1, 4)


@pytest.mark.skipif(load_tables() is not None, reason="the extra is installed")
def test_without_the_extra_it_says_how_to_get_it(public: list[Point]) -> None:
    guard = cost_of(public[0])
    with pytest.raises(BrokenStackError, match=r"pip install 'hullspeed\[aiconfigurator\]'"):
        table_cost(guard.terms.work.arch, "H100-SXM", 1, "vllm", guard, "bf16")
