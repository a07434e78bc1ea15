"""Frames on the socketpair: 4-byte little-endian length, then one msgpack message."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from hullspeed.errors import EngineError
from hullspeed.runtime.messages import MAX_FRAME_BYTES

_LENGTH = struct.Struct("<I")
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    """``message`` as it goes over the wire.

    Raises:
        EngineError: if it is too long.
    """
    body = _encoder.encode(message)
    return _LENGTH.pack(_checked(len(body))) + body


class Frames(Generic[T]):
    """Messages out of bytes that come in pieces of any size.

    Args:
        kind: ``T`` itself, which may be a union; anything else is refused.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """The messages that ``data`` completes.

        Raises:
            EngineError: for a frame that is too long or no message of this kind.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _checked(_LENGTH.unpack_from(self._buffer)[0])
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                message = self._decoder.decode(body)
            except msgspec.DecodeError as error:
                raise EngineError(
                    "a message on the engine's wire is malformed", seen=str(error)
                ) from None
            yield message


def _checked(n_bytes: int) -> int:
    if n_bytes > MAX_FRAME_BYTES:
        raise EngineError(
            "a message on the engine's wire is too long",
            seen=n_bytes,
            fix=f"at most {MAX_FRAME_BYTES} bytes",
        )
    return n_bytes
