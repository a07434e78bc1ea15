"""Measured tables behind ``--cost tables``: they answer; the guard catches bad cells, says so."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from hullspeed.arch import catalogue
from hullspeed.cli.main import run
from hullspeed.errors import BrokenStackError, UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf import measured_tables
from hullspeed.perf.fitted import FittedCost
from hullspeed.perf.measured_tables import TableCost, table_cost
from hullspeed.perf.speculative import SpeculativeCost
from hullspeed.perf.work import Shape
from hullspeed.plan.measured import model_of

MODEL = "Qwen/Qwen3-32B"
PLAN = ["plan", MODEL, "--gpu", "h100-sxm", "--context", "4096", "--concurrency", "4", "--json"]
SIMULATE = ["simulate", MODEL, "--gpu", "h100-sxm", "--concurrency", "4", "--requests", "16",
            "--isl", "1024", "--osl", "32", "--json"]  # fmt: skip
TABLES = ["--cost", "tables"]
INSTALLED = importlib.util.find_spec("aiconfigurator_core") is not None


class Table:
    """Milliseconds about as an H100 takes them for 32B in 16 bit, times ``factor``."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def decode_step_latency(self, n: int, isl: int, osl: int) -> float:
        return self.factor * (26.0 + n * isl * 1e-4)

    def predict_prefill_latency(self, n: int, isl: int, prefix: int) -> float:
        return self.factor * (20.0 + 0.09 * n * (isl - prefix))

    def mixed_step_latency(self, tokens: int, n: int, isl: int, osl: int, prefix: int) -> float:
        if n == 7:
            raise RuntimeError("perf database error: no data to anchor query")
        return self.factor * (26.0 + 0.09 * tokens)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a table of one model on one H100 in the package's place."""

    def put(factor: float) -> None:
        def handle(name: str, quant: str, gpu: str, tp: int, *_: str) -> Table | None:
            held = (name, quant, gpu, tp) == (MODEL, "none", "H100-SXM", 1)
            return Table(factor) if held else None

        monkeypatch.setattr(measured_tables, "require_tables", lambda: None)
        monkeypatch.setattr(measured_tables, "_handle", handle)
        monkeypatch.setattr(measured_tables, "_peers", lambda: ((MODEL, catalogue.load(MODEL)),))

    return put


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(list(arguments)) in (0, 1)
    return json.loads(capsys.readouterr().out)


def fitted(tp: int = 1, quant: str = "none") -> FittedCost:
    planned = model_of(MODEL, quant)
    bytes_ = planned.weights.decoder
    return FittedCost(planned.arch, find_gpu("h100-sxm"), weight_bytes=bytes_, tp=tp)


def test_plan_is_answered_by_the_tables(capsys: pytest.CaptureFixture[str], install: Any) -> None:
    plain = said(capsys, *PLAN)["speed"]
    assert plain["cost_model"] == "fitted"
    seen = []
    for factor in (1.0, 1.3):
        install(factor)
        speed = said(capsys, *PLAN, *TABLES)["speed"]
        assert speed["cost_model"] == "tables"
        assert "aiconfigurator-core 0.12.0, vllm 0.24.0 on 1 x H100-SXM" in speed["source"]
        seen.append(speed)
    assert seen[1]["prefill_s"]["value"] == pytest.approx(1.3 * seen[0]["prefill_s"]["value"])
    assert seen[1]["itl_s"]["value"] == pytest.approx(1.3 * seen[0]["itl_s"]["value"], rel=0.02)
    assert seen[0]["itl_s"]["value"] != plain["itl_s"]["value"]
    assert run([*PLAN[:-1], *TABLES]) in (0, 1)
    assert "measured tables: aiconfigurator-core" in " ".join(capsys.readouterr().out.split())


def test_simulate_is_answered_by_the_tables(
    capsys: pytest.CaptureFixture[str], install: Any
) -> None:
    plain = said(capsys, *SIMULATE)
    install(1.3)
    told = said(capsys, *SIMULATE, *TABLES)
    assert (plain["cost_model"], told["cost_model"]) == ("fitted", "tables")
    # A decode step of four at about 1,040 tokens, as the table has it.
    decode_s = 1.3 * (26.0 + 4 * 1040 * 1e-4) / 1e3
    assert told["summary"]["itl_s"]["p50"] == pytest.approx(decode_s, rel=0.01)
    assert run([*SIMULATE[:-1], *TABLES]) == 0
    assert "measured tables: aiconfigurator-core" in " ".join(capsys.readouterr().out.split())
    swept = said(capsys, *SIMULATE, *TABLES, "--sweep", "gpu=h100-sxm,a40", "--workers", "1")
    h100, a40 = swept["outcomes"]
    assert "measured tables" in h100["cost_source"]
    assert "do not hold this GPU" in a40["error"]


@pytest.mark.parametrize("factor", [30.0, 0.03])
def test_bad_cells_give_way_to_the_guard_and_are_counted(
    capsys: pytest.CaptureFixture[str], install: Any, factor: float
) -> None:
    plan, played = said(capsys, *PLAN)["speed"], said(capsys, *SIMULATE)["summary"]
    install(factor)
    speed, told = said(capsys, *PLAN, *TABLES)["speed"], said(capsys, *SIMULATE, *TABLES)
    assert speed["itl_s"]["value"] == plan["itl_s"]["value"]
    assert told["summary"] == played
    for source in (speed["source"], told["cost_source"]):
        words = source.partition("; ")[2].split()
        assert words[0] == words[2] != "0"  # all of those asked
        assert "more than a factor of 3 from the fitted cost" in source


def test_an_absent_cell_is_the_guards_as_well() -> None:
    cost = TableCost(Table(1.0), fitted())
    shapes = [*[Shape(1, 1000)] * 7, Shape(1024, 0)]
    assert cost.seconds(shapes) == cost.guard.seconds(shapes)
    assert cost.seconds([Shape(1, 1000), Shape(1024, 0)]) == pytest.approx(0.11816)
    assert (cost.replaced, cost.asked) == (1, 2)


def test_drafts_are_verified_at_the_tables_cost() -> None:
    table = TableCost(Table(1.0), fitted())
    each = SpeculativeCost(table, 3, 3.0).seconds([Shape(1, 1000)] * 2)
    verify_s = (26.0 + 8 * 250 * 1e-4) / 1e3
    assert verify_s / 3 < each < 1.3 * verify_s / 3
    assert table.replaced == 0


def test_what_is_not_held_is_one_error_that_names_what_is(
    capsys: pytest.CaptureFixture[str], install: Any
) -> None:
    install(1.0)
    cases = (
        (MODEL, "a40", "do not hold this GPU (got 'A40'). there: H100-SXM, H200, B200"),
        ("Qwen/Qwen3-14B", "h100-sxm", f"this model (got 'Qwen/Qwen3-14B'). there: {MODEL}; or"),
        (f"{MODEL}-FP8", "h100-sxm", "bf16 KV cache (got 'fp8_block'). there: none; or leave"),
    )
    for model, gpu, words in cases:
        for command in ("plan", "simulate"):
            assert run([command, model, "--gpu", gpu, *TABLES]) == 2
            assert words in capsys.readouterr().err
    assert run(["plan", MODEL, *TABLES]) == 2
    assert "are of GPUs" in capsys.readouterr().err


@pytest.mark.skipif(INSTALLED, reason="the extra is installed")
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_without_the_extra_the_stack_is_at_fault(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run([command, MODEL, "--gpu", "h100-sxm", *TABLES]) == 3
    assert "pip install 'hullspeed[aiconfigurator]'" in capsys.readouterr().err


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.13.0")
    with pytest.raises(BrokenStackError, match=r"0\.12\.0 \(got '0\.13\.0'\)"):
        measured_tables.require_tables()


@pytest.mark.deep
@pytest.mark.skipif(not INSTALLED, reason="needs hullspeed[aiconfigurator]")
def test_the_real_tables() -> None:
    """Against a published point: 18.04 ms a token with 8 in flight of 1024/128 on 2 x H100 with
    vLLM, in which time each of the eight brings one prompt in 128 tokens.
    """
    arch, guard = catalogue.load(MODEL), fitted(tp=2)
    cost = table_cost(arch, "H100-SXM", 2, "vllm", guard, "bf16")
    token_s = cost.seconds([Shape(1, 1088)] * 8) + 8 * cost.seconds([Shape(1024, 0)]) / 128
    assert token_s == pytest.approx(0.01804, rel=0.15)
    assert cost.seconds([Shape(2048, 0)]) > 2 * cost.seconds([Shape(512, 0)])
    assert cost.replaced == 0
    experts = catalogue.load("Qwen/Qwen3-30B-A3B")
    with pytest.raises(UsageError, match="do not hold this weight format"):
        table_cost(model_of(MODEL, "awq").arch, "H100-SXM", 1, "vllm", guard, "bf16")
    sparse = FittedCost(experts, find_gpu("h100-sxm"))
    cost = table_cost(experts, "H100-SXM", 1, "vllm", sparse, "bf16")
    assert cost.seconds([Shape(1, 1000)] * 8) < 0.02


@pytest.mark.deep
@pytest.mark.skipif(not INSTALLED, reason="needs hullspeed[aiconfigurator]")
def test_the_commands_on_the_real_tables(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (PLAN, SIMULATE):
        ours, theirs = said(capsys, *arguments), said(capsys, *arguments, *TABLES)
        ours, theirs = (d.get("speed") or d["summary"] | d for d in (ours, theirs))
        assert theirs["cost_model"] == "tables"
        value = "value" if "value" in ours["itl_s"] else "p50"
        assert theirs["itl_s"][value] == pytest.approx(ours["itl_s"][value], rel=0.25)
        assert theirs["itl_s"][value] != ours["itl_s"][value]
