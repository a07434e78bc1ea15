from __future__ import annotations

from pathlib import Path

from hullspeed.verify import CHECKS

PAGE = Path(__file__).parents[2] / "docs" / "verify.md"


def test_every_check_has_its_section() -> None:
    text = PAGE.read_text("utf-8")
    for check in CHECKS:
        section = text.split(f"### {check.code}: {check.title}\n", 1)[1].split("\n### ", 1)[0]
        assert f"- **How**: {(check.ask.__doc__ or '').strip()}" in section
        assert f"- **Why**: {check.why}." in section
        assert f"- **Fix**: {check.fix}." in section
