"""A server on a port of its own, in a thread, over fake engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import uvloop

from hullspeed.server.engine import Engine
from hullspeed.server.lifecycle import Web, bind, web_config
from hullspeed.server.metrics import Metrics
from hullspeed.server.recording import Recorder
from hullspeed.server.service import Service, Texts
from hullspeed.server.settings import ServerSettings
from support.fake_engine import FakeLink, byte_texts
from support.patience import PATIENCE_S, until

# Deadlines that a machine under load does not reach; tests of a deadline set their own.
PATIENT = ServerSettings(
    port=0,
    header_deadline_s=300.0,
    body_deadline_s=300.0,
    write_stall_s=300.0,
    heartbeat_limit_s=300.0,
    hang_limit_s=1200.0,
)


class LiveServer:
    """A running server; ``links`` are the engine's lives so far."""

    def __init__(
        self,
        settings: ServerSettings,
        make_link: Callable[[], FakeLink],
        texts: Callable[[], Texts],
        max_waiting: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.settings = settings
        self.links: list[FakeLink] = []
        self._make_link = make_link
        self._texts = texts
        self._max_waiting = max_waiting
        self._recorder = recorder
        self._listener = bind(settings)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.loop: asyncio.AbstractEventLoop
        self.service: Service
        self._stop: asyncio.Event

    @property
    def link(self) -> FakeLink:
        """The engine's present life."""
        return self.links[-1]

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Run ``function`` on the server's event loop."""
        self.loop.call_soon_threadsafe(function, *args)

    def client(self, **kwargs: Any) -> httpx2.Client:
        """An HTTP client for it."""
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_S, **kwargs)

    def start(self) -> None:
        """Start and wait until it is up; the engine may still be loading."""
        self._thread.start()
        if not until(self._up.is_set):
            raise TimeoutError("the server did not come up")

    def stop(self) -> None:
        """Stop and wait."""
        self.call(self._stop.set)
        self._thread.join(PATIENCE_S)

    def _next_link(self) -> FakeLink:
        self.links.append(self._make_link())
        return self.links[-1]

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        engine = Engine(self._next_link, self.settings, max_waiting=self._max_waiting)
        self.service = Service(self.settings, engine, ("fake",), Metrics(), self._recorder)
        self.service.texts = self._texts()
        web = Web(web_config(self.service, self.settings))
        living = asyncio.create_task(engine.run())
        serving = asyncio.create_task(web.serve([self._listener]))
        while not web.started:  # noqa: ASYNC110 # uvicorn has no event for it
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        self._up.set()
        await self._stop.wait()
        web.should_exit = True
        web.force_exit = True
        await serving
        await engine.stop()
        living.cancel()
        self.service.close()


@contextmanager
def live_server(
    settings: ServerSettings | None = None,
    *,
    link: Callable[[], FakeLink] = FakeLink,
    texts: Callable[[], Texts] = byte_texts,
    max_waiting: int = 1024,
    recorder: Recorder | None = None,
) -> Iterator[LiveServer]:
    """A server for the ``with`` block."""
    server = LiveServer(settings or PATIENT, link, texts, max_waiting, recorder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
