"""UpResult: everything that ``up`` saw, as data."""

from __future__ import annotations

import msgspec

from hullspeed.bench.result import BenchResult
from hullspeed.bench.result import Cell as Measured
from hullspeed.findings import Finding
from hullspeed.plan.plan import Plan
from hullspeed.up.loads import Cell
from hullspeed.up.predicted import Prediction
from hullspeed.verify.report import VerifyReport


class MeasuredCell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: what was expected and what came."""

    cell: Cell
    predicted: Prediction
    bench: BenchResult

    @property
    def measured(self) -> Measured | None:
        """The measurement, if it was not interrupted before it began."""
        return self.bench.cells[0] if self.bench.cells else None


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that had to hold, and the evidence."""

    name: str
    held: bool
    evidence: str


class UpResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run.

    Attributes:
        skipped: Parts of the checkpoint that the server did not load, in words.
        stages_s: Seconds of each stage, in order.
        objectives: The exit code is 0 exactly when all of them held.
    """

    model: str
    version: str
    machine: str
    ready_s: float
    skipped: tuple[str, ...] = ()
    stages_s: dict[str, float]
    plan: Plan
    preflight: list[Finding]
    verify: VerifyReport
    cells: list[MeasuredCell]
    objectives: list[Objective]

    @property
    def ok(self) -> bool:
        """Whether every objective held."""
        return all(objective.held for objective in self.objectives)
