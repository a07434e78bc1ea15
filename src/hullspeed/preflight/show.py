"""The chain as lines of text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hullspeed.findings import Finding, Severity
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.chain import LinkResult
from hullspeed.preflight.gate import exit_code

_MARKS = {Severity.ERROR: "✗", Severity.WARNING: "!", Severity.INFO: "·"}


def as_lines(chain: Sequence[LinkResult], overrides: Sequence[str] = ()) -> Iterator[str]:
    """The chain link by link, each with what was seen, then the verdict."""
    width = max(len(link.name) for link in chain)
    for link in chain:
        mark = ("✓" if link.looked else "–") if link.ok else "✗"
        yield f"{mark} {link.name:<{width}}  {link.seen}"
        for finding in link.findings:
            yield from _finding_lines(finding, overrides, " " * (width + 4))
    yield verdict([finding for link in chain for finding in link.findings], overrides)


def _finding_lines(finding: Finding, overrides: Sequence[str], indent: str) -> Iterator[str]:
    mark = _MARKS[finding.severity]
    note = " (overridden)" if finding.code in overrides else ""
    yield f"{indent}{mark} {finding.code} {finding.what}{note}"
    yield f"{indent}  fix: {finding.fix}"


def verdict(findings: Sequence[Finding], overrides: Sequence[str] = ()) -> str:
    """One line: whether it is safe to load the model."""
    errors = [f for f in findings if f.severity is Severity.ERROR and f.code not in overrides]
    warnings = [finding for finding in findings if finding.severity is Severity.WARNING]
    if errors:
        return f"gate closed: {_count(len(errors), 'error')}, {_count(len(warnings), 'warning')}"
    return f"gate open: safe to load ({_count(len(warnings), 'warning')})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def as_data(ask: Ask, chain: Sequence[LinkResult], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """For ``--json``: the verdict, the chain and every finding."""
    findings = [finding for link in chain for finding in link.findings]
    return {
        "ok": exit_code(findings, overrides) == 0,
        "exit_code": exit_code(findings, overrides),
        "engine": ask.engine,
        "model": ask.model,
        "overridden": [finding.code for finding in findings if finding.code in overrides],
        "chain": [
            {
                "link": link.name,
                "ok": link.ok,
                "looked": link.looked,
                "seen": link.seen,
                "findings": [msgspec.to_builtins(finding) for finding in link.findings],
            }
            for link in chain
        ],
    }
