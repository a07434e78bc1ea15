"""Finding: the one shape in which plan, preflight and verify report what they saw."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How much a finding matters.

    ``error`` closes the gate (exit 1), ``warning`` is printed, ``info`` is kept for ``--json``.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing worth telling the user.

    Attributes:
        code: Stable identifier, e.g. ``PF012``; documented under that code.
        severity: See :class:`Severity`.
        what: One sentence: what is wrong.
        why: Why it matters here.
        evidence: The values seen, as text, e.g. ``{"driver": "535.104"}``.
        fix: What to do, as an exact command where there is one.
    """

    code: str
    severity: Severity
    what: str
    why: str = ""
    evidence: dict[str, str] = {}
    fix: str = ""
