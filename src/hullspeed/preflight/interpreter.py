"""The engine's interpreter: its version, packages and torch build, from a process of its own."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec

from hullspeed.errors import BrokenStackError
from hullspeed.preflight.stack import Python, Torch
from hullspeed.sources.cache import cache_dir, write_atomically

_SCRIPT = Path(__file__).with_name("inspect_python.py")
_TIMEOUT_S = 120  # a cold import of torch from a slow disk takes tens of seconds


@functools.cache
def look_at_python(executable: str | None = None) -> tuple[Python, str]:
    """The interpreter (this one unless named) and the C library's version it was found with.

    Kept for the life of this process, and for later ones while no package comes or goes: the import
    of torch costs seconds.

    Raises:
        BrokenStackError: if the interpreter does not run at all.
    """
    kept = _kept_path() if executable is None else None
    if kept is not None and (found := _read_kept(kept)) is not None:
        return found
    found = _ask_interpreter(executable or sys.executable)
    torch = found[0].torch
    # What a GPU build sees depends on the driver, which may change under it: never kept.
    if kept is not None and torch is not None and torch.imports and torch.cuda is None:
        _write_kept(kept, found)
    return found


def _ask_interpreter(executable: str) -> tuple[Python, str]:
    command = [executable, "-I", str(_SCRIPT)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=env
        )
        lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise BrokenStackError(
            f"the engine's interpreter does not answer: {error}", seen=command[0],
            fix="run it by hand, and rebuild its virtual environment if it fails",
        ) from error  # fmt: skip
    if not lines:
        raise BrokenStackError(
            f"the engine's interpreter fails: {_last_line(result.stderr)}", seen=command[0],
            fix="rebuild its virtual environment",
        )  # fmt: skip
    facts = lines[0]
    glibc = facts.pop("glibc")
    version = facts["packages"].get("torch")
    torch = _torch(version, lines, result) if version else None
    return msgspec.convert({**facts, "torch": torch}, Python), glibc


def _kept_path() -> Path:
    """Where the look at this interpreter is kept: the name changes with it, with the probe and
    with every package that is installed into it or removed.
    """
    site = Path(sysconfig.get_paths()["purelib"])
    script = _SCRIPT.read_bytes()
    key = f"{sys.executable}|{sys.version}|{site}|{site.stat().st_mtime_ns}".encode()
    return cache_dir() / "interpreter" / f"{hashlib.sha256(key + script).hexdigest()[:24]}.json"


def _read_kept(path: Path) -> tuple[Python, str] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Python, str])
    except (OSError, msgspec.DecodeError):
        return None


def _write_kept(path: Path, found: tuple[Python, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(found))
    except OSError:
        return  # a read-only cache only costs the next run its seconds


def _torch(
    version: str, lines: list[dict[str, object]], ended: subprocess.CompletedProcess[str]
) -> Torch:
    if len(lines) > 1:
        return msgspec.convert(lines[1], Torch)
    why = _last_line(ended.stderr)
    if ended.returncode < 0:
        why = f"the process was ended by signal {-ended.returncode}: {why}"
    return Torch(version=version, imports=False, error=why)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
