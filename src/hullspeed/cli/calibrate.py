"""``hullspeed calibrate``: measure this machine once, so that plan and up predict from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from hullspeed.hardware.ceilings import Ceilings


def calibrate(
    model: str | None = None,
    *,
    threads: int | None = None,
    weight_dtype: Literal["fp16", "fp32"] = "fp16",
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
) -> int:
    """Time the embedded engine's kernels on this machine and keep the result for plan and up.

    Example: ``hullspeed calibrate``

    Takes some seconds; keep the machine quiet meanwhile. Exit codes: 0 kept, 1 kept, but other
    processes disturbed it, 2 usage or model.

    Parameters
    ----------
    model
        Time its shapes; those of SmolLM2-135M unless given.
    threads
        Compute threads; all cores of this process unless given.
    weight_dtype
        How the engine holds weights.
    json
        Print JSON.
    quiet
        No progress on stderr.
    """
    import msgspec

    from hullspeed.hardware.ceilings import save_ceilings
    from hullspeed.hardware.machine import detect_machine
    from hullspeed.runtime.ceilings import measure_ceilings

    arch = None
    if model is not None:
        from hullspeed.plan.source import load_model

        arch = load_model(model).arch

    def progress(what: str) -> None:
        if not quiet:
            sys.stderr.write(f"timing {what}\n")

    machine = detect_machine()
    ceilings = measure_ceilings(
        arch, machine=machine, threads=threads, weight_dtype=weight_dtype, progress=progress
    )
    path = save_ceilings(ceilings, machine)
    if json:
        data = msgspec.json.encode(ceilings)
        sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
    else:
        sys.stdout.write("\n".join(_lines(ceilings, weight_dtype, path)) + "\n")
    return 0 if ceilings.quiet else 1


def _lines(ceilings: Ceilings, weight_dtype: str, path: Path) -> list[str]:
    linear = ceilings.linear_flops_per_s[weight_dtype]
    return [
        f"memory     {ceilings.dram_bytes_per_s / 1e9:.1f} GB/s, {ceilings.threads} threads",
        *(f"linear     {linear.at(m) / 1e9:6.1f} GFLOP/s at {m} tokens" for m in (1, 8, 64, 512)),
        f"kept in    {path}",
        *(f"note       {note}" for note in ceilings.notes),
    ]
