"""Served: ``hullspeed serve`` in a process of its own, for as long as it is needed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from hullspeed.errors import EngineError
from hullspeed.runtime.config import EngineConfig


class Server(NamedTuple):
    """A server that takes requests."""

    url: str
    model: str
    ready_s: float
    skipped: tuple[str, ...] = ()


class _ReadyLine(msgspec.Struct):
    url: str
    model: str
    skipped: tuple[str, ...] = ()


@contextmanager
def served(config: EngineConfig, *, drain_s: float = 10.0) -> Iterator[Server]:
    """Start the server on a free port; stop it on the way out, whatever happens.

    Raises:
        EngineError: if it ends before it is ready; its own message was on stderr.
    """
    begin_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "hullspeed", "serve", config.model, *_flags(config),
         "--port", "0", "--json", "--drain-seconds", str(drain_s)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is ours to handle: the server is then drained
    )  # fmt: skip
    try:
        yield _wait(process, begin_s)
    finally:
        _stop(process, drain_s)


def _flags(config: EngineConfig) -> list[str]:
    flags = ["--weight-dtype", config.weight_dtype, "--kernels", config.kernels]
    flags += ["--max-running", str(config.max_running), "--step-tokens", str(config.step_tokens)]
    flags += ["--page-tokens", str(config.page_tokens), "--cache", config.cache]
    flags += ["--eviction", config.eviction, "--kv-dtype", config.kv_dtype]
    flags += ["--state-share", str(config.state_share), "--state-store", config.state_store]
    if config.threads is not None:
        flags += ["--threads", str(config.threads)]
    if config.kv_budget_bytes is not None:
        flags += ["--kv-budget", f"{config.kv_budget_bytes}B"]
    if config.max_context_tokens is not None:
        flags += ["--max-context", str(config.max_context_tokens)]
    return flags


def _wait(process: subprocess.Popen[str], begin_s: float) -> Server:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise EngineError(
            "the server ended before it was ready",
            seen=f"exit code {process.wait()}",
            fix="its message is above; `hullspeed preflight` may say more",
        )
    ready = msgspec.json.decode(line, type=_ReadyLine)
    return Server(ready.url, ready.model, time.monotonic() - begin_s, ready.skipped)


def _stop(process: subprocess.Popen[str], drain_s: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(drain_s + 5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
