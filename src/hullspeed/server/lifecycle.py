"""The life of ``hullspeed serve``, top to bottom: bind, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import uvicorn
import uvloop

from hullspeed.errors import EngineError, HullspeedError, UsageError
from hullspeed.runtime.process import start_error
from hullspeed.server.app import make_app
from hullspeed.server.connection import guarded_protocol
from hullspeed.server.engine import Engine, EngineLink
from hullspeed.server.generation import cut_by_shutdown
from hullspeed.server.metrics import Metrics
from hullspeed.server.recording import Recorder
from hullspeed.server.service import Service, Texts
from hullspeed.server.settings import ServerSettings

CUT_EXIT_CODE = 1
"""Exit code after a shutdown that cut requests."""

_LAST_WORDS_S = 2
"""How long connections may take to read what was written before the end."""


class Started(NamedTuple):
    """What is announced once requests are admitted.

    Attributes:
        skipped: Parts of the checkpoint that were not loaded, in words.
    """

    url: str
    model: str
    load_s: float
    skipped: tuple[str, ...]


def serve(
    settings: ServerSettings,
    *,
    name: str,
    max_waiting: int,
    links: Callable[[], EngineLink],
    texts: Callable[[], Texts],
    announce: Callable[[Started], None],
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    0: ended with nothing cut; 1: requests were cut at the end; otherwise the engine's own code.

    Args:
        settings: Knobs of the API process.
        name: Name the model is served under.
        max_waiting: Sequences that may wait for the engine.
        links: Makes the link to an engine process.
        texts: Loads tokenizer and chat template; runs in a thread while the engine loads.
        announce: Called once, when requests are admitted.

    Raises:
        UsageError: the settings or the address cannot be.
        HullspeedError: the model or the engine did not load.
    """
    settings.check()
    listener = bind(settings)
    recorder = _recorder(settings)
    life = _Life(settings, listener, name, max_waiting, links, recorder)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(life.run(texts, announce))


def _recorder(settings: ServerSettings) -> Recorder | None:
    if settings.record is None:
        return None
    return Recorder(
        Path(settings.record),
        salt=settings.record_salt,
        limit_bytes=settings.record_limit_bytes,
    )


def bind(settings: ServerSettings) -> socket.socket:
    """The listening socket, taken before anything is loaded.

    Raises:
        UsageError: the address is in use or is not this machine's.
    """
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise UsageError("--host is not an address", seen=settings.host) from error
    # A name such as localhost has two addresses; clients that write numbers write 127.0.0.1.
    family, kind, proto, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}",
            fix="choose another with --port, or --port 0 for a free one",
        ) from None
    listener.setblocking(False)
    return listener


class _Life:
    def __init__(
        self,
        settings: ServerSettings,
        listener: socket.socket,
        name: str,
        max_waiting: int,
        links: Callable[[], EngineLink],
        recorder: Recorder | None,
    ) -> None:
        self._recorder = recorder
        self._settings = settings
        self._listener = listener
        self._name = name
        self._max_waiting = max_waiting
        self._links = links

    async def run(self, texts: Callable[[], Texts], announce: Callable[[Started], None]) -> int:
        """Everything, in order."""
        stop, now = self._signals()
        engine = Engine(self._links, self._settings, max_waiting=self._max_waiting)
        service = Service(self._settings, engine, (self._name,), Metrics(), self._recorder)
        web = Web(web_config(service, self._settings))
        serving = asyncio.create_task(web.serve([self._listener]))
        living = asyncio.create_task(engine.run())
        try:
            loading = asyncio.create_task(self._load(service, living, texts))
            await _first(loading, stop, now)
            if loading.done():
                loading.result()
                skipped = engine.info.skipped if engine.info else ()
                announce(Started(self._url(), self._name, engine.load_s, skipped))
                await _first(living, stop, now)
            loading.cancel()
            return await self._end(service, living, now)
        finally:
            await self._close(service, web, serving, living)

    async def _load(
        self, service: Service, living: asyncio.Task[None], texts: Callable[[], Texts]
    ) -> None:
        """Tokenizer and engine load side by side; the slower one decides."""
        found = asyncio.get_running_loop().run_in_executor(None, texts)
        settled = asyncio.create_task(service.engine.settled())
        done, _ = await asyncio.wait((found, settled), return_when=asyncio.FIRST_COMPLETED)
        if found in done:
            found.result()
        if not await settled:
            if living.done():
                living.result()
            raise _load_failure(service.engine)
        service.texts = await found
        gc.collect()
        gc.freeze()  # what is loaded stays: the collector need not walk it again

    async def _end(self, service: Service, living: asyncio.Task[None], now: asyncio.Event) -> int:
        """Drain, or cut at once if asked twice; the exit code."""
        if living.done():
            living.result()
            failure = service.engine.failure
            return failure.exit_code if failure else EngineError.exit_code
        drain = asyncio.create_task(service.drain(self._settings.drain_seconds))
        if service.in_flight:
            sys.stderr.write(
                f"draining {service.in_flight} requests, at most "
                f"{self._settings.drain_seconds:g} s; signal again to stop now\n"
            )
        await _first(drain, now)
        if not drain.done():
            drain.cancel()
            service.abort(cut_by_shutdown())
        if service.cut:
            sys.stderr.write(f"{service.cut} requests were cut\n")
        return CUT_EXIT_CODE if service.cut else 0

    async def _close(
        self,
        service: Service,
        web: Web,
        serving: asyncio.Task[None],
        living: asyncio.Task[None],
    ) -> None:
        web.should_exit = True
        await serving
        await service.engine.stop()
        living.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await living
        service.close()

    def _signals(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Set by the first and the second SIGTERM or SIGINT."""
        stop, now = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (now if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        return stop, now

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104
        return f"http://{f'[{shown}]' if ':' in shown and '[' not in shown else shown}:{port}"


class Web(uvicorn.Server):
    """uvicorn without its signal handlers: it goes on answering while we drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


def web_config(service: Service, settings: ServerSettings) -> uvicorn.Config:
    """How uvicorn runs the application: our protocol, no logs, no lifespan."""
    return uvicorn.Config(
        make_app(service),
        http=guarded_protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )


def _load_failure(engine: Engine) -> HullspeedError:
    if engine.failure is not None:
        return start_error(engine.failure)
    return EngineError("the engine process ended while loading", fix="see what it wrote above")


async def _first(*things: asyncio.Task[None] | asyncio.Task[int] | asyncio.Event) -> None:
    """Wait until one of the tasks is done or one of the events is set."""
    waits = [
        asyncio.ensure_future(thing.wait()) if isinstance(thing, asyncio.Event) else thing
        for thing in things
    ]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for thing, wait in zip(things, waits, strict=True):
        if isinstance(thing, asyncio.Event):
            wait.cancel()
