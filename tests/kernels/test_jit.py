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

# The widest head takes another strip than the rest, and 24 numbers do not fill vectors.
DELTA = """
import hashlib, sys
import torch
from hullspeed.kernels.base import DeltaGates, DeltaShape, StateSlots
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.cpu.backend import CpuKernels
batch = Batch.of([
    SpanInput([0] * n, start, range(i * 3, i * 3 + 3), True, read, write)
    for i, (start, n, read, write) in enumerate([(0, 1, -1, 0), (9, 1, 2, 2), (7, 70, 3, 1)])
])
n = len(batch.tokens)
for threads in map(int, sys.argv[1:]):
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=random)
    kernels = CpuKernels(weight_dtype="fp32", threads=threads)
    plan = kernels.plan(batch)
    results = []
    for shape in (DeltaShape(2, 4, 128, 160, 4), DeltaShape(1, 2, 24, 32, 4)):
        hidden = 8 * shape.k_dim + 8
        states = kernels.allocate_states(shape, 4)
        states.recurrent.normal_(generator=random)
        states.inputs.normal_(generator=random)
        width = shape.channels + shape.v_heads * shape.v_dim
        x, linear = normal(n, hidden), kernels.linear(normal(width, hidden) / 16)
        x = kernels.rms_norm(x, normal(hidden), 1e-6, normal(n, hidden))
        projected = torch.cat([linear(x[i : i + 12]) for i in range(0, n, 12)])
        qkv = kernels.convolve(projected, plan, normal(4, shape.channels), states)
        gates = DeltaGates(normal(shape.v_heads).exp(), normal(shape.v_heads))
        ba = normal(n, 2 * shape.v_heads)
        mixed = kernels.delta_scan(qkv, ba, plan, shape, gates, states)
        weight = normal(shape.v_dim)
        mixed = kernels.gated_norm(mixed, projected, shape.channels, weight, 1e-6)
        results += [x, projected, states.recurrent, states.inputs, mixed]
    print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in results)).hexdigest())
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


@pytest.mark.parametrize("program", [ATTENTION, DELTA], ids=["attention", "delta rule"])
def test_results_do_not_depend_on_what_was_compiled_before(program: str, tmp_path: Path) -> None:
    """LLVM makes other code in a process that compiled the parts itself than it finds kept."""
    env = {"HOME": str(tmp_path), "HULLSPEED_CACHE": str(tmp_path / "cache")}
    alone, shared = words(program, env, "1", "2")
    assert alone == shared
    assert words(program, env, "2", "1") == [shared, alone]


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
