"""Probes: the one seam between the gate and the world.

:class:`MachineProbes` looks at this machine. :class:`RecordedProbes` reads a stack written as TOML
or JSON, so that a stack can be judged on another machine, and every broken one can be tested.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Protocol

import msgspec

from hullspeed.errors import SourceError, UsageError
from hullspeed.preflight import interpreter, machine, nvml
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.checkpoint import look_at_model
from hullspeed.preflight.stack import Stack


class Probes(Protocol):
    """Whatever can say what the stack is."""

    def stack(self, ask: Ask) -> Stack:
        """The stack as far as ``ask`` makes it matter."""
        ...


class MachineProbes:
    """This machine, and the interpreter that ``ask.python`` names."""

    def stack(self, ask: Ask) -> Stack:
        """Look at everything; takes about two seconds, most of them the import of torch."""
        python, glibc = interpreter.look_at_python(ask.python)
        return Stack(
            python=python,
            cpu=machine.look_at_cpu(),
            memory=machine.look_at_memory(),
            disk=machine.look_at_disk(ask.cache_dir),
            system=machine.look_at_system(ask.host, ask.port, glibc),
            nvidia=nvml.look_at_nvidia(),
            model=look_at_model(ask.model),
        )


class RecordedProbes:
    """A stack from a file; whatever the file leaves out has its default.

    Raises:
        SourceError: if the file cannot be read.
        UsageError: if it is not a stack.
    """

    def __init__(self, path: Path) -> None:
        self._stack = read_stack(path)

    def stack(self, ask: Ask) -> Stack:
        """The recorded stack, whatever is asked."""
        return self._stack


def read_stack(path: Path) -> Stack:
    """The stack in a TOML or JSON file.

    Raises:
        SourceError: if the file cannot be read.
        UsageError: if it is not a stack.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return msgspec.convert(data, Stack)
    except OSError as error:
        raise SourceError("cannot read the recorded stack", seen=str(path)) from error
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(
            f"not a recorded stack: {error}", seen=str(path),
            fix="write one with hullspeed preflight MODEL --write-stack FILE.json",
        ) from error  # fmt: skip
