"""pages: the HTML page that a command writes beside what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hullspeed.errors import UsageError

if TYPE_CHECKING:
    from hullspeed.report.blocks import Report


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
