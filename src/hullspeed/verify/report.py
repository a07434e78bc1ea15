"""VerifyReport: what was asked, what was found."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hullspeed.findings import Finding, Severity


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check.

    Attributes:
        reason: Why it was skipped.
    """

    code: str
    title: str
    outcome: Outcome
    reason: str
    seconds: float
    findings: list[Finding]


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every check of a run, in order."""

    url: str
    model: str
    version: str
    apis: list[str]
    checks: list[CheckResult]

    @property
    def findings(self) -> list[Finding]:
        """All findings, in order."""
        return [finding for check in self.checks for finding in check.findings]

    @property
    def passed(self) -> bool:
        """Whether there is no finding of severity error."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def count(self, outcome: Outcome) -> int:
        """How many checks ended so."""
        return sum(check.outcome is outcome for check in self.checks)
