"""Fit the cost model's coefficients to published measurements, and measure what that is worth.

    python benchmarks/fit_coefficients.py measured_points.csv > src/hullspeed/perf/coefficients.toml

Each row is played as it was measured; every term of every step is summed over the time that a
metric spans, so that a metric is linear in the coefficients. Least squares on relative errors,
reweighted towards the median, with a pull to physical starting values; schedules are replayed
with the new coefficients and the fit repeated. Hosts that a source names get a factor on what a
host costs, pulled to 1. Groups (model, format, GPUs, engine, source) that ``kept_back`` names take
no part in any of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fitting import (
    beside,
    fit,
    kept_back,
    left_out,
    rows_of,
    start,
    usable,
)
from fitting_report import write

from hullspeed.perf.points import read_points

ROUNDS = 3


def main(path: str) -> None:
    every = read_points(Path(path))
    points = [p for p in every if usable(p) and not kept_back(p)]
    model, rows = start(), []
    for turn in range(ROUNDS):
        rows = rows_of(points, model)
        model = fit(rows, model)
        sys.stderr.write(f"round {turn + 1}: {len(rows)} rows of {len(points)} points\n")
    folds = {
        "group": left_out(rows, model, lambda p: p.group),
        "gpu": left_out(rows, model, lambda p: p.gpu),
        "model": left_out(rows, model, lambda p: p.model),
        "source": left_out(rows, model, lambda p: p.family),
    }
    write(points, rows, model, folds, beside(every, model))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
