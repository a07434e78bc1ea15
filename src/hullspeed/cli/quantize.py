"""``hullspeed quantize``: an FP8, INT8 or INT4 checkpoint from a 16-bit one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from hullspeed.models.quantize_result import Quantized


def quantize(
    source: str,
    out: Path,
    *,
    to: Literal["fp8", "int8", "int4"],
    group: int | None = None,
    format: Literal["fp8", "compressed-tensors"] | None = None,
    activations: int = 16,
    threads: int | None = None,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Make an FP8, INT8 or INT4 checkpoint from a 16-bit one, in a format that vLLM reads.

    Rounds to nearest, with the scale of each group searched for the least squared error; needs no
    data. An interrupted run goes on where it stopped when the command is repeated.

    Example: ``hullspeed quantize Qwen/Qwen3-4B ./qwen3-4b-int4 --to int4``

    Exit codes: 0 written whole, 2 usage or a model that cannot be quantized.

    Parameters
    ----------
    source
        The model: a folder, hf:ORG/NAME[@REVISION] or ORG/NAME, in 16-bit safetensors.
    out
        A folder that does not exist yet.
    to
        fp8: blocks of 128 x 128, the official layout; int8: a scale for each row; int4: a scale
        for each group of weights.
    group
        Weights that share a scale in int4: 32 or 128 (default).
    format
        compressed-tensors makes fp8 with a scale for each row instead of blocks; integers are
        always stored so.
    activations
        8 with int8: engines quantize activations too. Faster on large batches, less exact.
    threads
        Worker threads; all cores unless given.
    quiet
        No progress.
    json
        Print JSON.
    """
    import os
    import sys

    from rich.console import Console

    from hullspeed.arch.load import load_arch
    from hullspeed.cli.pull import ProgressBars
    from hullspeed.errors import UsageError
    from hullspeed.models.quantize import quantize_checkpoint
    from hullspeed.models.quantize_targets import target
    from hullspeed.sources import resolve

    if threads is not None and threads < 1:
        raise UsageError("threads must be at least 1", seen=threads)
    wanted = target(to, format=format, group=group, activations=activations)
    with ProgressBars(Console(stderr=True, highlight=False), hidden=quiet) as progress:
        files = resolve(source, progress)
        done = quantize_checkpoint(
            files,
            load_arch(files),
            out,
            wanted,
            threads=threads or os.cpu_count() or 1,
            progress=lambda n, total: progress("quantize", n, total),
        )
    if json:
        sys.stdout.write(_as_json(done))
    else:
        _print(done)
    return 0


def _print(done: Quantized) -> None:
    from rich.console import Console
    from rich.markup import escape

    from hullspeed.units import format_bytes

    out = Console(highlight=False, soft_wrap=True)
    before, after = format_bytes(done.bytes_before), format_bytes(done.bytes_after)
    out.print(f"[bold]{escape(str(done.out))}[/]  {done.target.name}")
    out.print(f"{before} to {after} ({done.bytes_after / done.bytes_before:.1%})")
    if done.resumed_shards:
        out.print(f"{done.resumed_shards} shards were there from an earlier run")
    out.print("\nlayer  relative error  worst weight")
    for layer, error in done.layer_errors().items():
        mine = [c for c in done.changes if layer == "-" or f"layers.{layer}." in c.name]
        worst = max(mine, key=lambda change: change.relative_error)
        name = worst.name.partition(f"layers.{layer}.")[2] or worst.name
        out.print(f"{layer:>5}  {error:>14.4f}  {worst.relative_error:.4f} {escape(name)}")
    if done.kept:
        out.print(f"\n{len(done.kept)} linear layers stay as they are:")
        for why in dict.fromkeys(done.kept.values()):
            out.print(f"  {escape(why)}")


def _as_json(done: Quantized) -> str:
    import json as jsonlib

    report = {
        "out": str(done.out),
        "target": done.target.name,
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
        "resumed_shards": done.resumed_shards,
        "layers": done.layer_errors(),
        "weights": [
            {
                "name": change.name,
                "shape": change.shape,
                "bytes_before": change.bytes_before,
                "bytes_after": change.bytes_after,
                "relative_error": change.relative_error,
            }
            for change in done.changes
        ],
        "kept": done.kept,
    }
    return jsonlib.dumps(report, indent=2) + "\n"
