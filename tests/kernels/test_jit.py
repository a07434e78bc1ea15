"""Where machine code is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import numpy as np
from hullspeed.kernels.cpu import jit
from hullspeed.kernels.cpu.simd import exp
print(jit._CACHE)
print(float(exp(np.float32(1))))
"""


def run(env: dict[str, str]) -> tuple[str, str]:
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={"PATH": "", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    folder, value = result.stdout.split()
    return folder, value


def test_code_is_kept_in_our_cache_folder_and_used_again(tmp_path: Path) -> None:
    env = {"HULLSPEED_CACHE": str(tmp_path / "own"), "HOME": str(tmp_path)}
    folder, value = run(env)
    assert Path(folder).is_relative_to(tmp_path / "own")
    assert value.startswith("2.71828")
    kept = {p: p.stat().st_mtime_ns for p in Path(folder).rglob("*.nbc")}
    assert kept
    assert run(env) == (folder, value)
    assert {p: p.stat().st_mtime_ns for p in Path(folder).rglob("*.nbc")} == kept


def test_numbas_own_setting_says_where(tmp_path: Path) -> None:
    folder, _ = run({"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "HOME": str(tmp_path)})
    assert Path(folder).parent == tmp_path / "numba"


@pytest.mark.parametrize("kind", ["a file in the way", "writable by others"])
def test_without_a_safe_folder_nothing_is_kept(tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    env = {"HULLSPEED_CACHE": str(cache), "HOME": str(tmp_path)}
    if kind == "a file in the way":
        cache.write_text("")
    else:
        folder, _ = run(env)
        Path(folder).chmod(0o777)
    folder, value = run(env)
    assert folder == "None"
    assert value.startswith("2.71828")
