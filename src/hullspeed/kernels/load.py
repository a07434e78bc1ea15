"""Pick a back end by name."""

from __future__ import annotations

from typing import Any, Literal

from hullspeed.errors import BrokenStackError, UsageError
from hullspeed.kernels.base import Kernels

KernelsName = Literal["cpu", "ref"]


def load_kernels(
    name: KernelsName, *, weight_dtype: str = "native", threads: int = 1
) -> Kernels[Any]:
    """The back end ``name``.

    Args:
        name: ``"cpu"`` (FBGEMM and numba) or ``"ref"`` (plain torch).
        weight_dtype: How linear weights are held: ``"native"`` (a checkpoint's own codes where
            that is fast, else fp16), ``"fp16"`` or ``"fp32"`` (``ref``: always fp32).
        threads: Compute threads of this process from now on.

    Raises:
        UsageError: for a name or type there is not.
        BrokenStackError: if a package that the back end needs is missing.
    """
    if weight_dtype not in ("native", "fp16", "fp32"):
        raise UsageError("unknown weight type", seen=weight_dtype, fix="use native, fp16 or fp32")
    if threads < 1:
        raise UsageError("threads must be at least 1", seen=threads)
    if name == "ref":
        from hullspeed.kernels.ref import RefKernels  # noqa: PLC0415

        return RefKernels()
    if name != "cpu":
        raise UsageError("unknown kernels", seen=name, fix="use cpu or ref")
    try:
        from hullspeed.kernels.cpu.backend import CpuKernels  # noqa: PLC0415
    except ImportError as error:
        raise BrokenStackError(
            "the CPU kernels need a package that is not there",
            seen=error.name,
            fix="pip install 'hullspeed[engine]'",
        ) from error
    return CpuKernels(weight_dtype=weight_dtype, threads=threads)
