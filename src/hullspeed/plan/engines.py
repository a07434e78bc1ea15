"""Engine choice: the decision table of ``engines.toml`` met with the facts of a case."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

_FILE = Path(__file__).with_name("engines.toml")
ENGINES = ("vllm", "sglang", "trtllm", "transformers", "hullspeed")
TIGHT_TPOT_S = 0.015
SHARED_SHARE = 0.25

FACTS = frozenset({
    "no_gpu", "gpu", "nvidia", "amd", "hybrid", "dense", "moe", "does_not_fit", "shared_prefix",
    "structured", "concurrent", "single", "tight_latency",
})  # fmt: skip
"""Everything that a row may ask."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One row that applied.

    Attributes:
        row: Its id in the table.
        points: What it adds for the engine; 0 where it rules the engine out.
        changes: What would make it no longer apply.
    """

    row: str
    kind: str
    points: int
    why: str
    changes: str


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with everything that speaks for and against it."""

    engine: str
    possible: bool
    points: int
    reasons: tuple[Reason, ...]


def choose(facts: frozenset[str]) -> tuple[Choice, ...]:
    """Every engine, best first: possible ones before those ruled out, then by points, then in the
    table's own order.
    """
    unknown = facts - FACTS
    if unknown:
        raise ValueError(f"no row can ask for {sorted(unknown)}")
    reasons: dict[str, list[Reason]] = {engine: [] for engine in ENGINES}
    out: set[str] = set()
    for row in _rows():
        if not set(row["when"]) <= facts or facts & set(row.get("unless", ())):
            continue
        engines = row["rules_out"] if row["kind"] == "gate" else [row["prefers"]]
        points = 0 if row["kind"] == "gate" else int(row["points"])
        reason = Reason(
            row=row["id"],
            kind=row["kind"],
            points=points,
            why=row["reason"],
            changes=row["changes"],
        )
        for engine in engines:
            reasons[engine].append(reason)
        if row["kind"] == "gate":
            out.update(engines)
    choices = [
        Choice(
            engine=engine,
            possible=engine not in out,
            points=sum(reason.points for reason in reasons[engine]),
            reasons=tuple(reasons[engine]),
        )
        for engine in ENGINES
    ]
    return tuple(sorted(choices, key=lambda c: (not c.possible, -c.points)))


@cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))["row"]
    for row in rows:
        asked = set(row["when"]) | set(row.get("unless", ()))
        if not asked <= FACTS:
            raise ValueError(f"row {row['id']} asks for unknown facts {sorted(asked - FACTS)}")
    return rows
