"""StderrWatcher: how ``up`` goes, on stderr."""

from __future__ import annotations

from rich.console import Console

from hullspeed.up.pipeline import Watcher


class StderrWatcher(Watcher):
    """Stages and lines as they come; a download as a running figure."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    def stage(self, name: str, number: int, total: int) -> None:
        """A heading."""
        self._console.print(f"[bold]{number}/{total} {name}[/]")

    def line(self, text: str) -> None:
        """An indented line."""
        self._console.print(f"    {text}", markup=False)

    def download(self, task: str, done_bytes: int, total_bytes: int | None) -> None:
        """Megabytes so far; the last call ends the line."""
        share = f" of {total_bytes / 1e6:.1f}" if total_bytes else ""
        end = "\n" if done_bytes == total_bytes else "\r"
        self._console.print(f"    {task}: {done_bytes / 1e6:.1f}{share} MB", end=end, markup=False)
