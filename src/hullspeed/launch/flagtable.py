"""FlagTable: which flags an engine's server takes at one version, read from ``flags/*.toml``.

The tables were read from each release's own argument parser. A flag has one or more rows, each for
the versions in ``[since, until)``; the versions named are those that were looked at.
"""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files
from typing import Any, Literal

import msgspec
from packaging.version import InvalidVersion, Version

from hullspeed.errors import UsageError

Kind = Literal["bool", "switch", "value", "int", "float", "json", "list", "optional"]

_FILES = {
    "vllm": "vllm-0.19-0.33.toml",
    "sglang": "sglang-0.5.toml",
    "trtllm": "trtllm-1.2-1.3.toml",
    "transformers": "transformers-5.toml",
}
ENGINES = tuple(_FILES)


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag at some versions.

    Attributes:
        kind: ``bool`` takes ``--x`` and ``--no-x``; ``switch`` takes no value; ``optional`` may
            take one; ``list`` takes one or more; the others take one.
        choices: The only values it takes, if there are such.
        deprecated: Still taken, with a warning.
    """

    kind: Kind
    since: str = ""
    until: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    deprecated: bool = False


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """What to write today: ``now`` with ``{value}`` for the old value, or nothing; and why."""

    now: str
    why: str


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """How a name on a command line was read.

    Attributes:
        name: The flag's own name.
        negated: Whether it was given as ``--no-x`` or ``--disable-x``.
        abbreviated: Whether argparse would complete it: the name given is only its beginning.
        key: The part after a dot, for JSON given key by key (``--speculative-config.method``).
    """

    name: str
    flag: Flag
    negated: bool = False
    abbreviated: bool = False
    key: str = ""


class FlagTable:
    """The flags of one engine at one version.

    Args:
        engine: One of ``ENGINES``.
        version: Any version between the first and last checked; the newest when ``None``.

    Raises:
        UsageError: for an engine without a table, or a version outside it.
    """

    def __init__(self, engine: str, version: str | None = None) -> None:
        if engine not in _FILES:
            raise UsageError(
                "no flag table for this engine", seen=engine, fix=f"use {', '.join(_FILES)}"
            )
        data = _load(_FILES[engine])
        self.engine = engine
        self.checked: tuple[str, ...] = tuple(data["checked"])
        self.version = version or self.checked[-1]
        self._refuse_outside()
        rows = msgspec.convert(data["flags"], dict[str, tuple[Flag, ...]])
        self.flags = {name: flag for name, given in rows.items() if (flag := self._at(given))}
        self._names = {name: (name, False) for name in self.flags}
        for name, flag in self.flags.items():
            for alias in flag.aliases:
                self._names.setdefault(alias, (name, _is_inverse(alias, name)))
            if flag.kind == "bool":
                self._names.setdefault(f"--no-{name[2:]}", (name, True))

    def match(self, written: str) -> Match | None:
        """The flag that ``written`` (without its value) stands for in the engine's parser.

        vLLM's parser takes underscores for dashes and keys after a dot; argparse (vLLM, SGLang)
        completes a unique beginning.
        """
        name, key = written, ""
        if self.engine == "vllm" and written.startswith("--"):
            name, _, key = written.partition(".")
            name = "--" + name[2:].replace("_", "-")
        if name in self._names:
            own, negated = self._names[name]
            return Match(name=own, flag=self.flags[own], negated=negated, key=key)
        if self.engine not in ("vllm", "sglang") or not name.startswith("--") or len(name) < 4:
            return None
        begun = {entry for text, entry in self._names.items() if text.startswith(name)}
        if len(begun) != 1:
            return None
        own, negated = begun.pop()
        return Match(name=own, flag=self.flags[own], negated=negated, key=key, abbreviated=True)

    def gone(self, written: str) -> Replacement | None:
        """What replaced a flag that this version does not take."""
        table = replacements(self.engine)
        dashed = "--" + written.partition(".")[0][2:].replace("_", "-")
        return table.get(written) or table.get(dashed)

    def nearest(self, written: str) -> str | None:
        """The most similar flag, for a misspelt one."""
        import difflib  # noqa: PLC0415 - only for an unknown flag

        found = difflib.get_close_matches(written, self._names, n=1, cutoff=0.75)
        return found[0] if found else None

    def _at(self, rows: tuple[Flag, ...]) -> Flag | None:
        seen = Version(self.version)
        for row in rows:
            after = not row.since or Version(row.since) <= seen
            if after and (not row.until or seen < Version(row.until)):
                return row
        return None

    def _refuse_outside(self) -> None:
        first, last = self.checked[0], self.checked[-1]
        try:
            seen = Version(self.version)
        except InvalidVersion as error:
            raise UsageError(
                "not an engine version", seen=self.version, fix=f"write it as {last}"
            ) from error
        # A patch release of the last checked minor version is taken to have its flags.
        if not Version(first).release[:2] <= seen.release[:2] <= Version(last).release[:2]:
            raise UsageError(
                f"the flags of {self.engine} are known from {first} to {last}", seen=self.version,
                fix="give --engine-version within that range",
            )  # fmt: skip
        if seen < Version(first):
            self.version = first


def preferred_value(engine: str, flag: str, value: str) -> Replacement | None:
    """What to write instead of a value that is refused or ill-advised."""
    row = _load("gone.toml")["values"].get(engine, {}).get(flag, {}).get(value)
    return msgspec.convert(row, Replacement) if row else None


@functools.cache
def replacements(engine: str) -> dict[str, Replacement]:
    """Old flag to what replaced it."""
    return msgspec.convert(_load("gone.toml").get(engine, {}), dict[str, Replacement])


def _is_inverse(alias: str, name: str) -> bool:
    pairs = (("--disable-", "--enable-"), ("--enable-", "--disable-"))
    return any(alias.startswith(a) and name.startswith(b) for a, b in pairs)


@functools.cache
def _load(name: str) -> dict[str, Any]:
    text = files("hullspeed.launch").joinpath("flags", name).read_text(encoding="utf-8")
    return tomllib.loads(text)
