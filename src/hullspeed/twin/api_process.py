"""ApiProcess: the way of requests to the scheduler, on the cores that compute the steps."""

from __future__ import annotations

import heapq
import math


class ApiProcess:
    """Takes requests one after the other, each for ``work_s`` of a core.

    An engine that computes with all cores has a thread on each, and each has its share of a step to
    do: the one whose core a request takes waits, and the others wait for it. So work on requests
    makes the steps longer by as much.

    Args:
        work_s: What a request keeps the process from the next one.
        rest_s: From there to the scheduler, waiting for nobody.
        own_core: The process has a core that no step uses.
    """

    def __init__(self, work_s: float, rest_s: float, *, own_core: bool = False) -> None:
        self._work_s, self._rest_s = work_s, rest_s
        self._own_core = own_core
        self._sent: list[tuple[float, int]] = []
        self._left_s = work_s  # of the first in ``_sent``
        self._now_s = 0.0
        self._arriving: list[tuple[float, int]] = []

    def send(self, request_id: int, at_s: float) -> None:
        """A request sent at ``at_s``, which may be to come but not before the last moment that
        was asked about.
        """
        if self._sent and (at_s, request_id) < self._sent[0]:
            self._left_s = self._work_s  # the first one had not begun
        heapq.heappush(self._sent, (at_s, request_id))

    def __bool__(self) -> bool:
        return bool(self._sent or self._arriving)

    def next_s(self) -> float:
        """When the next request is at the scheduler if no step is computed until then."""
        first = math.inf
        if self._sent:
            first = max(self._now_s, self._sent[0][0]) + self._left_s + self._rest_s
        return min(first, self._arriving[0][0] if self._arriving else math.inf)

    def arrived(self, now_s: float) -> list[int]:
        """Requests that are at the scheduler by ``now_s``, in order, each told once."""
        self._work(now_s)
        ids = []
        while self._arriving and self._arriving[0][0] <= now_s:
            ids.append(heapq.heappop(self._arriving)[1])
        return ids

    def beside(self, start_s: float, seconds: float) -> float:
        """How long a step of ``seconds`` takes that starts at ``start_s``."""
        self._work(start_s)
        end_s = start_s + seconds
        while self._sent and not self._own_core:
            begin_s = max(self._now_s, self._sent[0][0])
            if begin_s >= end_s:
                break
            end_s += self._left_s
            self._work(begin_s + self._left_s)
        self._work(end_s)
        return end_s - start_s

    def _work(self, until_s: float) -> None:
        """Take what can be taken by then."""
        while self._sent:
            begin_s = max(self._now_s, self._sent[0][0])
            end_s = begin_s + self._left_s
            if end_s > until_s:
                self._left_s -= max(until_s - begin_s, 0.0)
                break
            self._now_s, self._left_s = end_s, self._work_s
            heapq.heappush(self._arriving, (end_s + self._rest_s, heapq.heappop(self._sent)[1]))
        self._now_s = max(self._now_s, until_s)
