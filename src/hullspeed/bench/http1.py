"""HTTP/1.1 for a load generator: stamp what the socket delivers, interpret it after the run.

Reading a response here means finding where it ends, and nothing more. Every piece of the body is
kept with the monotonic time of the socket read that delivered it; events and JSON are read later,
so that parsing never delays a time stamp.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from hullspeed.errors import UsageError

_MAX_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        prefix: Path in front of ``/v1/...``; empty in the usual case.
    """

    host: str
    port: int
    prefix: str = ""
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """``http://host:port[/v1]`` as a target.

        Raises:
            UsageError: for anything else, https included.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http":
            raise UsageError(
                "the load generator speaks plain HTTP",
                seen=url,
                fix="measure the engine's own port, not the TLS proxy in front of it",
            )
        try:
            port = parts.port or 80
        except ValueError as error:
            raise UsageError("not a port number in the URL", seen=url) from error
        if not parts.hostname or parts.query or parts.fragment:
            raise UsageError("not an endpoint", seen=url, fix="write http://127.0.0.1:8000")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("the API key holds characters that no header can carry")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, prefix, api_key)

    @property
    def url(self) -> str:
        """The endpoint without ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.prefix}"

    def request_bytes(self, path: str, body: bytes) -> bytes:
        """A complete request, ready to write; ``body`` is JSON, empty for GET."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{'POST' if body else 'GET'} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: text/event-stream, application/json",
            "User-Agent: hullspeed-bench",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and what came back, uninterpreted. Times are monotonic seconds.

    Attributes:
        intended_s: When the load asked for it to be sent.
        ready_s: When a connection was at hand.
        sent_s: When it was written to the socket.
        end_s: When the response was complete, or failed.
        pieces: Body bytes (chunk framing removed) with the time of their socket read.
        failure: Transport failure, by kind; empty when the response is complete.
    """

    intended_s: float
    ready_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str = ""

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(piece for _, piece in self.pieces)


class FramingError(ValueError):
    """The bytes are not an HTTP/1.1 response."""


class ResponseReader:
    """Finds the end of one response, and strips chunk framing, byte by byte exact."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._rest = b""
        self._in_head = True
        self._chunked = False
        self._left: int | None = None  # body or chunk bytes still to come; None: until close
        self._after_chunk = False
        self._in_trailer = False
        self.keep_alive = True

    def feed(self, now_s: float, data: bytes) -> bool:
        """Take ``data`` read at ``now_s``; True once the response is complete.

        Raises:
            FramingError: when the bytes are not HTTP/1.1.
        """
        if self._in_head:
            self._rest += data
            if not self._head():
                return False
            data, self._rest = self._rest, b""
        if self._chunked:
            return self._feed_chunked(now_s, data)
        if data:
            self._exchange.pieces.append((now_s, data))
        if self._left is None:
            return False
        self._left -= len(data)
        if self._left < 0:
            raise FramingError("more bytes than Content-Length says")
        return self._left == 0

    def at_eof(self) -> bool:
        """The connection closed: True when that is how this response was to end."""
        self.keep_alive = False
        return not self._in_head and not self._chunked and self._left is None

    def _head(self) -> bool:
        head, found, rest = self._rest.partition(b"\r\n\r\n")
        if not found:
            if len(head) > _MAX_HEAD_BYTES:
                raise FramingError("endless header")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise FramingError(f"not an HTTP/1.1 status line: {first[:60]!r}")
        self._rest = rest
        if status.startswith("1"):  # 100 Continue: the real head follows
            return self._head()
        headers = self._exchange.headers
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self._exchange.status = int(status[:3])
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if length is not None and not length.isdigit():
            raise FramingError(f"Content-Length is {length!r}")
        if self._chunked or self._exchange.status in (204, 304):
            self._left = 0
        elif length is not None:
            self._left = int(length)
        closes = headers.get("connection", "").lower() == "close" or version == "HTTP/1.0"
        self.keep_alive = not closes and self._left is not None
        self._in_head = False
        return True

    def _feed_chunked(self, now_s: float, data: bytes) -> bool:
        data = self._rest + data
        at, parts, done = 0, [], False
        while at < len(data) and not done:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                self._after_chunk = self._left == 0
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            line, at = data[at:end], end + 2
            done = self._framing_line(line)
        self._rest = data[at:]
        if parts:
            self._exchange.pieces.append((now_s, b"".join(parts)))
        if done and self._rest:
            raise FramingError("bytes after the last chunk")
        if len(self._rest) > _MAX_HEAD_BYTES:
            raise FramingError("endless chunk size")
        return done

    def _framing_line(self, line: bytes) -> bool:
        """Take a line between chunks; True at the empty line that ends the trailers."""
        if self._in_trailer:
            return not line
        if self._after_chunk:
            if line:
                raise FramingError("a chunk is longer than its size")
            self._after_chunk = False
            return False
        size = line.split(b";")[0].strip()
        try:
            self._left = int(size, 16)
        except ValueError:
            raise FramingError(f"not a chunk size: {size[:20]!r}") from None
        self._in_trailer = self._left == 0
        return False


class Connection(asyncio.Protocol):
    """A keep-alive connection carrying one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._reader: ResponseReader | None = None
        self._done: asyncio.Future[None] | None = None
        self.reusable = True

    def send(self, request: bytes, exchange: Exchange) -> asyncio.Future[None]:
        """Write ``request``; the future resolves when ``exchange`` is complete or has failed."""
        self._exchange, self._reader = exchange, ResponseReader(exchange)
        done = self._done = asyncio.get_running_loop().create_future()
        exchange.sent_s = time.perf_counter()
        if self._transport is None or self._transport.is_closing():
            self._finish("disconnected")
        else:
            self._transport.write(request)
        return done

    def close(self, failure: str = "") -> None:
        """Close, failing the exchange in flight with ``failure``."""
        self._finish(failure)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # create_connection makes stream transports; uvloop's do not derive from asyncio's class
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Stamp first, then look for the end of the response."""
        now_s = time.perf_counter()
        if self._reader is None:
            self.reusable = False  # bytes nobody asked for
            return
        try:
            done = self._reader.feed(now_s, data)
        except FramingError:
            self.close("bad_http")
            return
        if done:
            self.reusable = self._reader.keep_alive
            self._finish("", now_s)
            if not self.reusable and self._transport is not None:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer hung up: the end of some responses, the failure of all others."""
        complete = self._reader is not None and self._reader.at_eof() and exc is None
        self._finish("" if complete else "disconnected")

    def _finish(self, failure: str, now_s: float | None = None) -> None:
        if failure:
            self.reusable = False
        exchange, done = self._exchange, self._done
        self._exchange = self._reader = self._done = None
        if exchange is None or done is None or done.done():
            return
        exchange.end_s = time.perf_counter() if now_s is None else now_s
        exchange.failure = failure
        done.set_result(None)
