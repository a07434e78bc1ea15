"""One run of the gate: look, judge, compare with the lock or write it, and say so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hullspeed.errors import UsageError
from hullspeed.preflight import lock as locks
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.chain import LinkResult, links
from hullspeed.preflight.gate import exit_code, parse_overrides
from hullspeed.preflight.probes import MachineProbes, Probes, RecordedProbes
from hullspeed.preflight.show import as_data, as_lines
from hullspeed.preflight.sizing import sized
from hullspeed.preflight.stack import Model, Stack
from hullspeed.sources.cache import sha256_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What ``hullspeed preflight`` was asked.

    Attributes:
        lock: The lock file.
        stack: A recorded stack to judge instead of this machine.
        write_stack: File that receives the stack that was looked at, as JSON.
    """

    ask: Ask
    lock: Path = Path(locks.LOCK_NAME)
    locked: bool = False
    write_lock: bool = False
    overrides: tuple[str, ...] = ()
    stack: Path | None = None
    write_stack: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The answer, ready to print: ``lines`` or ``data`` to stdout, ``notes`` to stderr."""

    exit_code: int
    lines: tuple[str, ...]
    data: dict[str, Any]
    notes: tuple[str, ...] = ()


def judge(request: Request) -> Judged:
    """Look and judge.

    Raises:
        UsageError: for ``locked`` with ``write_lock``, or an override that is no code.
    """
    if request.locked and request.write_lock:
        raise UsageError("--locked and --write-lock contradict each other", fix="give one of them")
    overrides = tuple(parse_overrides(request.overrides))
    probes: Probes = RecordedProbes(request.stack) if request.stack else MachineProbes()
    ask, stack = request.ask, probes.stack(request.ask)
    if (request.locked or request.write_lock) and not request.stack:
        stack = with_digests(stack)
    chain = links(sized(ask, stack), stack)
    if request.locked:
        found = tuple(locks.drift(request.lock, ask, stack))
        chain.append(LinkResult("lock", str(request.lock), found))
    code = exit_code([finding for link in chain for finding in link.findings], overrides)
    notes: tuple[str, ...] = ()
    if request.write_lock:
        notes = (_write(request, stack) if code == 0 else "the gate is closed: no lock written",)
    if request.write_stack:
        notes = (*notes, _record(request.write_stack, stack))
    return Judged(
        exit_code=code,
        lines=tuple(as_lines(chain, overrides)),
        data=as_data(ask, chain, overrides),
        notes=notes,
    )


def _write(request: Request, stack: Stack) -> str:
    locks.write_lock(request.lock, locks.lock_of(request.ask, stack))
    return f"wrote {request.lock}"


def _record(path: Path, stack: Stack) -> str:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(stack, order="sorted")) + b"\n")
    except OSError as error:
        raise UsageError(f"cannot write the stack: {error.strerror}", seen=str(path)) from error
    return f"wrote {path}"


def with_digests(stack: Stack) -> Stack:
    """``stack`` with the SHA-256 of every model file: reads all of them, about 1 s per GB."""
    model: Model = stack.model
    if not model.found or model.error or not model.files:
        return stack
    hashed = tuple(
        msgspec.structs.replace(file, sha256=sha256_of(Path(model.path) / file.name))
        for file in model.files
    )
    return msgspec.structs.replace(stack, model=msgspec.structs.replace(model, files=hashed))
