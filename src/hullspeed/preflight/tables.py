"""Tables: what engines, CUDA versions and weight formats need, read from the data files."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files
from typing import Any

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hullspeed.models.families import FAMILIES


class EngineVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for engine versions in ``[since, until)``.

    Attributes:
        torch: Version specifier of torch.
        python: Version specifier of Python, where it differs from the engine's own.
        pins: Package to version specifier.
        requires: Packages that must be there in any version.
        source: Where the row was read.
    """

    since: str
    until: str
    torch: str
    source: str
    python: str = ""
    pins: dict[str, str] = {}
    requires: tuple[str, ...] = ()


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        families: Model family to the first version that runs it.
        min_capability: Lowest compute capability with compiled kernels; empty if it needs no GPU.
        glibc: C library its wheels need.
    """

    package: str
    python: str
    versions: tuple[EngineVersion, ...]
    families: dict[str, str]
    cpu_package: str = ""
    min_capability: str = ""
    glibc: str = ""

    def row(self, version: str) -> EngineVersion | None:
        """The row for ``version``; ``None`` outside the table."""
        seen = Version(version)
        for row in self.versions:
            if Version(row.since) <= seen < Version(row.until):
                return row
        return None

    @property
    def known(self) -> str:
        """The versions the table covers, as text."""
        return f"{self.versions[0].since} to below {self.versions[-1].until}"


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """One weight format on one engine; see ``formats.toml``."""

    min: str
    native: str
    fallback: str = ""


class Cuda(msgspec.Struct, frozen=True, kw_only=True):
    """Drivers and CUDA versions; see ``cuda.toml``."""

    drivers: dict[str, str]
    major_minimum: dict[str, str]
    forward_compatibility: dict[str, tuple[int, ...]]
    first_cuda: dict[str, str]
    lowest_capability: dict[str, str]

    def needs_driver(self, cuda: str) -> str:
        """Lowest driver that offers ``cuda`` itself; the nearest older row where it has none."""
        rows = [version for version in self.drivers if Version(version) <= Version(cuda)]
        best = max(rows, key=Version, default=min(self.drivers, key=Version))
        return self.drivers[best]

    def offered_by(self, driver: str) -> str:
        """Highest CUDA that ``driver`` offers itself; empty below the table."""
        seen = Version(driver)
        rows = [cuda for cuda, needs in self.drivers.items() if Version(needs) <= seen]
        return max(rows, key=Version, default="")


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads(files("hullspeed.preflight").joinpath(name).read_text(encoding="utf-8"))


@functools.cache
def engines() -> dict[str, Engine]:
    """Every engine by name."""
    table = msgspec.convert(_load("engines.toml"), dict[str, Engine])
    own = table["hullspeed"]
    families = dict.fromkeys(FAMILIES, own.versions[0].since)
    return {**table, "hullspeed": msgspec.structs.replace(own, families=families)}


@functools.cache
def cuda() -> Cuda:
    """Drivers and CUDA versions."""
    return msgspec.convert(_load("cuda.toml"), Cuda)


@functools.cache
def formats(engine: str) -> dict[str, Format]:
    """Weight formats of one engine; empty where the table has none."""
    return msgspec.convert(_load("formats.toml").get(engine, {}), dict[str, Format])


@functools.cache
def kv_formats(engine: str) -> dict[str, str]:
    """KV types of one engine that need a capability, and which."""
    return msgspec.convert(_load("formats.toml")["kv"].get(engine, {}), dict[str, str])


def fits(version: str, specifier: str) -> bool:
    """Whether ``version`` satisfies ``specifier``; pre-releases count as versions."""
    return SpecifierSet(specifier).contains(version, prereleases=True)


def base_version(version: str) -> str:
    """``2.13.0`` of ``2.13.0+cu130``."""
    return Version(version).public
