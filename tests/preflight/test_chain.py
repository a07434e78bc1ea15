"""Every planted stack is found with its own code; sound ones pass with no finding."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from hullspeed.findings import Severity
from hullspeed.preflight.chain import check, links
from hullspeed.preflight.codes import codes
from hullspeed.preflight.gate import exit_code

_SPEC = importlib.util.spec_from_file_location(
    "preflight_stacks", Path(__file__).with_name("stacks.py")
)
assert _SPEC is not None and _SPEC.loader is not None
stacks = importlib.util.module_from_spec(_SPEC)
sys.modules["preflight_stacks"] = stacks
_SPEC.loader.exec_module(stacks)

PLANTED = stacks.planted()


@pytest.mark.parametrize("name", ["cpu", "h100", "h100x16"])
def test_sound_stack_has_no_finding(name: str) -> None:
    ask, stack = stacks.healthy(name)
    assert check(ask, stack) == []
    assert all(link.ok for link in links(ask, stack))


@pytest.mark.parametrize("name", PLANTED)
def test_planted_stack_is_found_with_its_own_code(name: str) -> None:
    planted = PLANTED[name]
    ask, stack = planted.build()
    seen = [finding.code for finding in check(ask, stack)]
    assert planted.code in seen
    assert set(seen) <= {planted.code, *planted.also}


def test_every_code_but_the_lock_s_is_planted() -> None:
    planted = {stack.code for stack in PLANTED.values()}
    assert {code for code, row in codes().items() if row.link != "lock"} == planted
    assert len(PLANTED) >= 40


@pytest.mark.parametrize("name", PLANTED)
def test_findings_are_filled_and_exit_code_follows_the_table(name: str) -> None:
    ask, stack = PLANTED[name].build()
    findings = check(ask, stack)
    for finding in findings:
        assert "{" not in finding.what + finding.why + finding.fix
        assert finding.fix and finding.why and finding.evidence
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    broken = any(codes()[finding.code].broken for finding in errors)
    assert exit_code(findings) == (3 if broken else 1 if errors else 0)


def test_a_finding_stands_in_the_link_that_its_code_names() -> None:
    ask, stack = PLANTED["driver-535-with-cuda-13-wheel"].build()
    by_name = {link.name: link for link in links(ask, stack)}
    assert [finding.code for finding in by_name["driver"].findings] == ["PF036"]
    assert not by_name["driver"].ok
    assert by_name["gpu"].ok


def test_what_lies_behind_a_missing_driver_is_not_called_sound() -> None:
    ask, stack = PLANTED["container-without-gpus-flag"].build()
    looked = {link.name: link.looked for link in links(ask, stack)}
    assert not any(looked[name] for name in ("driver", "cuda", "capacity"))
    assert looked["gpu"] and looked["engine"]
