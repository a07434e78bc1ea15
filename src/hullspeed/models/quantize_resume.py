"""Unfinished: the folder in which a quantized checkpoint grows, and what is done of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from hullspeed.arch.fields import read_json
from hullspeed.errors import UsageError
from hullspeed.models.quantize_shard import Entry, header_of
from hullspeed.models.quantize_targets import Target

_RECORD = "quantize.json"
_LOCK = "quantize.lock"


class Unfinished:
    """``<out>.unfinished``, held by one run at a time.

    Args:
        out: The folder that will be there in the end.
        target: What is made.
        weights: The source's shards; a changed source is another run.

    Raises:
        UsageError: if another run holds it, or it holds another run's work.
    """

    def __init__(self, out: Path, target: Target, weights: Sequence[Path]) -> None:
        self._out = out
        self.folder = out.with_name(f"{out.name}.unfinished")
        stats = [(path, path.stat()) for path in weights]
        self._job: dict[str, Any] = {
            "target": json.loads(json.dumps(asdict(target))),
            "source": [[str(path.resolve()), s.st_size, s.st_mtime_ns] for path, s in stats],
        }
        self._shards: dict[str, Any] = {}
        self._lock: IO[str]

    def __enter__(self) -> Unfinished:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / _LOCK).open("w")
        _hold(self._lock, self.folder)
        record = self.folder / _RECORD
        if record.exists():
            found = read_json(record)
            if found.get("job") != self._job:
                self._lock.close()
                raise UsageError(
                    "an unfinished run with other options or another source is there",
                    seen=str(self.folder),
                    fix="remove that folder, or repeat the earlier command to finish it",
                )
            self._shards = found["shards"]
        else:
            self._save()
        return self

    def finished(self, shard: str, entries: Sequence[Entry]) -> list[list[Any]] | None:
        """The record of a shard that an earlier run wrote, or ``None``."""
        path = self.folder / shard
        if shard not in self._shards or not path.is_file():
            return None
        header = header_of(entries)
        whole = len(header) + sum(entry.nbytes for entry in entries)
        with path.open("rb") as file:
            same = file.read(len(header)) == header and path.stat().st_size == whole
        rows: list[list[Any]] = self._shards[shard]
        return rows if same else None

    def record(self, shard: str, rows: Sequence[Sequence[Any]]) -> None:
        """Note that a shard is whole."""
        self._shards[shard] = [list(row) for row in rows]
        self._save()

    def complete(self) -> None:
        """Give the folder its name."""
        (self.folder / _RECORD).unlink()
        (self.folder / _LOCK).unlink()
        self.folder.rename(self._out)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._lock.close()

    def _save(self) -> None:
        new = self.folder / f"{_RECORD}.new"
        new.write_text(json.dumps({"job": self._job, "shards": self._shards}))
        new.replace(self.folder / _RECORD)


def _hold(lock: IO[str], folder: Path) -> None:
    """Take the lock; it goes with the process."""
    try:
        import fcntl  # noqa: PLC0415 - not on Windows, where two runs are not kept apart
    except ModuleNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise UsageError(
            "another run is writing there", seen=str(folder), fix="wait for it, or stop it"
        ) from error
