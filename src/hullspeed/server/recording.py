"""recording: a server's requests as a workload: times, lengths and salted prefix hashes, no text.

A line of JSON for each completion that ended, in the format ``hullspeed`` of
:mod:`hullspeed.twin.traces`. Prompt and output are cut into blocks, and each block is named by a
keyed hash of itself and of everything before it, so equal names are equal prefixes. A block that
begins like one seen before and then parts from it says where (``fork``): a prefix cache may find
single tokens again, and hashes of whole blocks alone would hide up to a block of them.

The key is drawn anew for each server unless a salt is given, and a tenant's own salt goes into its
first block: names of two servers or of two tenants are never equal.
"""

from __future__ import annotations

import os
import secrets
import struct
import sys
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from hullspeed.errors import UsageError

BLOCK_TOKENS = 64
MAX_BLOCKS = 65_536
"""Blocks kept in memory to find forks: about 20 MB, 4 million tokens."""

_TOKEN_BYTES = 4
_NAME_BYTES = 8


class Prefixes:
    """Names of blocks.

    Args:
        key: Of the hashes; at most 64 bytes.
        max_blocks: Blocks that are remembered for forks, those used last.
    """

    def __init__(self, key: bytes, max_blocks: int = MAX_BLOCKS) -> None:
        self._key = key
        self._max_blocks = max_blocks
        self._n_blocks = 0
        # What followed each name, in the order of its bytes: those that share most are neighbours.
        self._next: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def names(
        self, tokens: Sequence[int], salt: bytes
    ) -> tuple[list[str], tuple[int, str, int] | None]:
        """Names of the blocks of ``tokens``, the last of which may be short; and the fork: index
        of the first block not seen before, name of the one it begins like, tokens they share.
        """
        data = struct.pack(f">{len(tokens)}I", *tokens)
        size = BLOCK_TOKENS * _TOKEN_BYTES
        name = blake2b(salt, key=self._key, digest_size=_NAME_BYTES).digest()
        found: list[str] = []
        fork = None
        for start in range(0, len(data), size):
            block = data[start : start + size]
            shared, like = self._remember(name, block)
            if shared:
                fork = (len(found), self._after(name, like).hex(), shared)
            name = self._after(name, block)
            found.append(name.hex())
        return found, fork

    def _after(self, name: bytes, block: bytes) -> bytes:
        return blake2b(name + block, key=self._key, digest_size=_NAME_BYTES).digest()

    def _remember(self, name: bytes, block: bytes) -> tuple[int, bytes]:
        """Tokens that a new ``block`` shares with a known one after ``name``, and that one; 0 if
        it is known itself.
        """
        known = self._next.setdefault(name, [])
        self._next.move_to_end(name)
        place = bisect_left(known, block)
        if known[place : place + 1] == [block]:
            return 0, b""
        best = max(
            ((_shared_tokens(block, other), other) for other in known[max(0, place - 1) :][:2]),
            default=(0, b""),
        )
        insort(known, block)
        self._n_blocks += 1
        while self._n_blocks > self._max_blocks:
            self._n_blocks -= len(self._next.popitem(last=False)[1])
        return best


def _shared_tokens(one: bytes, other: bytes) -> int:
    n_bytes = min(len(one), len(other))
    same = next((i for i in range(n_bytes) if one[i] != other[i]), n_bytes)
    return same // _TOKEN_BYTES


class Recorder:
    """Writes a line for each completion that ended; never raises once it is open.

    Args:
        path: Made anew, for its owner's eyes only.
        salt: Makes names comparable with those of other servers that have the same.
        limit_bytes: Where recording stops.
        log: Told, once, why recording stopped.

    Raises:
        UsageError: the file exists or cannot be made.
    """

    def __init__(
        self,
        path: Path,
        *,
        salt: str = "",
        limit_bytes: int,
        log: Callable[[str], None] | None = None,
    ) -> None:
        key = blake2b(salt.encode()).digest() if salt else secrets.token_bytes(32)
        self._prefixes = Prefixes(key)
        self._path = path
        self._limit_bytes = limit_bytes
        self._written_bytes = 0
        self._log = log or _to_stderr
        self._start_s = time.monotonic()
        self._file: int | None = _create(path)

    def note(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        arrival_s: float,
        salt: bytes,
        checkpoints: Sequence[int],
        cached_tokens: int,
        end: str,
    ) -> None:
        """One completion that ended.

        Args:
            prompt: Token ids.
            output: Token ids.
            arrival_s: When its request came in (``time.monotonic``).
            salt: The cache namespace it ran in.
            checkpoints: Where the prompt's state was worth saving.
            cached_tokens: Prompt tokens that the engine found in its cache.
            end: ``stop``, ``length``, ``abort`` (the client left) or ``error``.
        """
        if self._file is None:
            return
        blocks, fork = self._prefixes.names([*prompt, *output], salt)
        row: dict[str, object] = {
            "at_s": round(max(0.0, arrival_s - self._start_s), 6),
            "isl": len(prompt),
            "osl": len(output),
            "cached": cached_tokens,
            "end": end,
            "block_tokens": BLOCK_TOKENS,
            "blocks": blocks,
        }
        if fork is not None:
            row["fork"] = fork
        if checkpoints:
            row["checkpoints"] = list(checkpoints)
        self._write(msgspec.json.encode(row) + b"\n")

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        if self._written_bytes + len(line) > self._limit_bytes:
            self._stop(f"it has its {self._limit_bytes:,} bytes (--record-limit)")
            return
        try:
            written = os.write(self._file, line)
        except OSError as error:
            self._stop(error.strerror or str(error))
            return
        if written < len(line):  # the disk is full: leave no half line
            os.ftruncate(self._file, self._written_bytes)
            self._stop("the disk is full")
            return
        self._written_bytes += written

    def _stop(self, why: str) -> None:
        self.close()
        self._log(f"recording to {self._path} stopped: {why}; requests are served on")

    def close(self) -> None:
        """End; safe to call more than once. A file without a line is taken away."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            if not self._written_bytes:
                self._path.unlink(missing_ok=True)


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


def _create(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(
            "--record writes a new file, and this one exists",
            seen=str(path),
            fix="name another, or move it away",
        ) from None
    except OSError as error:
        raise UsageError(
            "--record cannot make its file", seen=str(path), fix=error.strerror or ""
        ) from None
