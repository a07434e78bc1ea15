"""Waits and costs whose verdict does not depend on how fast a machine is, or how busy."""

from __future__ import annotations

import contextlib
import gc
import select
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

# Long after any machine would have done it: the end of a wait that is in vain.
PATIENCE_S = 120.0
_PAUSE_S = 0.01

Text = TypeVar("Text", str, bytes)


def until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> bool:
    """Whether ``condition`` came true within ``limit_s``.

    Looks are counted rather than seconds: a process that was stopped meanwhile, or did not get a
    core, has not looked.
    """
    for _ in range(round(limit_s / _PAUSE_S)):
        if condition():
            return True
        time.sleep(_PAUSE_S)
    return condition()


def first_line(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """What ``process`` says first on standard output; killed and empty if that takes too long."""
    stdout = process.stdout
    if stdout is None:
        raise ValueError("standard output is not a pipe")
    if not until(lambda: bool(select.select([stdout], [], [], 0)[0]), limit_s):
        process.kill()
    return stdout.readline()


def output_of(process: subprocess.Popen[Text]) -> tuple[Text, Text]:
    """What ``process`` wrote until it ended; killed if that takes too long."""
    for _ in range(round(PATIENCE_S)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=1.0)
    process.kill()
    raise TimeoutError(f"{process.args!r} did not end")


def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions, in Python and in C, that ``work`` makes in this thread: a cost that is
    the same on every machine.
    """
    count = 0

    def seen(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what a collection calls is not the work's
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count


def least_cpu_s(work: Callable[[], object], times: int = 5) -> float:
    """The least processor time of this thread that ``work`` took: for ratios within one run."""
    taken = []
    for _ in range(times):
        begin_s = time.thread_time()
        work()
        taken.append(time.thread_time() - begin_s)
    return min(taken)
