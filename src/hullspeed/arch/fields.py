"""Fields: a config.json read one field at a time, each with its type and its bounds.

A required field that is missing is refused by name. Class defaults of some library are never
used to size a model: they describe another model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Never, cast

from hullspeed.errors import CorruptFileError, SourceError, UnsupportedModelError

MAX_CONFIG_BYTES: Final = 16 * 1024**2

# Upper bounds: far above any model there is, far below what would exhaust memory here.
MAX_LAYERS: Final = 2_000
MAX_EXPERTS: Final = 16_384
MAX_WIDTH: Final = 2**24  # hidden, intermediate, vocabulary, heads
MAX_CONTEXT: Final = 2**32

_LIMITS = {
    "num_hidden_layers": MAX_LAYERS,
    "depth": MAX_LAYERS,
    "mtp_num_hidden_layers": 64,
    "num_nextn_predict_layers": 64,
    "num_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
    "n_routed_experts": MAX_EXPERTS,
    "max_position_embeddings": MAX_CONTEXT,
    "sliding_window": MAX_CONTEXT,
}


class Fields:
    """A JSON object of a model's configuration.

    Args:
        values: The object.
        where: What it is, for messages: ``"config.json"``, ``"config.json text_config"``.
    """

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def missing(self, name: str) -> Never:
        """Refuse because a field is missing."""
        raise UnsupportedModelError(
            f"{self.where} has no {name}, which this architecture needs",
            fix="use the model's complete configuration; nothing is guessed",
        )

    def wrong(self, name: str, want: str) -> Never:
        """Refuse because a field has another type or lies out of bounds."""
        raise UnsupportedModelError(
            f"{self.where}: {name} must be {want}",
            seen=self.values.get(name),
            fix="check the model's configuration",
        )

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def natural(self, *names: str, zero: bool = False) -> int:
        """A required integer from 1 (or 0) to the field's bound; the first name that is there."""
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            self.missing(" or ".join(names))
        value, limit = self.values[name], _LIMITS.get(name, MAX_WIDTH)
        low = 0 if zero else 1
        if type(value) is not int or not low <= value <= limit:
            self.wrong(name, f"an integer from {low} to {limit}")
        return value

    def natural_or(self, default: int, *names: str, zero: bool = False) -> int:
        """As :meth:`natural`, or ``default`` where the field's absence has that meaning."""
        return self.natural(*names, zero=zero) if any(map(self.has, names)) else default

    def number(self, *names: str) -> float:
        """A required finite number above zero; the first name that is there."""
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            self.missing(" or ".join(names))
        value = self.values[name]
        if type(value) not in (int, float) or not math.isfinite(cast(float, value)):
            self.wrong(name, "a finite number")
        if cast(float, value) <= 0:
            self.wrong(name, "a number above zero")
        return float(cast(float, value))

    def number_or(self, default: float, *names: str) -> float:
        """As :meth:`number`, or ``default`` where the field's absence has that meaning."""
        return self.number(*names) if any(map(self.has, names)) else default

    def flag(self, name: str, absent: bool | None = None) -> bool:
        """A boolean; ``absent`` is what its absence means (``None``: it is required)."""
        value = self.values.get(name)
        if value is None:
            if absent is None:
                self.missing(name)
            return absent
        if not isinstance(value, bool):
            self.wrong(name, "true or false")
        return value

    def text(self, name: str, absent: str | None = None) -> str:
        """A string; ``absent`` is what its absence means (``None``: it is required)."""
        value = self.values.get(name)
        if value is None:
            if absent is None:
                self.missing(name)
            return absent
        if not isinstance(value, str):
            self.wrong(name, "text")
        return value

    def words(self, name: str, length: int | None = None) -> list[str] | None:
        """A list of strings of the given length, or ``None`` if the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            self.wrong(name, "a list of words")
        if length is not None and len(value) != length:
            self.wrong(name, f"a list of {length} words, one for each layer")
        return value

    def naturals(self, name: str) -> list[int]:
        """An integer, or a list of them, or an empty list if the field is absent."""
        value = self.values.get(name)
        listed: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item < MAX_WIDTH for item in listed):
            self.wrong(name, f"integers from 0 to {MAX_WIDTH - 1}")
        return listed

    def section(self, name: str) -> Fields:
        """A required object."""
        return self.section_or_none(name) or self.missing(name)

    def section_or_none(self, name: str) -> Fields | None:
        """An object, or ``None`` if it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.wrong(name, "an object")
        return Fields(value, f"{self.where} {name}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 16 MiB.

    Raises:
        CorruptFileError: if it is no JSON object, or larger.
        SourceError: if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise SourceError("cannot read", seen=str(path), fix=f"{error.strerror}") from error
    return parse_json(raw, path.name)


def parse_json(raw: bytes, name: str) -> dict[str, Any]:
    """A JSON object from bytes.

    Raises:
        CorruptFileError: if it is no JSON object, or larger than 16 MiB.
    """
    if len(raw) > MAX_CONFIG_BYTES:
        raise CorruptFileError(f"{name} is larger than 16 MiB", fix="give a model's configuration")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{name} is not JSON", seen=str(error), fix="fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptFileError(
            f"{name} is no JSON object", seen=type(value).__name__, fix="fetch the file again"
        )
    return value
