"""profiles: how vLLM, SGLang, TensorRT-LLM and hullspeed schedule, as data."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from hullspeed.errors import UsageError
from hullspeed.twin.scheduler import Policy

_FILE = Path(__file__).with_name("profiles.toml")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's scheduling.

    Attributes:
        cache: Prefix cache of models without recurrent state.
        hybrid_cache: Of models with it; the same unless given.
        page_tokens: Pages of the simulation; 0 takes the allocator's blocks.
        source: Where this was read, and what is simplified.
    """

    order: Literal["mixed", "prefill_first"]
    reserve: Literal["page", "none", "ratio", "whole"]
    cache: str
    source: str
    hybrid_cache: str = ""
    ratio: float = 0.0
    page_tokens: int = 0

    @property
    def policy(self) -> Policy:
        """As the scheduler takes it."""
        return Policy(order=self.order, reserve=self.reserve, ratio=self.ratio)


def profile(engine: str) -> Profile:
    """The profile of an engine.

    Raises:
        UsageError: for an engine without one.
    """
    known = profiles()
    if engine not in known:
        raise UsageError(
            "no scheduling profile for this engine", seen=engine, fix=f"use {', '.join(known)}"
        )
    return known[engine]


@cache
def profiles() -> dict[str, Profile]:
    """All of them, by engine."""
    data = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return msgspec.convert(data, dict[str, Profile])
