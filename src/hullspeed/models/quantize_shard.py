"""ShardWriter: a safetensors file written tensor by tensor, there only when it is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hullspeed.errors import IntegrityError


class Entry(NamedTuple):
    """A tensor to be written: name, element type as safetensors writes it, shape and size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def header_of(entries: Sequence[Entry]) -> bytes:
    """The first bytes of a file of ``entries``: length, then JSON, padded to eight bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        place = [end, end + entry.nbytes]
        table[entry.name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": place,
        }  # fmt: skip
        end = place[1]
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


class ShardWriter:
    """Writes ``path`` by way of a file beside it that takes the name at the end.

    Used as a context: left by an exception, nothing remains.

    Args:
        path: The shard.
        entries: Its tensors in the order in which they will be written.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self._path, self._entries = path, list(entries)
        self._unfinished = path.with_name(f"{path.name}.unfinished")
        self._next = 0
        self._file: BinaryIO

    def __enter__(self) -> ShardWriter:
        self._file = self._unfinished.open("wb")
        self._file.write(header_of(self._entries))
        return self

    def write(self, name: str, data: NDArray[np.uint8]) -> None:
        """Write the next tensor.

        Raises:
            IntegrityError: if it is not the one, or not of the size, that was announced.
        """
        entry = self._entries[self._next]
        if entry.name != name or entry.nbytes != data.nbytes:
            raise IntegrityError(
                "a tensor is not what the shard's header announces",
                seen=(name, data.nbytes, entry),
                fix="this is a fault of the quantizer; report it",
            )
        self._file.write(np.ascontiguousarray(data).data)
        self._next += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        if kind is not None:
            self._unfinished.unlink(missing_ok=True)
        else:
            self._unfinished.replace(self._path)
