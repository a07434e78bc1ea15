"""The documentation of the codes is written from the table and complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hullspeed.preflight import docs
from hullspeed.preflight.codes import LINKS, codes, found

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == docs.render() + "\n"


@pytest.mark.parametrize("name", codes())
def test_a_code_has_its_section_with_what_why_evidence_fix(name: str) -> None:
    section = PAGE.read_text(encoding="utf-8").split(f"### {name}: ")[1].split("### ")[0]
    for heading in ("What", "Why", "Evidence", "Fix"):
        (text,) = re.findall(rf"- \*\*{heading}\.\*\* (.+)", section)
        assert len(text) > 8


def test_codes_are_well_formed() -> None:
    for name, code in codes().items():
        assert re.fullmatch(r"PF\d{3}", name)
        assert code.link in LINKS
    assert list(codes()) == sorted(codes())


def test_a_finding_is_filled_from_its_evidence() -> None:
    finding = found("PF013", threads=16, usable=2)
    assert finding.what == "16 threads asked for, 2 cores usable"
    assert finding.evidence == {"threads": "16", "usable": "2"}
    assert finding.fix == "use --threads 2"
