"""GGUF files built byte by byte, so that each byte can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, code: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", code) + payload


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def text(name: str, value: str) -> bytes:
    return key(name, STRING, string(value))


def tensor(name: str, dims: Sequence[int], code: int, offset: int) -> bytes:
    head = string(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", code, offset)


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def floats(n: int) -> bytes:
    return struct.pack(f"<{n}f", *range(n))


def small() -> bytes:
    """Two tensors and one key of every kind."""
    keys: list[Any] = [
        text("general.architecture", "llama"),
        u32("llama.block_count", 2),
        key("flag", BOOL, b"\x01"),
        key("theta", F32, struct.pack("<f", 0.5)),
        key("words", ARRAY, struct.pack("<IQ", STRING, 2) + string("a") + string("é")),
        key("numbers", ARRAY, struct.pack("<IQ3I", U32, 3, 7, 8, 9)),
    ]
    tensors = [tensor("a", (4, 3), 0, 0), tensor("b", (8,), 0, 64)]
    return gguf(keys, tensors, floats(12).ljust(64, b"\0") + floats(8))
