from __future__ import annotations

import pytest

from hullspeed.findings import Severity
from hullspeed.verify import CHECKS, Outcome, run

from .fake_endpoint import fake_endpoint

MUTANTS = [
    ("V001", "no_tokens"),
    ("V002", "reasoning_only"),  # field case V01
    ("V003", "plain_text"),
    ("V003", "no_finish"),
    ("V003", "no_done"),
    ("V003", "two_done"),
    ("V003", "error_event"),
    ("V003", "abort"),
    ("V004", "no_usage"),
    ("V004", "bad_total"),
    ("V004", "stream_counts_differ"),
    ("V005", "stripped_pieces"),
    ("V006", "cache_state"),  # V03
    ("V007", "stop_by_token"),
    ("V007", "stop_included"),
    ("V007", "stop_as_length"),
    ("V008", "one_too_many"),
    ("V008", "ends_early"),
    ("V009", "per_token_decode"),
    ("V010", "garbage_from_3"),  # V04
    ("V011", "ghosts"),  # V05
    ("V012", "silent_cut"),  # V06
    ("V013", "accepts_bad"),
    ("V013", "crash_500"),
    ("V013", "no_error_object"),
    ("V014", "no_logprobs"),
    ("V014", "shifted_logprobs"),
    ("V015", "seed_ignored"),
    ("V015", "always_greedy"),
    ("V016", "double_bos"),  # V07
    ("V017", "think_leak"),  # V09
    ("V018", "empty_calls"),  # V02
    ("V018", "calls_differ"),  # V10
    ("V019", "schema_ignored"),  # V08
]


async def test_a_correct_endpoint_has_no_findings() -> None:
    async with fake_endpoint() as fake:
        report = await run(fake.url)
    assert report.findings == []
    assert report.passed
    assert {check.code: check.reason for check in report.checks if check.reason} == {}
    assert report.count(Outcome.PASSED) == len(CHECKS)


@pytest.mark.parametrize(("code", "fault"), MUTANTS)
async def test_a_planted_fault_is_caught_by_its_check(code: str, fault: str) -> None:
    async with fake_endpoint(fault) as fake:
        report = await run(fake.url, only=[code])
    (check,) = report.checks
    assert check.outcome is Outcome.FAILED, check
    assert {finding.code for finding in check.findings} == {code}
    for finding in check.findings:
        assert finding.severity is Severity.ERROR
        assert finding.evidence["curl"].startswith("curl -s")
        assert len(finding.evidence) > 1
        assert finding.why
        assert finding.fix
        assert "shape that this check cannot read" not in finding.what


def test_every_check_has_a_mutant_and_its_own_code() -> None:
    codes = [check.code for check in CHECKS]
    assert codes == sorted(set(codes))
    assert set(codes) == {code for code, _ in MUTANTS}


@pytest.mark.parametrize("faults", [(), ("ghosts",)])
async def test_without_metrics_ghosts_are_felt_by_the_next_client(faults: tuple[str, ...]) -> None:
    async with fake_endpoint(*faults, metrics=False, slots=4) as fake:
        report = await run(fake.url, only=["V011"])
    assert report.passed is not bool(faults)
