"""Compare a flag table with an installed engine's own parser.

``python -m hullspeed.launch.readflags vllm 0.33.0 ~/vllm/bin/python``
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hullspeed.errors import BrokenStackError
from hullspeed.launch.flagtable import FlagTable

_SCRIPT = Path(__file__).with_name("list_flags.py")
_TIMEOUT_S = 300  # importing an engine takes a minute on a slow disk
_VALUED = ("value", "int", "float", "json")


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One flag as the engine registers it."""

    names: tuple[str, ...]
    kind: str
    choices: tuple[str, ...] = ()


def read_flags(engine: str, python: str) -> dict[str, Listed]:
    """The flags of the engine installed beside ``python``.

    Raises:
        BrokenStackError: if the engine does not import there.
    """
    command = [python, str(_SCRIPT), engine]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        line = next(text for text in reversed(result.stdout.splitlines()) if text[:1] == "{")
        return msgspec.convert(json.loads(line), dict[str, Listed])
    except (OSError, subprocess.SubprocessError, StopIteration, ValueError) as error:
        raise BrokenStackError(
            f"cannot list the flags of {engine}: {error}", seen=python,
            fix="import the engine there by hand and read its error",
        ) from error  # fmt: skip


def differences(table: FlagTable, listed: dict[str, Listed]) -> Iterator[str]:
    """Every way in which ``table`` does not say what the engine's parser says."""
    for name, row in listed.items():
        match = table.match(name)
        if match is None or match.abbreviated:
            yield f"{name} is not in the table"
            continue
        same = {match.flag.kind, row.kind} <= set(_VALUED) or match.flag.kind == row.kind
        if not same:
            yield f"{name} is {row.kind}, the table says {match.flag.kind}"
        if set(match.flag.choices) != set(row.choices) and row.choices:
            yield f"{name} takes {', '.join(row.choices)}; the table has other choices"
    known = {name for row in listed.values() for name in row.names}
    for name in table.flags:
        if name not in known:
            yield f"{name} is in the table and not in the engine"


def main(arguments: list[str]) -> int:
    """Print the differences; 1 if there are any."""
    engine, version, python = arguments
    found = list(differences(FlagTable(engine, version), read_flags(engine, python)))
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
