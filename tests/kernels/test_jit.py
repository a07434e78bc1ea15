"""Where machine code is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import numpy as np
from hullspeed.kernels.cpu import jit
from hullspeed.kernels.cpu.pointwise import silu_mul
out = np.zeros((1, 1), np.float32)
silu_mul(np.ones((1, 2), np.float32), out, 0, 1)
print(jit._CACHE)
print(float(out[0, 0]))
"""

ATTENTION = """
import hashlib, sys
import torch
from hullspeed.kernels.base import AttentionShape, RotaryTable
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.cpu.backend import CpuKernels
shape = AttentionShape(9, 3, 64)
spans = [(0, 1), (63, 1), (200, 1), (0, 70), (30, 131), (300, 20)]
batch = Batch.of([
    SpanInput([0] * n, start, range(i * 6, i * 6 + 6), True) for i, (start, n) in enumerate(spans)
])
for threads in map(int, sys.argv[1:]):
    random = torch.Generator().manual_seed(0)
    kernels = CpuKernels(threads=threads)
    kv = kernels.allocate_kv(shape, 36, 64)
    kv.keys.normal_(generator=random)
    kv.values.normal_(generator=random)
    angle = torch.randn(400, 32, generator=random)
    table = RotaryTable(angle.cos(), angle.sin())
    qkv = torch.randn(len(batch.tokens), 15 * 64, generator=random)
    q = kernels.rotate_and_store(qkv, kernels.plan(batch), shape, table, None, kv)
    mixed = kernels.attend(q, kernels.plan(batch), shape, kv)
    print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in (q, kv.keys, mixed))).hexdigest())
"""


def words(program: str, env: dict[str, str], *arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={"PATH": "", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def run(env: dict[str, str]) -> tuple[str, str]:
    folder, value = words(PROBE, env)
    return folder, value


def test_results_do_not_depend_on_what_was_compiled_before(tmp_path: Path) -> None:
    """LLVM makes other code in a process that compiled the parts itself than it finds kept."""
    env = {"HOME": str(tmp_path), "HULLSPEED_CACHE": str(tmp_path / "cache")}
    alone, shared = words(ATTENTION, env, "1", "2")
    assert alone == shared
    assert words(ATTENTION, env, "2", "1") == [shared, alone]


def test_code_is_kept_in_our_cache_folder_and_used_again(tmp_path: Path) -> None:
    env = {"HULLSPEED_CACHE": str(tmp_path / "own"), "HOME": str(tmp_path)}
    folder, value = run(env)
    assert Path(folder).is_relative_to(tmp_path / "own")
    assert value.startswith("0.7310")
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
    assert value.startswith("0.7310")
