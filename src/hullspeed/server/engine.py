"""Engine: the engine process as the API sees it, over all its lives.

Requests go in, each step's tokens come out and are handed to whoever submitted them. When the
process dies, everything in flight ends with an error and the process is started again, a bounded
number of times.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Protocol

from hullspeed.errors import EngineError
from hullspeed.runtime.messages import (
    Cancel,
    Delta,
    EngineStats,
    Failed,
    FromEngine,
    Loading,
    ModelInfo,
    Outputs,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
)
from hullspeed.server.errors import ApiError
from hullspeed.server.settings import ServerSettings


class EngineLink(Protocol):
    """One life of an engine process."""

    async def run(self, on_message: Callable[[FromEngine], None]) -> int:
        """Start it, hand over every message it sends, return its exit status when it is gone."""
        ...

    def send(self, message: ToEngine) -> None:
        """Queue a message; one to a process that is gone is dropped."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class Receiver(Protocol):
    """Whoever waits for the tokens of one submitted sequence."""

    def push(self, delta: Delta, now_s: float) -> None:
        """Take ``delta``; must not block. The last one has ``finish`` set."""
        ...


class State(StrEnum):
    """Where the engine is."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class Engine:
    """Submit, cancel and receive; start, watch and restart.

    Args:
        links: Makes the link of the next life.
        settings: Limits of heartbeats and restarts.
        max_waiting: Sequences that may wait besides those that run.
        log: Where progress and reasons go (one line each).
    """

    def __init__(
        self,
        links: Callable[[], EngineLink],
        settings: ServerSettings,
        *,
        max_waiting: int,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.state = State.LOADING
        self.info: ModelInfo | None = None
        self.stats: EngineStats | None = None
        self.restarts = 0
        self.failure: Failed | None = None
        self.load_s = 0.0
        self._stage = ""
        self._links = links
        self._link: EngineLink | None = None
        self._settings = settings
        self._max_waiting = max_waiting
        self._log = log or _to_stderr
        self._receivers: dict[int, Receiver] = {}
        self._next_id = 1
        self._stopping = False
        self._last_heard_s = time.monotonic()
        self._gone = asyncio.Event()  # no process there
        self._settled = asyncio.Event()  # ready for the first time, or failed for good

    @property
    def in_flight(self) -> int:
        """Sequences submitted and not yet ended."""
        return len(self._receivers)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last sent anything."""
        return time.monotonic() - self._last_heard_s

    @property
    def healthy(self) -> bool:
        """Alive, or on its way; false once it is silent for too long or given up."""
        if self.state is State.READY:
            return self.heartbeat_age_s < self._settings.heartbeat_limit_s
        return self.state in (State.LOADING, State.RESTARTING)

    def check_room(self, n_sequences: int) -> None:
        """Raise :class:`ApiError` (503) unless ``n_sequences`` more may come in now."""
        if self.state is not State.READY or self.info is None:
            code = "engine_down" if self.state in (State.FAILED, State.STOPPED) else "loading"
            raise self._unavailable(f"the engine is {self.state.value}", code)
        room = self.info.max_running + self._max_waiting - len(self._receivers)
        if n_sequences > room:
            raise self._unavailable("the queue is full", "queue_full")

    def submit(self, requests: Sequence[tuple[Submit, Receiver]]) -> None:
        """Send requests whose ids came from :meth:`new_id`, all or none.

        Raises:
            ApiError: 503 if the engine is not ready or its queue is full.
        """
        self.check_room(len(requests))
        link = self._link
        for message, receiver in requests:
            self._receivers[message.id] = receiver
            if link is not None:
                link.send(message)

    def new_id(self) -> int:
        """An id that was never used before."""
        self._next_id += 1
        return self._next_id

    def cancel(self, ids: Sequence[int]) -> None:
        """Stop sequences; their receivers hear nothing more."""
        live = [i for i in ids if self._receivers.pop(i, None) is not None]
        if live and self._link is not None:
            self._link.send(Cancel(live))

    async def settled(self) -> bool:
        """Wait until the first start ended; whether it ended well."""
        await self._settled.wait()
        return self.state is State.READY

    async def run(self) -> None:
        """Keep an engine alive until :meth:`stop`, or until it fails for good."""
        try:
            await self._lives()
        finally:
            if not self._stopping:
                self.state = State.FAILED
            self._settled.set()

    async def _lives(self) -> None:
        starts: deque[float] = deque()
        while True:
            started_s = time.monotonic()
            status = await self._one_life()
            if self._stopping:
                return
            if self.failure is not None and not self._settled.is_set():
                return
            starts.append(started_s)
            while starts and starts[0] < time.monotonic() - self._settings.restart_window_s:
                starts.popleft()
            if len(starts) > self._settings.max_restarts or not self._settled.is_set():
                self._log(f"engine given up: its process ended with status {status}")
                return
            self.state = State.RESTARTING
            self.restarts += 1
            delay_s = self._settings.restart_delay_s * 2 ** (len(starts) - 1)
            self._log(f"engine ended with status {status}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)

    async def stop(self, grace_s: float = 2.0) -> None:
        """End the process: politely, then not. Whatever is in flight fails."""
        was_ready = self.state is State.READY
        self.state = State.STOPPED
        self._stopping = True
        link = self._link
        if link is not None and was_ready:
            link.send(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), grace_s)
        if link is not None:
            link.kill()  # while it loads it reads no messages
        self._fail_all()
        self._settled.set()

    async def _one_life(self) -> int:
        link = self._link = self._links()
        self._gone.clear()
        self._last_heard_s = time.monotonic()
        watchdog = asyncio.create_task(self._watch(link))
        try:
            return await link.run(self._on_message)
        except EngineError as error:  # it spoke nonsense and was ended
            self._log(f"engine: {error}")
            return EngineError.exit_code
        finally:
            watchdog.cancel()
            self._link = None
            self._gone.set()
            self.stats = None
            self._fail_all()

    async def _watch(self, link: EngineLink) -> None:
        """Kill an engine that was ready and fell silent."""
        limit_s = self._settings.hang_limit_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            if self.state is State.READY and self.heartbeat_age_s > limit_s:
                self._log(f"engine silent for {limit_s:g} s; killing it")
                link.kill()
                return

    def _on_message(self, message: FromEngine) -> None:
        now_s = self._last_heard_s = time.monotonic()
        if isinstance(message, Outputs):
            receivers = self._receivers
            for delta in message.deltas:
                if delta.finish is None:
                    receiver = receivers.get(delta.id)
                else:
                    receiver = receivers.pop(delta.id, None)
                if receiver is not None:
                    receiver.push(delta, now_s)
        elif isinstance(message, EngineStats):
            self.stats = message
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Loading):
            self._on_loading(message)
        else:
            self.failure = message
            self._log(f"engine failed: {message.error}")

    def _on_loading(self, message: Loading) -> None:
        if message.stage != self._stage:
            self._stage = message.stage
            self._log(f"loading: {message.stage}")

    def _on_ready(self, message: Ready) -> None:
        if self._stopping:
            return
        self.info, self.load_s, self.failure = message.info, message.load_s, None
        self.state = State.READY
        if self.info.skipped:
            self._log(f"skipped: {'; '.join(self.info.skipped)}")
        self._settled.set()

    def _fail_all(self) -> None:
        lost, self._receivers = self._receivers, {}
        now_s = time.monotonic()
        for id_, receiver in lost.items():
            receiver.push(Delta(id_, [], finish="error", error="the engine ended"), now_s)

    def _unavailable(self, what: str, code: str) -> ApiError:
        return ApiError(
            503, what, code=code, fix="try again", retry_after_s=self._settings.retry_after_s
        )


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
