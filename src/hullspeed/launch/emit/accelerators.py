"""Accelerators: what a scheduler calls a GPU of the hardware catalogue."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files

from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu


@functools.cache
def _names() -> dict[str, dict[str, str]]:
    text = files("hullspeed.launch.emit").joinpath("accelerators.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def accelerator(gpu: str, scheduler: str) -> str:
    """The name of ``gpu`` for ``ray`` or ``skypilot``.

    Raises:
        UsageError: for a GPU that the catalogue or the scheduler does not know.
    """
    known = find_gpu(gpu).name
    name = _names()[scheduler].get(known)
    if name is None:
        raise UsageError(
            f"{scheduler} has no name for this GPU", seen=known,
            fix=f"it knows {', '.join(_names()[scheduler])}",
        )  # fmt: skip
    return name
