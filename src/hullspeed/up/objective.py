"""judge: what had to hold, and whether it did. The exit code of ``up`` is decided here alone."""

from __future__ import annotations

from collections.abc import Sequence

from hullspeed.plan.plan import Plan
from hullspeed.up.result import MeasuredCell, Objective
from hullspeed.verify.report import Outcome, VerifyReport


def judge(plan: Plan, verified: VerifyReport, measured: Sequence[MeasuredCell]) -> list[Objective]:
    """Every objective with its evidence, in the order of the stages.

    A prediction that was wrong is shown in the report, but is no objective: the server is no worse
    for it.
    """
    checks = len(verified.checks)
    objectives = [
        Objective(name="the plan fits", held=plan.verdict == "fits", evidence=plan.summary),
        Objective(
            name="the endpoint is correct",
            held=verified.passed,
            evidence=f"{verified.count(Outcome.PASSED)} of {checks} checks passed"
            + "".join(f"; {finding.code} {finding.what}" for finding in verified.findings),
        ),
    ]
    for cell in measured:
        objectives.append(_served_all(cell))
        found = cell.measured
        if found is not None and found.goodput is not None:
            goodput = found.goodput
            objectives.append(
                Objective(
                    name=f"{cell.cell.title}: within the latency objective",
                    held=goodput.held,
                    evidence=f"{goodput.good} of {goodput.total} requests",
                )
            )
    return objectives


def _served_all(cell: MeasuredCell) -> Objective:
    found = cell.measured
    name = f"{cell.cell.title}: every request served"
    if found is None:
        return Objective(name=name, held=False, evidence="not measured")
    evidence = f"{found.ok} of {found.requests} requests"
    if found.failures:
        evidence += f"; {found.failures}; first: {found.first_error}"
    return Objective(name=name, held=found.ok == found.requests > 0, evidence=evidence)
