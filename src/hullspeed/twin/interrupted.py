"""Interrupted: cores that other processes take now and then while an engine computes."""

from __future__ import annotations


class Interrupted:
    """Once in ``every_s`` of computing, others take ``lost_s``."""

    def __init__(self, every_s: float, lost_s: float) -> None:
        self._every_s, self._lost_s = every_s, lost_s
        self._computed_s = 0.0

    def lost_s(self, clean_s: float) -> float:
        """What they take from a step that computes for ``clean_s``, which is counted."""
        before = self._computed_s // self._every_s
        self._computed_s += clean_s
        return self._lost_s * (self._computed_s // self._every_s - before)
