"""MappedFile: a file mapped into memory, whose pages can be let go of after reading."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hullspeed.errors import CorruptFileError, SourceError


class MappedFile:
    """A read-only map; closed when the last view of it is gone.

    Raises:
        SourceError: if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise SourceError("cannot map the file", seen=str(path), fix=str(error)) from error

    def bytes(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """A view of ``n_bytes`` bytes from ``offset``, not copied.

        Raises:
            CorruptFileError: if the file ends before.
        """
        if offset + n_bytes > len(self._map):
            raise CorruptFileError(
                f"{self._name} became shorter", seen=len(self._map), fix="fetch the file again"
            )
        return np.frombuffer(self._map, np.uint8, n_bytes, offset)

    def release(self, offset: int, n_bytes: int) -> None:
        """Let go of the memory of a range that has been read; it comes back when touched."""
        release_pages(self._map, offset, n_bytes)


# What Linux maps around a page that is touched never reaches beyond 2 MiB: it would bring back
# what a neighbour had let go of.
_MAPPED_AROUND_BYTES = 2 * 2**20


def release_pages(mapped: mmap.mmap, offset: int, n_bytes: int) -> None:
    """Take a range of a read-only file map, and what was mapped around it, out of this process'
    resident memory.
    """
    if n_bytes and hasattr(mapped, "madvise"):
        around = _MAPPED_AROUND_BYTES
        start = offset // around * around
        end = min(len(mapped), -(-(offset + n_bytes) // around) * around)
        mapped.madvise(mmap.MADV_DONTNEED, start, end - start)
