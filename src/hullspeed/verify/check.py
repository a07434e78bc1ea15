"""Check: one named question to an endpoint, and how its answer becomes findings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from hullspeed.findings import Finding, Severity
from hullspeed.verify.endpoint import Endpoint, Request


class Skip(Exception):  # noqa: N818 - not an error: the check does not apply here
    """The endpoint does not offer what the check is about; the message says what."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that a check found wrong.

    Attributes:
        request: The request that shows it.
        seen: Values that prove it.
    """

    what: str
    request: Request
    seen: Mapping[str, object] = field(default_factory=dict)
    severity: Severity = Severity.ERROR


Question = Callable[[Endpoint], Awaitable[list[Fault]]]


@dataclass(frozen=True, slots=True)
class Check:
    """A question with a stable code.

    Attributes:
        title: What is true of a correct endpoint.
        why: What goes wrong for its users otherwise.
        fix: Where to look.
    """

    code: str
    title: str
    why: str
    fix: str
    ask: Question

    def finding(self, fault: Fault) -> Finding:
        """The fault as the one shape of report, with a curl line that repeats it."""
        evidence = {name: _shown(value) for name, value in fault.seen.items()}
        return Finding(
            code=self.code,
            severity=fault.severity,
            what=fault.what,
            why=self.why,
            evidence=evidence | {"curl": fault.request.curl},
            fix=self.fix,
        )


def check(code: str, title: str, *, why: str, fix: str) -> Callable[[Question], Check]:
    """Make a check of the question below."""

    def make(ask: Question) -> Check:
        return Check(code, title, why, fix, ask)

    return make


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 400 else text[:397] + "..."
