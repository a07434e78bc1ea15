"""Reading an engine's flags, from a package that stands in for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hullspeed.errors import BrokenStackError
from hullspeed.launch.flagtable import FlagTable
from hullspeed.launch.readflags import Listed, differences, read_flags

MODULE = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        import argparse
        parser.add_argument("--model-path", "--model", type=str)
        parser.add_argument("--tp-size", type=int)
        parser.add_argument("--schedule-policy", choices=["lpm", "fcfs"])
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--flag", action=argparse.BooleanOptionalAction)
        parser.add_argument("--many", nargs="+")
"""


def test_flags_are_listed_by_the_engine_s_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (package / "server_args.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    listed = read_flags("sglang", sys.executable)
    assert {name: row.kind for name, row in listed.items()} == {
        "--model-path": "value", "--tp-size": "int", "--schedule-policy": "value",
        "--enable-metrics": "switch", "--flag": "bool", "--many": "list",
    }  # fmt: skip
    assert listed["--model-path"].names == ("--model-path", "--model")
    assert listed["--schedule-policy"].choices == ("lpm", "fcfs")
    said = list(differences(FlagTable("sglang"), listed))
    assert "--flag is not in the table" in said
    assert any(line.startswith("--schedule-policy takes lpm, fcfs") for line in said)
    assert not any(line.startswith(("--tp-size", "--enable-metrics ")) for line in said)


def test_a_table_equal_to_the_parser_has_no_difference() -> None:
    table = FlagTable("transformers")
    listed = {
        name: Listed(names=(name,), kind=flag.kind, choices=flag.choices)
        for name, flag in table.flags.items()
    }
    assert list(differences(table, listed)) == []
    listed.pop("--port")
    assert list(differences(table, listed)) == ["--port is in the table and not in the engine"]


def test_an_engine_that_does_not_import_is_a_broken_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BrokenStackError, match="cannot list the flags"):
        read_flags("sglang", sys.executable)
    with pytest.raises(BrokenStackError):
        read_flags("sglang", str(tmp_path / "none"))
