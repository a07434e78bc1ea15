"""Codes: the table of findings that the gate can report, and how one is made."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files

import msgspec

from hullspeed.findings import Finding, Severity

LINKS = (
    "python", "cpu", "memory", "gpu", "driver", "cuda", "torch", "engine", "model", "parallel",
    "capacity", "system", "lock",
)  # fmt: skip


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """One row of ``codes.toml``.

    Attributes:
        link: The place in the chain, one of ``LINKS``.
        broken: Whether the environment itself is wrong (exit 3 instead of 1).
        what: Template of the sentence, filled with the evidence; ``fix`` likewise.
        looks_at: Where the evidence comes from.
    """

    title: str
    link: str
    severity: Severity
    what: str
    why: str
    looks_at: str
    fix: str
    broken: bool = False


@functools.cache
def codes() -> dict[str, Code]:
    """Every code of the gate, in order."""
    text = files("hullspeed.preflight").joinpath("codes.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Code])


def found(code: str, **evidence: object) -> Finding:
    """The finding ``code`` with its texts filled from ``evidence``."""
    row = codes()[code]
    shown = {name: str(value) for name, value in evidence.items()}
    return Finding(
        code=code,
        severity=row.severity,
        what=row.what.format(**shown),
        why=row.why.format(**shown),
        evidence=shown,
        fix=row.fix.format(**shown),
    )
