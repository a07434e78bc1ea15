"""Compile with numba, once per machine: machine code is kept in hullspeed's cache folder."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numba

from hullspeed.sources.cache import cache_dir

# What LLVM may assume. "exact": IEEE as written. "fused": multiply and add may become one.
# "finite": neither infinities nor NaNs occur, without which a maximum does not vectorise. Nothing
# lets it reorder a sum: how it would depends on what else a process has compiled.
Math = Literal["exact", "fused", "finite"]
_FLAGS: dict[str, Any] = {
    "exact": False,
    "fused": {"contract"},
    "finite": {"nnan", "ninf", "nsz"},
}

F = TypeVar("F", bound=Callable[..., Any])

# torch's pool is OpenMP; numba's must be too, or the two fight for the cores.
config: Any = numba.config
config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def kernel(*, parallel: bool = False, math: Math = "exact") -> Callable[[F], F]:
    """Decorator: compile for this CPU at the first call, without the GIL, and keep the result.

    Args:
        parallel: The function has ``prange`` loops.
        math: What may be assumed of floating point.
    """

    def decorate(function: F) -> F:
        cached = _CACHE is not None
        before = config.CACHE_DIR
        try:
            config.CACHE_DIR = str(_CACHE or before)
            compiled: Any = numba.njit(
                nogil=True,
                parallel=parallel,
                cache=cached,
                error_model="numpy",
                fastmath=_FLAGS[math],
            )(function)
        finally:
            config.CACHE_DIR = before
        return cast("F", compiled)

    return decorate


def _cache_folder() -> Path | None:
    """Where machine code is kept; ``None`` if no folder of our own can be had.

    The name holds a hash of the kernels' sources: numba itself notices a change only in the file
    of the function, not in those of its callees.
    """
    given = os.environ.get("NUMBA_CACHE_DIR")
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    base = Path(given) if given else cache_dir() / "kernels"
    folder = base / f"hullspeed-{digest}-numba-{numba.__version__}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = folder.stat()
    except OSError:
        return None
    foreign = hasattr(os, "getuid") and owner.st_uid != os.getuid()
    if foreign or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or not os.access(folder, os.W_OK):
        return None  # loading what others may write would run their code
    return folder


_CACHE = _cache_folder()
