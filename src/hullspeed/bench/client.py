"""Client: sends prebuilt requests over kept-alive connections and records what comes back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson

from hullspeed.bench.http1 import Connection, Exchange, Target
from hullspeed.errors import EngineError


class Client:
    """A pool of connections to one endpoint.

    Use as an async context manager; leaving it closes every connection, which is how the requests
    still in flight are cancelled.
    """

    def __init__(self, target: Target, *, timeout_s: float = 600.0) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in [*self._idle, *self._busy]:
            connection.close("cancelled")

    async def open_connections(self, n: int) -> None:
        """Have ``n`` idle connections at hand, so that no measured request pays for a connect."""
        loop = asyncio.get_running_loop()
        while len(self._idle) < n:
            try:
                _, connection = await loop.create_connection(
                    Connection, self.target.host, self.target.port
                )
            except OSError as error:
                raise EngineError(
                    f"nothing answers at {self.target.url}",
                    seen=str(error),
                    fix="start the server, or check host and port",
                ) from error
            self._idle.append(connection)

    async def exchange(self, request: bytes, intended_s: float | None = None) -> Exchange:
        """Send ``request`` and wait for the whole response; failures are kept in the exchange.

        Args:
            request: As :meth:`Target.request_bytes` builds it.
            intended_s: When the load meant to send it (monotonic seconds); now unless given.
        """
        exchange = Exchange(time.perf_counter() if intended_s is None else intended_s)
        while True:
            connection, fresh = await self._connection(exchange)
            if connection is None:
                return exchange
            self._busy.add(connection)
            timer = asyncio.get_running_loop().call_later(
                self._timeout_s, connection.close, "timeout"
            )
            try:
                await connection.send(request, exchange)
            except asyncio.CancelledError:
                connection.close("cancelled")
                raise
            finally:
                timer.cancel()
                self._busy.discard(connection)
            if connection.reusable:
                self._idle.append(connection)
            # An idle connection may close just as we write to it: nothing was served, send again.
            if fresh or exchange.failure != "disconnected" or exchange.status or exchange.pieces:
                return exchange

    async def _connection(self, exchange: Exchange) -> tuple[Connection | None, bool]:
        """A connection and whether it is new; None (and a failed exchange) when none opens."""
        fresh = True
        connection: Connection | None = None
        while self._idle and connection is None:
            candidate = self._idle.pop()
            if candidate.reusable:
                connection, fresh = candidate, False
        if connection is None:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(self._timeout_s):
                    _, connection = await loop.create_connection(
                        Connection, self.target.host, self.target.port
                    )
            except (OSError, TimeoutError):
                exchange.failure = "connect"
                exchange.end_s = time.perf_counter()
                return None, True
        exchange.ready_s = time.perf_counter()
        return connection, fresh

    async def json(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and parsed JSON of a plain request; status 0 when there was no answer."""
        payload = b"" if body is None else orjson.dumps(body)
        exchange = await self.exchange(self.target.request_bytes(path, payload))
        if exchange.failure:
            return 0, {"failure": exchange.failure}
        try:
            return exchange.status, orjson.loads(exchange.body)
        except orjson.JSONDecodeError:
            return exchange.status, None
