"""nearest: published measurements that come closest to what was asked, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from hullspeed.perf.nearest import PublicPoint
from hullspeed.report.blocks import Table
from hullspeed.units import format_seconds


def nearest_table(points: Sequence[PublicPoint]) -> Table:
    """A row for each point."""
    rows = tuple(
        (
            f"{point.model} {point.quant}, {point.tp} x {point.gpu}",
            f"{point.engine} {point.version}".strip() + (" +MTP" if point.speculative else ""),
            f"{point.isl:,}/{point.osl:,} x {point.concurrency}",
            format_seconds(point.ttft_s),
            format_seconds(point.tpot_s),
            point.source.split("@")[0][:60],
        )
        for point in points
    )
    return Table(
        header=("nearest measured points", "engine", "load", "TTFT", "TPOT", "source"),
        rows=rows,
        text_columns=3,
    )
