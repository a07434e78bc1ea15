"""pages: the HTML page that a command writes beside what it prints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hullspeed.errors import UsageError

if TYPE_CHECKING:
    from hullspeed.report.blocks import Report


def check_writable(path: Path | None, option: str) -> None:
    """Refuse before the work what could not be written after it.

    Raises:
        UsageError: naming ``option`` and the path.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} names a folder", seen=str(path), fix="name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option}: there is no such folder", seen=str(path.parent))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} cannot be written", seen=str(path), fix="give another path")


def write_file(path: Path, text: str, option: str) -> None:
    """Write ``text`` to ``path``, all of it or none.

    Raises:
        UsageError: if it cannot be written.
    """
    from hullspeed.sources.cache import write_atomically

    try:
        if (
            path.exists() and not path.is_file()
        ):  # a pipe or a terminal, which is no file to replace
            path.write_text(text, encoding="utf-8")
        else:
            write_atomically(path, text.encode())
    except OSError as error:
        raise UsageError(
            f"{option} cannot be written: {error.strerror}", seen=str(path), fix="give another path"
        ) from error


def write_page(path: Path, report: Report) -> None:
    """``report`` as one self-contained page.

    Raises:
        UsageError: if it cannot be written.
    """
    from hullspeed.report.html import page

    write_file(path, page(report), "--html")
