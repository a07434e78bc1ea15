"""The interpreter and the C library."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.findings import Finding
from hullspeed.preflight import tables
from hullspeed.preflight.case import Case, below
from hullspeed.preflight.codes import found


def version(case: Case) -> Iterator[Finding]:
    """PF001: a Python that the engine's wheels are not built for."""
    needs = (case.row.python if case.row else "") or case.engine.python
    seen = case.stack.python.version
    if not tables.fits(seen, needs):
        yield found("PF001", python=seen, needs=needs, **case.named)


def implementation(case: Case) -> Iterator[Finding]:
    """PF002: PyPy and others."""
    if case.stack.python.implementation != "CPython":
        yield found("PF002", implementation=case.stack.python.implementation)


def c_library(case: Case) -> Iterator[Finding]:
    """PF063: a glibc older than the wheels' platform tag."""
    seen, needs = case.stack.system.glibc, case.engine.glibc
    if seen and needs and below(seen, needs):
        yield found("PF063", seen=seen, needs=needs, **case.named)


RULES = (version, implementation, c_library)
