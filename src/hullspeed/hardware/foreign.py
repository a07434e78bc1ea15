"""ForeignLoad: what other processes do to the cores while something is measured."""

from __future__ import annotations

import psutil


class ForeignLoad:
    """Share of this machine's cores that other processes kept busy since it was made.

    This process and its descendants, those that have ended included, are not others.
    """

    def __init__(self) -> None:
        self._before = self._busy()

    def _busy(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return sum(times) - idle, sum(times), _own_s()

    def share(self) -> float:
        """Between 0 and 1."""
        busy, total, own = (b - a for a, b in zip(self._before, self._busy(), strict=True))
        return max(0.0, (busy - own) / total) if total > 0 else 0.0


def _own_s() -> float:
    """CPU seconds of this process and its descendants; those that ended count for their parents."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended since it was listed
            continue
        total += times.user + times.system
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total
