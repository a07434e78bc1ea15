"""A pasted log into typed events and the facts they state."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import msgspec

from hullspeed.errors import UsageError
from hullspeed.memory.profile import Version, parse_version

MAX_LOG_BYTES = 64 << 20
MAX_LINE_CHARACTERS = 200_000
MAX_NUMBER_CHARACTERS = 20
_TEXT_FIELDS = ("args", "config", "plan", "flags", "version", "architecture", "backend")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"(?:Worker_|\s)TP(\d{1,4})[ \]_]")
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class LinePattern:
    """One row of ``lines.toml``.

    Attributes:
        since, until: Versions between which the wording is used (``until`` exclusive), if bounded.
        kind: ``"fact"``, ``"error"`` (start-up stops) or ``"note"``.
    """

    engine: str
    name: str
    pattern: re.Pattern[str]
    example: str
    meaning: str
    kind: str = "fact"
    since: Version | None = None
    until: Version | None = None

    def holds_at(self, version: Version | None) -> bool:
        """Whether the wording belongs to this version (always, when the version is not known)."""
        if version is None:
            return True
        after = self.since is None or version >= self.since
        return after and (self.until is None or version < self.until)


@cache
def line_patterns() -> tuple[LinePattern, ...]:
    """All known lines, in the order of the file."""
    text = (files("hullspeed.plan.explain_log") / "lines.toml").read_text(encoding="utf-8")
    return tuple(
        LinePattern(
            engine=row["engine"],
            name=row["name"],
            pattern=re.compile(row["pattern"]),
            example=row["example"],
            meaning=row["meaning"],
            kind=row.get("kind", "fact"),
            since=parse_version(row["since"]) if "since" in row else None,
            until=parse_version(row["until"]) if "until" in row else None,
        )
        for row in tomllib.loads(text)["line"]
    )


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One recognised statement of a log.

    Attributes:
        line: Line number, from 1.
        count: How often the same statement was made (once per rank).
    """

    line: int
    engine: str
    name: str
    kind: str
    text: str
    meaning: str
    fields: dict[str, str]
    count: int = 1


@dataclass(frozen=True, slots=True)
class ParsedLog:
    """Events in the order of the log.

    Attributes:
        engine: ``"vllm"`` or ``"sglang"``.
        version: As the log states it.
        rules_version: The release whose rules hold; ``None`` for builds without a number.
        n_lines: Lines read, recognised or not.
        ranks: Tensor-parallel ranks seen in line prefixes, at least 1.
    """

    engine: str
    version: str | None
    events: tuple[LogEvent, ...]
    n_lines: int
    ranks: int = 1

    @property
    def rules_version(self) -> str | None:
        """The stated version, unless it is a development build's placeholder."""
        return None if _numbers(self.version) is None else self.version

    def named(self, name: str) -> tuple[LogEvent, ...]:
        """Events of one kind."""
        return tuple(event for event in self.events if event.name == name)

    def last(self, name: str, field: str) -> str | None:
        """The last value that a field was given: a restart within a log wins."""
        values = [e.fields[field] for e in self.events if e.name == name and field in e.fields]
        return values[-1] if values else None

    def least(self, name: str, field: str, *, after: str) -> str | None:
        """The smallest value among the ranks, after the last event named ``after``."""
        start = max((event.line for event in self.named(after)), default=0)
        values = [e.fields[field] for e in self.named(name) if e.line >= start]
        return min(values, key=float) if values else None

    @property
    def errors(self) -> tuple[LogEvent, ...]:
        """What stopped the start, in order."""
        return tuple(event for event in self.events if event.kind == "error")


def read_log(text: str) -> ParsedLog:
    """Recognise the lines of a vLLM or SGLang start-up log.

    Timestamps, rank and container prefixes and colours are ignored; a line that was wrapped is read
    again together with the next one.

    Raises:
        UsageError: empty, too large, not text, or without any known line.
    """
    if len(text.encode(errors="surrogatepass")) > MAX_LOG_BYTES:
        raise UsageError("the log is larger than 64 MiB", fix="cut it to the start-up part")
    if not text.strip():
        raise UsageError("the log is empty", fix="paste the start-up log of vLLM or SGLang")
    if "\x00" in text:
        raise UsageError("this is not a text log: it contains NUL bytes")
    lines = [_ANSI.sub("", line)[:MAX_LINE_CHARACTERS] for line in text.splitlines()]
    found = list(_recognise(lines))
    engine = _engine(found)
    version = _version(found)
    known = [
        (number, line, pattern, fields)
        for number, line, pattern, fields in found
        if pattern.engine in (engine, "any") and pattern.holds_at(_numbers(version))
    ]
    ranks = max((int(n) for line in lines for n in _RANK.findall(line[:120])), default=0) + 1
    return ParsedLog(engine, version, tuple(_merged(known, engine)), len(lines), min(ranks, 1024))


_Found = tuple[int, str, LinePattern, dict[str, str]]


def _recognise(lines: list[str]) -> Iterator[_Found]:
    for i, line in enumerate(lines):
        following = lines[i + 1] if i + 1 < len(lines) else ""
        for pattern in line_patterns():
            match = pattern.pattern.search(line)
            if match is None and following:
                joined = f"{line.rstrip()} {following.strip()}"
                match = pattern.pattern.search(joined)
                # Only a match that spans the break is new.
                if match is not None and pattern.pattern.search(following):
                    match = None
            if match is not None:
                fields = {name: value for name, value in match.groupdict().items() if value}
                if all(_plausible(name, value) for name, value in fields.items()):
                    yield i + 1, line, pattern, fields


def _plausible(name: str, value: str) -> bool:
    """No number is longer than twenty characters: damaged lines are not read."""
    return name in _TEXT_FIELDS or len(value) <= MAX_NUMBER_CHARACTERS


def _engine(found: list[_Found]) -> str:
    counts = {
        engine: sum(pattern.engine == engine for _, _, pattern, _ in found)
        for engine in ("vllm", "sglang")
    }
    if any(counts.values()):
        return max(counts, key=lambda engine: counts[engine])
    if found:
        return "vllm"
    raise UsageError(
        "no line of a vLLM or SGLang start-up log was recognised",
        fix="paste the log from the start of the server, as it was printed",
    )


def _version(found: list[_Found]) -> str | None:
    values = [fields["version"] for _, _, _, fields in found if "version" in fields]
    return values[-1] if values else None


def _numbers(version: str | None) -> Version | None:
    """As numbers; builds from a checkout call themselves 0.1.dev… or dev and have none."""
    if version is None or not version[:1].isdigit() or version.startswith("0.1.dev"):
        return None
    return parse_version(version)


def _merged(found: list[_Found], engine: str) -> Iterator[LogEvent]:
    """Equal statements of several ranks become one with a count."""
    merged: dict[tuple[str, str], LogEvent] = {}
    for number, line, pattern, fields in found:
        key = (pattern.name, repr(sorted(fields.items())))
        if key in merged:
            merged[key] = msgspec.structs.replace(merged[key], count=merged[key].count + 1)
            continue
        merged[key] = LogEvent(
            line=number,
            engine=engine,
            name=pattern.name,
            kind=pattern.kind,
            text=line.strip()[:400],
            meaning=_meaning(pattern.meaning, fields),
            fields=fields,
        )
    return iter(merged.values())


def _meaning(template: str, fields: dict[str, str]) -> str:
    return _FIELD.sub(lambda m: fields.get(m[1], "?").rstrip("."), template)
