"""A sweep's table: figures beside each other, and apart from them why some have none."""

from __future__ import annotations

from hullspeed.report.blocks import Table
from hullspeed.report.compared import METRICS, sweep_report
from hullspeed.twin.question import Outcome
from hullspeed.twin.summary import Objective

WHY = "tensor parallelism 3 does not divide 64 q_heads of full_attention (got 3)"


def test_a_sentence_does_not_widen_the_table_of_figures() -> None:
    outcome = Outcome(label="tp=3 gpu=a40", changes={"tp": "3", "gpu": "a40"}, error=WHY)
    report = sweep_report("t", [outcome], set(), Objective())
    figures, reasons = (
        block for section in report.sections for block in section.blocks if isinstance(block, Table)
    )
    assert figures.rows == (("3", "a40", "", *["-"] * len(METRICS)),)
    assert reasons.rows == (("tp=3 gpu=a40", WHY),)
    assert not report.ok
