"""Every finding that memory and explain-log can raise has a section in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE = re.compile(r"\"((?:EL|MEM)\d{3})\"")


def test_every_code_has_a_section_and_every_section_a_code() -> None:
    sources = [
        *(ROOT / "src/hullspeed/memory").glob("*.py"),
        *(ROOT / "src/hullspeed/plan/explain_log").glob("*.py"),
    ]
    raised = {code for path in sources for code in CODE.findall(path.read_text(encoding="utf-8"))}
    text = (ROOT / "docs/explain-log.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^### (\w+)$", text, flags=re.MULTILINE))
    assert raised == documented
