"""Connections: deadlines and caps that uvicorn does not have.

uvicorn keeps a half-sent header or body open for ever. Here a request has a deadline for its
headers and one for its body, a reader that stands still is cut off, headers have a size, and the
number of connections is capped. None of this costs anything per token: timers are armed when a
request begins and when a socket's buffer fills up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hullspeed.server.errors import ApiError, error_body
from hullspeed.server.settings import ServerSettings

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def guarded_protocol(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """Make uvicorn's HTTP protocol with the caps of ``settings``."""

    class Guarded(_GuardedProtocol):
        limits = settings

    return Guarded


class _GuardedProtocol(HttpToolsProtocol):
    limits: ServerSettings

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, "too_many_connections", "too many open connections")
            return
        self._arm(self.limits.header_deadline_s, self._headers_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._deadline is None and self._idle():
            self._arm(self.limits.header_deadline_s, self._headers_late)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(name + value)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        waiting = not self._idle()  # a pipelined request: its turn comes later
        super().on_headers_complete()
        if not waiting:
            self._arm(self.limits.body_deadline_s, self._body_late)

    def on_message_complete(self) -> None:
        if self.transport.is_closing():
            return
        super().on_message_complete()
        self._disarm()

    def on_response_complete(self) -> None:
        self._disarm()
        super().on_response_complete()
        if not self._idle() and self.cycle.more_body:
            self._arm(self.limits.body_deadline_s, self._body_late)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.limits.write_stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "bad_http", "this is not a valid HTTP request")

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _arm(self, seconds: float, late: Any) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _count(self, data: bytes) -> None:
        self._header_bytes += len(data) + 4
        if self._header_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self._refuse(431, "headers_too_large", "the request's headers are too large")

    def _headers_late(self) -> None:
        self._deadline = None
        self._refuse(408, "request_timeout", "the request's headers did not arrive in time")

    def _body_late(self) -> None:
        self._deadline = None
        if self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(408, "request_timeout", "the request's body did not arrive in time")

    def _refuse(self, status: int, code: str, what: str) -> None:
        body = error_body(ApiError(status, what, code=code))
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (status, _REASONS[status])
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        rest = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self._disarm()
        self.transport.write(head + retry + rest + body)
        self.transport.close()
