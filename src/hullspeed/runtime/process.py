"""EngineProcess: one life of an engine process, as asyncio sees it. No torch here."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from hullspeed import errors
from hullspeed.errors import CapacityError, EngineError, HullspeedError, ModelError
from hullspeed.runtime.config import EngineConfig
from hullspeed.runtime.messages import Delta, Failed, FromEngine, ToEngine
from hullspeed.runtime.wire import Frames, frame

_READ_BYTES = 1 << 20
_END_TIMEOUT_S = 5.0
_MODULE = "hullspeed.runtime.engine_process"


class EngineProcess:
    """Starts the process, carries messages both ways, and says how it ended.

    Who submits what, what to do about a crash and when to start another is the caller's.

    Args:
        config: What to load.
        command: The program, for tests; it gets the socket's file descriptor as last argument.
    """

    def __init__(
        self, config: EngineConfig, *, command: Sequence[str] = (sys.executable, "-m", _MODULE)
    ) -> None:
        self._config = config
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Process id, while it runs."""
        return None if self._process is None else self._process.pid

    async def run(self, on_message: Callable[[FromEngine], None]) -> int:
        """Start it and hand over every message until it is gone; returns its exit status.

        Cancelled, it ends the process.

        Raises:
            EngineError: if it says something that is no message; the process is ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # Standard output is the caller's data; what a library prints goes to standard error.
            process = self._process = subprocess.Popen(  # noqa: ASYNC220 # returns at once
                [*self._command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,
            )
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self._writer.write(frame(self._config))
            await _listen(reader, on_message)
            return await self._end(process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            self._process = None
            self._close()

    def send(self, message: ToEngine) -> None:
        """Queue a message; one to a process that is gone, or not yet there, is dropped.

        Raises:
            EngineError: if it is too long for the wire.
        """
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    def kill(self) -> None:
        """End it at once; ``run`` then returns."""
        if self._process is not None:
            self._process.kill()

    async def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a process that has closed its end."""
        self._close()
        try:
            return await asyncio.to_thread(process.wait, _END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return await asyncio.to_thread(process.wait)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


async def _listen(reader: asyncio.StreamReader, on_message: Callable[[FromEngine], None]) -> None:
    frames: Frames[FromEngine] = Frames(FromEngine)
    with suppress(ConnectionResetError):
        while data := await reader.read(_READ_BYTES):
            for message in frames.feed(data):
                on_message(message)


def delta_error(delta: Delta) -> HullspeedError:
    """The error that a delta with ``finish="error"`` tells of."""
    kind: object = getattr(errors, delta.error_type or "", None)
    if not (isinstance(kind, type) and issubclass(kind, HullspeedError)):
        kind = EngineError
    return kind(delta.error or "the engine gave no reason")


def start_error(failed: Failed) -> HullspeedError:
    """The error that a ``Failed`` tells of, with the same exit code."""
    kinds: dict[int, type[HullspeedError]] = {1: CapacityError, 2: ModelError}
    return kinds.get(failed.exit_code, EngineError)(failed.error)
