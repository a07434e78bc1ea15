"""hullspeed.lock: the whole stack that passed, so that any drift from it can be named."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hullspeed.errors import UsageError
from hullspeed.findings import Finding
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.case import Case
from hullspeed.preflight.codes import found
from hullspeed.preflight.stack import ModelFile, Stack
from hullspeed.sources.cache import write_atomically

LOCK_NAME = "hullspeed.lock"
_BARE_KEY = re.compile(r"^[A-Za-z0-9_-]+$")
_HEADER = "# The stack that passed hullspeed preflight. Write it anew with --write-lock.\n"


class LockedHardware(msgspec.Struct, frozen=True, kw_only=True):
    """Processor, driver and devices; ``gpus`` are names in order."""

    cpu: str
    usable_cores: int
    driver: str = ""
    gpus: tuple[str, ...] = ()


class LockedSoftware(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's interpreter; ``torch`` with its build, ``packages`` in full."""

    os: str
    python: str
    torch: str = ""
    cuda: str = ""
    packages: dict[str, str] = {}


class LockedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model: its revision and every file with size and SHA-256."""

    source: str
    revision: str = ""
    files: tuple[ModelFile, ...] = ()


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content.

    Attributes:
        version: Of this format.
    """

    version: int
    engine: str
    hardware: LockedHardware
    software: LockedSoftware
    model: LockedModel


def lock_of(ask: Ask, stack: Stack) -> Lock:
    """The lock that describes ``stack``."""
    case = Case(ask, stack)
    torch = stack.python.torch
    return Lock(
        version=1,
        engine=ask.engine,
        hardware=LockedHardware(
            cpu=stack.cpu.model,
            usable_cores=stack.cpu.usable_cores,
            driver=stack.nvidia.driver if ask.on_gpu and stack.nvidia else "",
            gpus=tuple(gpu.name for gpu in case.used_gpus),
        ),
        software=LockedSoftware(
            os=stack.system.os,
            python=stack.python.version,
            torch=torch.version if torch else "",
            cuda=(torch.cuda or "") if torch else "",
            packages=dict(sorted(stack.python.packages.items())),
        ),
        model=LockedModel(source=ask.model, revision=stack.model.revision, files=stack.model.files),
    )


def write_lock(path: Path, lock: Lock) -> None:
    """Write ``lock`` as TOML, whole or not at all.

    Raises:
        UsageError: if the folder cannot be written.
    """
    text = _HEADER + _toml(msgspec.to_builtins(lock))
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UsageError(
            f"cannot write the lock: {error.strerror}", seen=str(path), fix="give another --lock"
        ) from error


def read_lock(path: Path) -> Lock:
    """The lock in ``path``.

    Raises:
        UsageError: if it cannot be read or is no lock of this version.
    """
    try:
        lock = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Lock)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"not a lock file: {error}", seen=str(path), fix="write it anew with --write-lock"
        ) from error
    if lock.version != 1:
        raise UsageError(
            "a lock of another format", seen=lock.version, fix="write it anew with --write-lock"
        )
    return lock


def drift(path: Path, ask: Ask, stack: Stack) -> Iterator[Finding]:
    """PF070 to PF073: everything in which ``stack`` differs from the lock in ``path``.

    Raises:
        UsageError: if the file is there and is no lock.
    """
    if not path.is_file():
        yield found("PF070", path=path, model=ask.model)
        return
    locked, seen = read_lock(path), lock_of(ask, stack)
    for name, old, new in _software(locked, seen):
        yield found("PF071", name=name, locked=old or "absent", seen=new or "absent")
    for name, old, new in _hardware(locked, seen):
        yield found("PF072", name=name, locked=old or "absent", seen=new or "absent")
    for name, old, new in _model(locked, seen):
        yield found(
            "PF073", name=name, locked=old or "absent", seen=new or "absent", model=ask.model,
            revision=locked.model.revision,
        )  # fmt: skip


Difference = tuple[str, str, str]


def _software(old: Lock, new: Lock) -> Iterator[Difference]:
    a, b = old.software, new.software
    pairs = [
        ("engine", old.engine, new.engine), ("operating system", a.os, b.os),
        ("Python", a.python, b.python), ("torch", a.torch, b.torch), ("CUDA build", a.cuda, b.cuda),
    ]  # fmt: skip
    names = sorted((a.packages.keys() | b.packages.keys()) - {"torch"})
    pairs += [(name, a.packages.get(name, ""), b.packages.get(name, "")) for name in names]
    yield from (pair for pair in pairs if pair[1] != pair[2])


def _hardware(old: Lock, new: Lock) -> Iterator[Difference]:
    a, b = old.hardware, new.hardware
    pairs = [
        ("processor", a.cpu, b.cpu), ("usable cores", str(a.usable_cores), str(b.usable_cores)),
        ("driver", a.driver, b.driver), ("GPUs", ", ".join(a.gpus), ", ".join(b.gpus)),
    ]  # fmt: skip
    yield from (pair for pair in pairs if pair[1] != pair[2])


def _model(old: Lock, new: Lock) -> Iterator[Difference]:
    a, b = old.model, new.model
    if a.source != b.source:
        yield "model", a.source, b.source
        return
    if a.revision != b.revision:
        yield "revision", a.revision, b.revision
    before, after = ({file.name: file for file in model.files} for model in (a, b))
    for name in sorted(before.keys() | after.keys()):
        x, y = before.get(name), after.get(name)
        if x is None or y is None:
            yield name, "present" if x else "", "present" if y else ""
        elif x.size_bytes != y.size_bytes:
            yield f"size of {name}", str(x.size_bytes), str(y.size_bytes)
        elif x.sha256 and y.sha256 and x.sha256 != y.sha256:
            yield f"SHA-256 of {name}", x.sha256, y.sha256


def _toml(data: dict[str, object], prefix: str = "") -> str:
    """TOML of nested tables, lists of strings and lists of tables."""
    lines, tables = [], []
    for key, value in data.items():
        name = key if _BARE_KEY.match(key) else _string(key)
        if isinstance(value, dict):
            tables.append(f"\n[{prefix}{name}]\n" + _toml(value, f"{prefix}{name}."))
        elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            tables += [f"\n[[{prefix}{name}]]\n" + _toml(row, f"{prefix}{name}.") for row in value]
        else:
            lines.append(f"{name} = {_value(value)}")
    return "".join(f"{line}\n" for line in lines) + "".join(tables)


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return str(value) if isinstance(value, int) else _string(str(value))


def _string(text: str) -> str:
    """A JSON string is a TOML basic string, except that TOML forbids DEL too."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")
