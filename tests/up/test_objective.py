from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hullspeed.bench.result import BenchResult
from hullspeed.bench.result import Cell as Measured
from hullspeed.up.loads import cells
from hullspeed.up.objective import judge
from hullspeed.up.predicted import Prediction
from hullspeed.up.result import MeasuredCell
from hullspeed.verify.report import VerifyReport


class Fits:
    verdict = "fits"
    summary = "fits"


def measured(**changes: Any) -> MeasuredCell:
    some = {"count": 1, "mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
    distributions = ("ttft_s", "ttfot_s", "itl_s", "chunk_gap_s", "tpot_s", "max_gap_s", "e2e_s",
                     "prompt_tokens", "output_tokens")  # fmt: skip
    trust = {
        "verdict": "valid", "reasons": [], "notes": [], "loop_lag_p99_s": 0.0,
        "schedule_lag_p99_s": 0.0, "rate_asked": None, "rate_scheduled": None, "rate_sent": 1.0,
        "gap_cv": 0.0, "in_flight_asked": 1, "in_flight_max": 1, "in_flight_mean": 1.0,
        "prompt_tokens_asked": 1, "output_tokens_asked": 1, "overhead_tokens": 0.0,
        "cached_tokens_expected": 0.0, "token_counts": {}, "longest_silence_s": 0.0,
    }  # fmt: skip
    cell = {
        "load": "closed 1", "requests": 4, "ok": 4, "failures": {}, "first_error": "",
        "interrupted": False, "duration_s": 1.0, "turn_ttft_s": [], "output_tok_s": 1.0,
        "steady_output_tok_s": None, "requests_per_s": 1.0, "cached_tokens": None,
        "hit_rate": None, "goodput": None, "trust": trust,
        **dict.fromkeys(distributions, some), **changes,
    }  # fmt: skip
    result = {
        "spec": {"url": "http://127.0.0.1"}, "version": "0", "started_at": "", "cells": [],
        "prompt_tokens_by": "endpoint", "decoding": {},
    }  # fmt: skip
    bench = msgspec.structs.replace(
        msgspec.convert(result, BenchResult), cells=[msgspec.convert(cell, Measured)]
    )
    expected = Prediction(ttft_s=1.0, itl_s=1.0, output_tok_s=1.0, relative_error=0.2)
    return MeasuredCell(cell=cells(8192, isl_tokens=512, osl_tokens=64)[0], predicted=expected,
                        bench=bench)  # fmt: skip


def verified(severity: str | None = None) -> VerifyReport:
    findings = [{"code": "V006", "severity": severity, "what": "differs"}] if severity else []
    check = {"code": "V006", "title": "t", "outcome": "failed" if severity else "passed",
             "reason": "", "seconds": 0.0, "findings": findings}  # fmt: skip
    report = {"url": "u", "model": "m", "version": "0", "apis": ["chat"], "checks": [check]}
    return msgspec.convert(report, VerifyReport)


def held(cell: MeasuredCell, report: VerifyReport) -> bool:
    return all(objective.held for objective in judge(Fits(), report, [cell]))  # type: ignore[arg-type]


def test_all_well() -> None:
    assert held(measured(), verified())


@pytest.mark.parametrize("ok", [0, 3])
def test_a_failed_request_is_a_miss(ok: int) -> None:
    assert not held(measured(ok=ok, failures={"http 500": 4 - ok}), verified())


def test_a_finding_of_verify_is_a_miss() -> None:
    assert not held(measured(), verified("error"))
    assert held(measured(), verified("warning"))


def test_a_missed_limit_is_a_miss() -> None:
    goodput = {"good": 1, "total": 4, "share": 0.25, "low": 0.1, "high": 0.5, "good_per_s": 1.0,
               "share_by_means": 1.0, "held": False}  # fmt: skip
    assert not held(measured(goodput=goodput), verified())
    assert held(measured(goodput={**goodput, "held": True}), verified())


def test_nothing_measured_is_a_miss() -> None:
    cell = measured()
    empty = msgspec.structs.replace(cell, bench=msgspec.structs.replace(cell.bench, cells=[]))
    assert not held(empty, verified())


def test_a_plan_that_does_not_fit_is_a_miss() -> None:
    class Not(Fits):
        verdict = "does not fit"

    objectives = judge(Not(), verified(), [measured()])  # type: ignore[arg-type]
    assert [o.name for o in objectives if not o.held] == ["the plan fits"]


def test_cells_stay_within_the_context() -> None:
    for context in (128, 1024, 8192):
        for cell in cells(context, isl_tokens=512, osl_tokens=64):
            assert 0 < cell.isl_tokens <= context - cell.osl_tokens
