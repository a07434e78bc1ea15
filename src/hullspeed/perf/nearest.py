"""Nearest measured points: what others measured that comes closest to what is asked."""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path

import msgspec

from hullspeed.arch import catalogue

_FILE = Path(__file__).with_name("public_points.csv")
# Distances: 1 is a factor of e in a length, or what two engines typically differ by.
_OTHER_GPU, _OTHER_ENGINE, _OTHER_FORMAT, _SPECULATIVE = 1.5, 0.5, 0.7, 1.0


class PublicPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One published measurement; seconds and tokens.

    Attributes:
        assumed: Of its protocol, what the publication does not say.
    """

    source: str
    model: str
    gpu: str
    tp: int
    quant: str
    engine: str
    version: str
    isl: int
    osl: int
    concurrency: int
    speculative: bool
    ttft_s: float
    tpot_s: float
    assumed: str = ""


def nearest_points(
    *, params: int, gpu: str, tp: int, quant: str, engine: str, isl: int, osl: int,
    concurrency: int, speculative: bool = False, count: int = 3,
) -> tuple[PublicPoint, ...]:  # fmt: skip
    """The ``count`` published points nearest to a model of ``params`` active parameters under this
    load, the nearest first.
    """

    def distance(point: PublicPoint) -> float:
        logs = (
            (_params(point.model), params, 1.5),
            (point.isl, isl, 0.5),
            (point.osl, osl, 0.25),
            (point.concurrency, concurrency, 0.5),
            (point.tp, tp, 1.0),
        )
        apart = sum(weight * abs(math.log(a / max(b, 1))) for a, b, weight in logs)
        apart += _OTHER_GPU * (point.gpu != gpu) + _OTHER_ENGINE * (point.engine != engine)
        return apart + (
            _OTHER_FORMAT * (point.quant[:3] != quant[:3])
            + _SPECULATIVE * (point.speculative != speculative)
        )

    return tuple(sorted(public_points(), key=distance)[:count])


@cache
def public_points() -> tuple[PublicPoint, ...]:
    """Every point of the committed table."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        rows = [dict(row, speculative=row["speculative"] == "1") for row in csv.DictReader(file)]
    return tuple(msgspec.convert(row, PublicPoint, strict=False) for row in rows)


@cache
def _params(model: str) -> int:
    return catalogue.load(model).params_per_token()
