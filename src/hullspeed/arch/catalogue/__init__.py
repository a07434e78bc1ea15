"""Configurations of well-known models, so that a plan needs no network.

``models.json`` holds the fields of each config.json that say something about size or shape,
with their source. An entry may take the shapes of another (``shapes_of``) and add its own
quantization. What could not be confirmed is not there.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from hullspeed.arch.load import arch_from_config
from hullspeed.arch.model import ModelArch
from hullspeed.errors import UnsupportedModelError


def names() -> tuple[str, ...]:
    """The models in the catalogue, as the hub names them."""
    return tuple(_entries())


def lookup(name: str) -> dict[str, Any] | None:
    """The config.json of a model, or ``None`` if it is not in the catalogue.

    The name must be exact but for capitals; see :func:`suggestions` for near misses.
    """
    entry = _entry(name)
    if entry is None:
        return None
    config = dict(_entries()[entry["shapes_of"]]["config"] if "shapes_of" in entry else {})
    config |= entry.get("config", {})
    if "quantization_config" in entry:
        config["quantization_config"] = entry["quantization_config"]
    return copy.deepcopy(config)


def source(name: str) -> str | None:
    """Where the entry's values come from."""
    entry = _entry(name)
    return None if entry is None else str(entry["source"])


def suggestions(name: str, n: int = 3) -> tuple[str, ...]:
    """The names nearest to ``name``, nearest first."""
    lowered = {known.lower(): known for known in names()}
    short = {known.partition("/")[2].lower(): known for known in names()}
    wanted = name.lower()
    found = difflib.get_close_matches(wanted, lowered, n=n, cutoff=0.5)
    more = difflib.get_close_matches(wanted.rpartition("/")[2], short, n=n, cutoff=0.5)
    ranked = [short[m] for m in more] if "/" not in name else [lowered[m] for m in found]
    return tuple(dict.fromkeys(ranked + [lowered[m] for m in found]))[:n]


def load(name: str) -> ModelArch:
    """The architecture of a model in the catalogue.

    Raises:
        UnsupportedModelError: if it is not there, with the nearest names.
    """
    config = lookup(name)
    if config is None:
        near = suggestions(name)
        raise UnsupportedModelError(
            "not in the catalogue of models",
            seen=name,
            fix=f"nearest: {', '.join(near)}" if near else "give a folder, or go online",
        )
    return arch_from_config(config, generation=_generation(name))


def _generation(name: str) -> Mapping[str, Any] | None:
    """generation_config.json of the entry, or of the one whose shapes it takes."""
    entry = _entry(name) or {}
    found: Mapping[str, Any] | None = entry.get("generation_config")
    if found is None and "shapes_of" in entry:
        found = _entries()[entry["shapes_of"]].get("generation_config")
    return found


def _entry(name: str) -> dict[str, Any] | None:
    return _entries().get(_spellings().get(name.lower(), ""))


@functools.cache
def _spellings() -> dict[str, str]:
    return {known.lower(): known for known in _entries()}


@functools.cache
def _entries() -> dict[str, dict[str, Any]]:
    text = files("hullspeed.arch.catalogue").joinpath("models.json").read_text("utf-8")
    return {entry["name"]: entry for entry in json.loads(text)}
