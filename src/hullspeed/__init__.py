"""hullspeed: will this workload run well on this serving system?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hullspeed.core.sampling import SamplingParams
from hullspeed.errors import HullspeedError
from hullspeed.version import __version__

if TYPE_CHECKING:
    from hullspeed.runtime.library import Completion, CompletionChunk, Engine

__all__ = [
    "Completion",
    "CompletionChunk",
    "Engine",
    "HullspeedError",
    "SamplingParams",
    "__version__",
]

_LAZY = {"Engine", "Completion", "CompletionChunk"}


def __getattr__(name: str) -> object:
    # The engine needs torch; the planner must start without it.
    if name in _LAZY:
        from hullspeed.runtime import library  # noqa: PLC0415

        return getattr(library, name)
    raise AttributeError(f"module 'hullspeed' has no attribute {name!r}")
