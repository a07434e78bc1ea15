"""kept: the outcomes of a sweep in a file, so that an interrupted one goes on where it was.

One JSON object a line: first what sweep it is, then an outcome with its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from hullspeed.errors import UsageError
from hullspeed.twin.question import Outcome, Question
from hullspeed.twin.summary import Objective
from hullspeed.twin.traces import trace_text
from hullspeed.twin.workload import Workload
from hullspeed.version import __version__


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sweep: str
    questions: int
    version: str = __version__


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    place: int
    outcome: Outcome


def sweep_key(
    base: Question, questions: Sequence[Question], workload: Workload, objective: Objective
) -> str:
    """What tells one sweep from another: everything that its outcomes depend on."""
    told = (
        base,
        base.cost().history,
        [(question.label, question.usd_per_hour) for question in questions],
        objective,
        workload.concurrency,
        trace_text(workload),
        __version__,
    )
    return hashlib.sha256(msgspec.json.encode(told, order="deterministic")).hexdigest()


class Kept:
    """The file at ``path`` for the sweep ``key`` of ``n_questions``; made if it is not there.

    Raises:
        UsageError: if it is another sweep's, no such file, or cannot be read or written.
    """

    def __init__(self, path: Path, key: str, n_questions: int) -> None:
        self.path = path
        self.outcomes: dict[int, Outcome] = {}
        head = _Head(sweep=key, questions=n_questions)
        self._file: IO[bytes]
        try:
            if path.exists() and path.stat().st_size:
                whole = self._read(path.read_bytes(), head)
                self._file = path.open("r+b")
                self._file.truncate(whole)
                self._file.seek(whole)
            else:
                self._file = path.open("wb")
                self._write(head)
        except OSError as error:
            raise UsageError(
                f"--resume cannot be used: {error.strerror}", seen=str(path), fix="name a file"
            ) from error

    def add(self, place: int, outcome: Outcome) -> None:
        """Keep one more."""
        self.outcomes[place] = outcome
        self._write(_Line(place=place, outcome=outcome))

    def close(self) -> None:
        """Nothing more will come."""
        self._file.close()

    def _write(self, line: _Head | _Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def _read(self, data: bytes, head: _Head) -> int:
        """Take over what ``data`` holds; returns the bytes of its whole lines, for the last one may
        have been cut short.
        """
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                if number == 1:
                    found = msgspec.json.decode(line, type=_Head)
                    if found != head:
                        raise self._wrong("is of another sweep")
                    continue
                kept = msgspec.json.decode(line, type=_Line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._wrong(f"holds no sweep: row {number} is {error}") from error
            self.outcomes[kept.place] = kept.outcome
        if not whole:
            raise self._wrong("holds no sweep")
        return whole

    def _wrong(self, what: str) -> UsageError:
        return UsageError(
            f"the file of --resume {what}", seen=str(self.path), fix="name a new file"
        )
