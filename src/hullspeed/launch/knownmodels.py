"""Known models: whether a name is one that its organisation released, and the nearest that is."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from importlib.resources import files

import msgspec


class Organisation(msgspec.Struct, frozen=True, kw_only=True):
    """Patterns of released names, and examples for suggestions."""

    patterns: tuple[str, ...]
    examples: tuple[str, ...]


@functools.cache
def organisations() -> dict[str, Organisation]:
    """The organisations whose names are known."""
    text = files("hullspeed.launch").joinpath("models.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Organisation])


def nearest_model(name: str) -> str | None:
    """``None`` when nothing speaks against ``name``; else the nearest known one, or ``""``."""
    org, _, model = name.partition("/")
    known = organisations().get(org)
    if known is None or not model:
        return None
    model = model.partition("@")[0].removesuffix("/")
    if any(re.fullmatch(pattern, model) for pattern in known.patterns):
        return None
    size = re.search(r"\d+(?:\.\d+)?[bB]\b", model)
    same_size = [one for one in known.examples if size and size[0].lower() in one.lower()]
    near = difflib.get_close_matches(model, same_size or known.examples, n=1, cutoff=0.0)
    return f"{org}/{near[0]}" if near else ""
