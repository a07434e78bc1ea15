"""Sound stacks and planted ones, read from the data files beside this module."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from hullspeed.preflight.ask import Ask
from hullspeed.preflight.stack import Stack

HERE = Path(__file__).parent


class Planted(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    base: str
    also: tuple[str, ...] = ()
    ask: dict[str, Any] = {}
    stack: dict[str, Any] = {}

    def build(self) -> tuple[Ask, Stack]:
        ask, stack = _base(self.base)
        return (
            msgspec.convert({**ask, **self.ask}, Ask).checked(),
            msgspec.convert(_merged(stack, self.stack), Stack),
        )


def planted() -> dict[str, Planted]:
    return msgspec.convert(_read("planted.toml"), dict[str, Planted])


def healthy(name: str) -> tuple[Ask, Stack]:
    ask, stack = _base(name)
    return msgspec.convert(ask, Ask).checked(), msgspec.convert(stack, Stack)


def _base(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    kind, _, count = name.partition("x")
    data = _read("healthy.toml")[kind]
    if count:
        gpu = data["stack"]["nvidia"]["gpus"][0]
        gpus = [{**gpu, "index": i, "uuid": f"GPU-{i:04}"} for i in range(int(count))]
        data["stack"]["nvidia"]["gpus"] = gpus
    return data["ask"], data["stack"]


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def _merged(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``patch`` over it; ``false`` for a value that is no flag takes it away."""
    result = copy.deepcopy(base)
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        elif value is False and not isinstance(result.get(key), bool) and key in result:
            del result[key]
        else:
            result[key] = value
    return result
