"""Runner: a service in a thread of this process, for the library face."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable

from hullspeed.errors import EngineError, HullspeedError
from hullspeed.runtime.messages import Cancel, Delta, EngineStats, Submit, ToEngine
from hullspeed.runtime.service import Service

Sink = Callable[[Delta], None]
"""Takes the deltas of a request; called in the runner's thread, must not block."""

_STATS_S = 0.25
_END_TIMEOUT_S = 60.0  # a step in progress is finished first


class Runner:
    """Runs steps while there is work and sleeps while there is none.

    Attributes:
        stats: Counters and gauges, at most a quarter of a second old while it works.
    """

    def __init__(self, service: Service) -> None:
        self.stats: EngineStats = service.stats()
        self._service = service
        self._inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # of _sinks and _over
        self._over: str | None = None
        self._next_stats_s = 0.0
        self._thread = threading.Thread(target=self._run, name="hullspeed-engine", daemon=True)
        self._thread.start()

    def new_id(self) -> int:
        """An id for one request."""
        return next(self._ids)

    def submit(self, requests: Iterable[tuple[Submit, Sink]]) -> None:
        """Queue requests; each one's deltas go to its sink, the last with ``finish``.

        Raises:
            EngineError: if the runner is closed or its engine failed.
        """
        requests = list(requests)
        with self._lock:
            if self._over is not None:
                raise EngineError(self._over)
            self._sinks.update((message.id, sink) for message, sink in requests)
            for message, _ in requests:
                self._inbox.put(message)

    def cancel(self, ids: Iterable[int]) -> None:
        """Stop requests; their sinks hear nothing more. Unknown ids are ignored."""
        with self._lock:
            known = [i for i in ids if self._sinks.pop(i, None) is not None]
        if known:
            self._inbox.put(Cancel(known))

    def close(self) -> None:
        """Finish the step in progress and end; requests in flight fail."""
        self._inbox.put(None)
        self._thread.join(_END_TIMEOUT_S)
        self._end("the engine is closed")

    def _run(self) -> None:
        try:
            while self._take_messages():
                self._deliver(self._service.step())
                self._refresh_stats()
        except HullspeedError as error:
            self._end(f"the engine stopped: {error}")
        # The boundary of the thread: whoever waits must learn that nothing more comes.
        except Exception as error:  # noqa: BLE001
            self._end(f"the engine stopped: internal error: {error!r}")

    def _take_messages(self) -> bool:
        """Handle what is there, waiting if there is nothing to do; False to end."""
        wait = not self._service.has_work
        if wait:
            self.stats = self._service.stats()
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if message is None:
                return False
            wait = False
            self._deliver(self._service.handle(message))

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            with self._lock:
                last = delta.finish is not None
                sink = self._sinks.pop(delta.id, None) if last else self._sinks.get(delta.id)
            if sink is not None:
                sink(delta)

    def _refresh_stats(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_stats_s:
            self.stats = self._service.stats()
            self._next_stats_s = now_s + _STATS_S

    def _end(self, why: str) -> None:
        with self._lock:
            self._over = self._over or why
            sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink(Delta(request_id, [], finish="error", error=why, error_type="EngineError"))
