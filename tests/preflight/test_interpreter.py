"""The engine's interpreter is asked in a process of its own."""

from __future__ import annotations

import json
import platform
import stat
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from hullspeed.errors import BrokenStackError
from hullspeed.preflight.interpreter import look_at_python


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def facts(**packages: str) -> str:
    return json.dumps(
        {"version": "3.12.0", "implementation": "CPython", "executable": "/x", "glibc": "2.36",
         "packages": packages}
    )  # fmt: skip


def test_this_interpreter() -> None:
    python, glibc = look_at_python(None)
    assert python.version == platform.python_version()
    assert python.packages["msgspec"] == version("msgspec")
    assert python.torch is not None
    assert python.torch.version == version("torch")
    assert glibc == platform.libc_ver()[1]


def test_a_torch_that_kills_the_process_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    illegal = script(tmp_path / "a", f"echo '{facts(torch='2.13.0')}'; kill -ILL $$")
    torch = look_at_python(illegal)[0].torch
    assert torch is not None
    assert not torch.imports
    assert "signal 4" in torch.error
    none = script(tmp_path / "b", f"echo '{facts(numpy='2.0')}'")
    assert look_at_python(none)[0].torch is None


def test_a_torch_that_raises_gives_its_last_line(tmp_path: Path) -> None:
    raising = script(
        tmp_path / "c", f"echo '{facts(torch='2.13.0')}'; echo 'ImportError: libgomp' >&2; exit 1"
    )
    torch = look_at_python(raising)[0].torch
    assert torch is not None
    assert torch.error == "ImportError: libgomp"


@pytest.mark.parametrize("body", ["echo broken >&2; exit 1", "echo '{not json'"])
def test_an_interpreter_that_does_not_run_is_a_broken_stack(tmp_path: Path, body: str) -> None:
    with pytest.raises(BrokenStackError, match="interpreter"):
        look_at_python(script(tmp_path / "d", body))


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("")
    with pytest.raises(BrokenStackError):
        look_at_python(str(tmp_path / "e"))
    assert sys.executable


def test_the_look_at_this_interpreter_is_kept_until_a_package_comes_or_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HULLSPEED_CACHE", str(tmp_path))
    look_at_python.cache_clear()
    first = look_at_python(None)
    (kept,) = (tmp_path / "interpreter").iterdir()
    look_at_python.cache_clear()
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("asked again"))
    assert look_at_python(None) == first
    kept.write_bytes(b"{")  # a damaged file is as if never written
    look_at_python.cache_clear()
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        look_at_python(None)
    look_at_python.cache_clear()
