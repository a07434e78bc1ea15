"""Give freed memory back to the system while a model is loaded."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Return the free pages of the C heap.

    glibc keeps what is freed below 32 MiB a piece, and packed weights among the freed pieces keep
    the heap from shrinking: without this a load holds half as much again as it needs. Elsewhere
    (musl, macOS, Windows) nothing happens.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def _find() -> ctypes._NamedFuncPointer | None:
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no CDLL(None)
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return found


_malloc_trim = _find()
