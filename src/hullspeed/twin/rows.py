"""rows: fields of a trace's rows, with errors that name file and row."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hullspeed.errors import UsageError

MAX_TOKENS = 100_000_000


class Row:
    """One row of a trace: ``number`` is its line in the file."""

    def __init__(self, path: Path, number: int, fields: Mapping[str, Any]) -> None:
        self.path = path
        self.number = number
        self.fields = fields

    def wrong(self, what: str, seen: object = None, fix: str = "") -> UsageError:
        """The error to raise about this row."""
        return UsageError(f"{self.path.name}, row {self.number}: {what}", seen=seen, fix=fix)

    def get(self, name: str) -> Any:
        """A field that must be there."""
        value = self.fields.get(name)
        if value is None or value == "":
            raise self.wrong(f"no field {name!r}", seen=sorted(map(str, self.fields))[:12])
        return value

    def number_of(self, name: str, *, least: float = 0.0) -> float:
        """A finite number, at least ``least``."""
        value = self.get(name)
        try:
            found = float(value)
        except (TypeError, ValueError):
            raise self.wrong(f"{name} is not a number", seen=value) from None
        if isinstance(value, bool) or not math.isfinite(found) or found < least:
            raise self.wrong(f"{name} must be a number of at least {least:g}", seen=value)
        return found

    def tokens(self, name: str, *, least: int = 1) -> int:
        """A whole number of tokens."""
        found = self.number_of(name, least=least)
        if found != int(found) or found > MAX_TOKENS:
            raise self.wrong(f"{name} is not a number of tokens", seen=self.get(name))
        return int(found)


def csv_rows(path: Path, needed: tuple[str, ...]) -> Iterator[Row]:
    """Rows of a CSV file with a header.

    Raises:
        UsageError: if it cannot be read or a column of ``needed`` is missing.
    """
    with _open(path) as file:
        reader = csv.DictReader(file, strict=True)
        try:
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            if missing:
                raise UsageError(
                    f"{path.name}, row 1: no column {missing[0]!r}",
                    seen=reader.fieldnames,
                    fix="is --format the right one?",
                )
            for fields in reader:
                row = Row(path, reader.line_num, fields)
                if None in fields or None in fields.values():
                    raise row.wrong("more or fewer fields than the header has")
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path.name}, row {reader.line_num + 1}: not CSV", seen=str(error)
            ) from error


def jsonl_rows(path: Path) -> Iterator[Row]:
    """Rows of a file of JSON objects, a line each; empty lines are skipped.

    Raises:
        UsageError: if it cannot be read or a line is no object.
    """
    with _open(path) as file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                fields = json.loads(line)
                row = Row(path, number, fields if isinstance(fields, dict) else {})
                if not isinstance(fields, dict):
                    raise row.wrong("not a JSON object", seen=line[:80])
                yield row
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            wrong = number if isinstance(error, json.JSONDecodeError) else number + 1
            raise UsageError(f"{path.name}, row {wrong}: not JSON", seen=str(error)) from error


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8-sig", newline="")  # spreadsheets write a byte order mark
    except OSError as error:
        raise UsageError(
            "the trace cannot be read", seen=str(path), fix=error.strerror or ""
        ) from error
