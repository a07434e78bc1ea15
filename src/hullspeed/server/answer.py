"""Answers: run a generation to its end and write it, or stop it when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hullspeed.errors import HullspeedError
from hullspeed.server.errors import error_response, to_api_error
from hullspeed.server.generation import ClientGoneError, Generation, Piece
from hullspeed.server.wire import DONE, Wire, error_event

IGNORED_HEADER = "hullspeed-ignored"


class Answer(Response):
    """The ASGI response of a generation; whatever happens, the generation is closed at its end.

    A failure before the first piece is an HTTP error; after it, a stream ends with an error event.
    """

    def __init__(self, generation: Generation, wire: Wire) -> None:
        self._generation = generation
        self._wire = wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer."""
        watch = asyncio.create_task(_watch(receive, self._generation))
        try:
            await self._write(scope, receive, send)
        except ClientGoneError:
            return
        finally:
            self._generation.close()
            watch.cancel()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, wire = self._generation, self._wire
        try:
            pieces = await generation.next()
            if not generation.job.stream:
                pieces = await _rest(generation, pieces)
        except ClientGoneError:
            raise
        except HullspeedError as error:
            await error_response(to_api_error(error))(scope, receive, send)
            return
        if not generation.job.stream:
            body = wire.body(pieces)
            await self._start(send, "application/json", len(body))
            await send({"type": "http.response.body", "body": body})
            return
        await self._start(send, "text/event-stream; charset=utf-8", None)
        await self._stream(send, pieces)

    async def _stream(self, send: Send, pieces: list[Piece]) -> None:
        generation, wire = self._generation, self._wire
        frames = wire.opening()
        try:
            while pieces:
                frames += wire.events(pieces)
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                frames = b""
                pieces = await generation.next()
            frames = wire.ending()
        except ClientGoneError:
            raise
        except HullspeedError as error:
            frames = error_event(error) + DONE
        await send({"type": "http.response.body", "body": frames})

    async def _start(self, send: Send, content_type: str, length: int | None) -> None:
        headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        if self._generation.job.stream:
            headers.append((b"x-accel-buffering", b"no"))
        if self._generation.job.ignored:
            ignored = ", ".join(self._generation.job.ignored)
            headers.append((IGNORED_HEADER.encode(), ignored.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _rest(generation: Generation, first: list[Piece]) -> list[Piece]:
    collected = list(first)
    while pieces := await generation.next():
        collected += pieces
    return collected


async def _watch(receive: Callable[[], Awaitable[Message]], generation: Generation) -> None:
    """Stop ``generation`` as soon as the client's connection is gone."""
    while (await receive())["type"] != "http.disconnect":
        continue
    generation.fail(ClientGoneError("the client left"))
    generation.close()
