"""StartLog: what an engine's log says about its start: the stage it is in, and why it ended."""

from __future__ import annotations

import functools
import re
import tomllib
from collections import deque
from dataclasses import dataclass
from importlib.resources import files

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ERROR = re.compile(
    r"^(?:\([^)]*\)\s*)?(?:\w+Error|\w+Exception|KeyboardInterrupt)\b.*|.*\b(?:ERROR|CRITICAL)\b.*"
)
_LAST_ERROR = re.compile(r"(?:^|\s)((?:[\w.]+(?:Error|Exception)): .+)")


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a start is, with a detail from the log if it gave one."""

    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


class StartLog:
    """The lines of one engine, as they come.

    Args:
        engine: Whose log it is; an engine without known stages has none.
        keep_lines: Lines held for the explanation of a crash.
    """

    def __init__(self, engine: str, keep_lines: int = 5000) -> None:
        self._stages = _patterns().get(engine, ())
        self._lines: deque[str] = deque(maxlen=keep_lines)
        self._reached = -1
        self.stage = Stage("starting")

    def add(self, line: str) -> Stage | None:
        """Take one line; returns the stage if it is a new one or has a new detail."""
        text = _ANSI.sub("", line).rstrip()
        self._lines.append(text)
        # A stage never goes back: workers repeat each other's lines.
        for number in range(max(self._reached, 0), len(self._stages)):
            name, pattern = self._stages[number]
            match = pattern.search(text)
            if match is None:
                continue
            detail = next((value.strip() for value in match.groupdict().values() if value), "")
            stage = Stage(name, detail)
            if number == self._reached and (not detail or stage == self.stage):
                return None
            self._reached, self.stage = number, stage
            return stage
        return None

    @property
    def text(self) -> str:
        """The lines held."""
        return "\n".join(self._lines)

    def last_error(self) -> str:
        """The exception that stands last in the log, or its last line that reports an error, or
        its last line.
        """
        for line in reversed(self._lines):
            match = _LAST_ERROR.search(line)
            # "Engine core initialization failed. See root cause above." only points up.
            if match and "See root cause above" not in line:
                return match[1].strip()
        for line in reversed(self._lines):
            if _ERROR.match(line):
                return line.strip()
        return next((line.strip() for line in reversed(self._lines) if line.strip()), "no output")


@functools.cache
def _patterns() -> dict[str, tuple[tuple[str, re.Pattern[str]], ...]]:
    text = files("hullspeed.launch").joinpath("stages.toml").read_text(encoding="utf-8")
    return {
        engine: tuple((row["stage"], re.compile(row["pattern"])) for row in rows)
        for engine, rows in tomllib.loads(text).items()
    }
