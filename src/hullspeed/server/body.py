"""Reading a request body: capped in bytes and JSON only, before anything looks at it."""

from __future__ import annotations

import orjson
from starlette.requests import ClientDisconnect, Request

from hullspeed.errors import RequestError
from hullspeed.server.errors import ApiError


async def read_json(request: Request, max_bytes: int) -> dict[str, object]:
    """The body as a JSON object.

    Raises:
        ApiError: 413 if the body has more than ``max_bytes``.
        RequestError: if it is not UTF-8, not JSON or not an object.
        ClientDisconnect: if the client left before the end of the body.
    """
    raw = await _read(request, max_bytes)
    if not raw:
        raise RequestError("the request has no body", fix="send a JSON object")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(
            f"the body is not valid JSON: {error.msg} at byte {error.pos}",
            fix="send one JSON object in UTF-8",
        ) from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", seen=type(value).__name__)
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {max_bytes} bytes",
        code="body_too_large",
        fix="send fewer or shorter messages",
        close=True,
    )
