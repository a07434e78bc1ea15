"""The engine process: ``python -m hullspeed.runtime.engine_process FD``.

``FD`` is its end of a socketpair. It reads an ``EngineConfig``, loads, says ``Ready``, then runs
steps and takes messages between them. It ends when its parent does (the socket closes), never by
an interrupt: the parent decides when to stop, after draining.
"""

from __future__ import annotations

import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator

from hullspeed.errors import EngineError, HullspeedError
from hullspeed.runtime.config import EngineConfig
from hullspeed.runtime.loading import load_engine
from hullspeed.runtime.messages import Delta, Failed, FromEngine, Loading, Outputs, Ready, ToEngine
from hullspeed.runtime.service import Service
from hullspeed.runtime.wire import Frames, frame

HEARTBEAT_S = 0.25
_READ_BYTES = 1 << 20


class ParentGoneError(Exception):
    """The socket closed: nobody is left to work for."""


class Channel:
    """The engine's end of the socket: blocking writes, reads that wait as long as told."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._frames: Frames[ToEngine] = Frames(ToEngine)

    def config(self) -> EngineConfig:
        """The first message."""
        frames: Frames[EngineConfig] = Frames(EngineConfig)
        while True:
            for config in frames.feed(self._read()):
                return config

    def send(self, message: FromEngine) -> None:
        """Give a message to the parent."""
        try:
            self._socket.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ParentGoneError from error

    def receive(self, wait_s: float) -> Iterator[ToEngine]:
        """The messages that are there, waiting up to ``wait_s`` for the first."""
        while self._selector.select(wait_s):
            yield from self._frames.feed(self._read())
            wait_s = 0.0

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionResetError as error:
            raise ParentGoneError from error
        if not data:
            raise ParentGoneError
        return data


def run(channel: Channel, service: Service) -> None:
    """Serve until told to stop."""
    next_beat_s = time.monotonic()
    while not service.stopping:
        busy = service.has_work
        wait_s = 0.0 if busy else max(0.0, next_beat_s - time.monotonic())
        deltas: list[Delta] = []
        for message in channel.receive(wait_s):
            deltas += service.handle(message)
        deltas += service.step()
        if deltas:
            channel.send(Outputs(deltas))
        if time.monotonic() >= next_beat_s or (busy and not service.has_work):
            channel.send(service.stats())
            next_beat_s = time.monotonic() + HEARTBEAT_S


def serve(channel: Channel) -> int:
    """Load, then serve; returns the exit code."""
    begin_s = time.monotonic()
    try:
        config = channel.config()
        engine = load_engine(config, lambda stage, share: channel.send(Loading(stage, share)))
        channel.send(Ready(engine.info, time.monotonic() - begin_s))
        run(channel, Service(engine.loop))
    except ParentGoneError:
        return 0
    except HullspeedError as error:
        return _fail(channel, str(error), error.exit_code)
    # The boundary of the process: the parent must learn why, whatever it was.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return _fail(channel, f"internal error: {error!r}", EngineError.exit_code)
    return 0


def _fail(channel: Channel, what: str, exit_code: int) -> int:
    try:
        channel.send(Failed(what, exit_code))
    except ParentGoneError:
        return exit_code
    return exit_code


def main() -> int:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A service manager signals the whole group; the parent drains and then tells us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        return serve(Channel(sock))


if __name__ == "__main__":
    sys.exit(main())
