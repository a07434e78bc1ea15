"""Progress: how a download tells its caller where it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then while bytes arrive, from one thread at a time."""

    def __call__(self, task: str, done_bytes: int, total_bytes: int | None) -> None:
        """``done_bytes`` of ``total_bytes`` (``None``: not known) of ``task`` are here."""
        ...


def silent(task: str, done_bytes: int, total_bytes: int | None) -> None:
    """A progress that tells nobody."""
