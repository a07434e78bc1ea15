"""EngineProfile: the rules of one engine at one version, read from ``profiles/<engine>.toml``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from hullspeed.errors import UsageError
from hullspeed.findings import Finding, Severity
from hullspeed.memory.budget import EngineSettings
from hullspeed.memory.layers import short_dtype

Version = tuple[int, int, int]
_VERSION = re.compile(r"^[v~]?(\d+)\.(\d+)(?:\.(\d+))?(?P<tail>.*)$")


def parse_version(text: str) -> Version:
    """``"0.26.1rc1.dev608+g99a1"`` as ``(0, 26, 1)``.

    Raises:
        UsageError: when it does not start with two numbers.
    """
    match = _VERSION.match(text.strip())
    if match is None:
        raise UsageError("not an engine version", seen=text, fix="write it as 0.33.0")
    return int(match[1]), int(match[2]), int(match[3] or 0)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What holds for one engine at one version.

    Attributes:
        version: The version asked for.
        extrapolated: ``version`` lies outside the range whose rules were checked.
        rules: The rows in force, by name.
    """

    engine: str
    version: Version
    checked: tuple[Version, Version]
    checked_source: str
    extrapolated: bool
    table: Mapping[str, Any]
    rules: Mapping[str, Mapping[str, Any]]

    def rule(self, name: str) -> Any:
        """Value of a rule at this version.

        Raises:
            KeyError: a rule that the profile does not have (a programming error).
        """
        return self.rules[name]["value"]

    def source(self, name: str) -> str:
        """Where the rule was seen."""
        return str(self.rules[name]["source"])

    def number(self, name: str) -> float:
        """A measured constant of the ``[overhead]`` table."""
        return float(self.table["overhead"][name])

    def rows(self, name: str) -> Sequence[Mapping[str, Any]]:
        """A list table, e.g. ``gpu_class``."""
        rows: Sequence[Mapping[str, Any]] = self.table[name]
        return rows

    @property
    def rules_text(self) -> str:
        """The version whose rules are in force, in words."""
        used = min(max(self.version, self.checked[0]), self.checked[1])
        return f"{used[0]}.{used[1]}"

    def findings(self) -> tuple[Finding, ...]:
        """That the version asked for is not one of those that were checked."""
        if not self.extrapolated:
            return ()
        version = ".".join(map(str, self.version))
        return (
            Finding(
                code="MEM006",
                severity=Severity.WARNING,
                what=f"{self.engine} {version} is extrapolated: rules of {self.rules_text} are "
                f"used, checked for {self.range_text}",
                evidence={"version": version, "checked": self.checked_source},
                fix="compare with the engine's own start-up log: hullspeed explain-log",
            ),
        )

    @property
    def range_text(self) -> str:
        """The checked range in words."""
        first, last = self.checked
        if first[:2] == last[:2]:
            return f"{first[0]}.{first[1]}"
        return f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"


def _in_force(rows: Sequence[Mapping[str, Any]], version: Version) -> dict[str, Mapping[str, Any]]:
    """The newest row of each name that is not newer than ``version``, else the oldest row."""
    chosen: dict[str, Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: parse_version(row["since"])):
        if row["name"] not in chosen or parse_version(row["since"]) <= version:
            chosen[row["name"]] = row
    return chosen


@cache
def _table(engine: str) -> Mapping[str, Any]:
    path = files("hullspeed.memory.profiles") / f"{engine}.toml"
    if not path.is_file():
        raise UsageError(
            "no memory profile for this engine",
            seen=engine,
            fix="use vllm, sglang, trtllm, transformers or hullspeed",
        )
    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def engine_profile(
    engine: str, version: str | None = None, *, extrapolate: bool = False
) -> EngineProfile:
    """The profile of ``engine`` at ``version`` (the newest checked one when ``None``).

    A version newer than the range is taken with the newest rules and marked extrapolated; an older
    one is refused unless ``extrapolate``: its planner worked differently.

    Raises:
        UsageError: unknown engine, unreadable version, or older than the checked range.
    """
    table = _table(engine)
    checked = table["checked"]
    first, last = parse_version(checked["first"]), parse_version(checked["last"])
    wanted = last if version is None else parse_version(version)
    if wanted < first and not extrapolate:
        raise UsageError(
            f"{engine} {version} is older than the versions whose memory rules were checked",
            seen=version,
            fix=f"the checked range is {checked['first']} to {last[0]}.{last[1]}",
        )
    return EngineProfile(
        engine=engine,
        version=wanted,
        checked=(first, last),
        checked_source=str(checked["source"]),
        extrapolated=not first <= wanted <= last,
        table=table,
        rules=_in_force(table["rule"], wanted),
    )


def profile_of(
    engine: str, settings: EngineSettings, *, extrapolate: bool = False
) -> EngineProfile:
    """The profile at ``settings.version``, where its engine has what else they ask for.

    Raises:
        UsageError: as :func:`engine_profile`, and for a KV cache type that the engine does not have
            at that version, or has in a format whose size is not known here.
    """
    profile = engine_profile(engine, settings.version, extrapolate=extrapolate)
    asked = settings.kv_dtype
    if asked is None or asked == "auto":
        return profile
    known = profile.rule("kv_dtypes")
    if short_dtype(asked) not in known:
        raise UsageError(
            f"{engine} {profile.rules_text} has no KV cache type of this name that can be planned",
            seen=asked,
            fix=f"use one of auto, {', '.join(known)}",
        )
    return profile
