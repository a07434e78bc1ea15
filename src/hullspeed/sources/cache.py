"""The cache folder, file digests and atomic writes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from hullspeed.sources.progress import Progress, silent

_CHUNK_BYTES = 4 * 1024**2


def cache_dir() -> Path:
    """``$HULLSPEED_CACHE``, else ``$XDG_CACHE_HOME/hullspeed``, else ``~/.cache/hullspeed``."""
    own = os.environ.get("HULLSPEED_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "hullspeed"


def sha256_of(path: Path, progress: Progress = silent) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"sha256 {path.name}", done, total)
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` holds all of it or what it held before.

    Raises:
        OSError: if the folder is missing or cannot be written; nothing is left behind.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(data)
            file.flush()
            part.chmod(0o644)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
