"""ChatTemplate: a model's chat template, rendered in child processes that can be killed.

A template comes with the model and is a program: it can loop, allocate or reach for Python's
internals. It runs in jinja2's immutable sandbox, in a process without environment, with bounds
on time, memory and output; when it breaks one, that process is replaced and only that request
fails.
"""

from __future__ import annotations

import json
import queue
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from hullspeed.errors import BrokenStackError, RequestError, UnsupportedModelError

_WORKER = Path(__file__).with_name("template_worker.py")
_LENGTH = struct.Struct("<I")
_START_TIMEOUT_S = 20.0  # a start takes 0.1 s; the rest is for a machine under load


class TemplateLimits(NamedTuple):
    """What one rendering may take."""

    timeout_s: float = 2.0
    memory_bytes: int = 512 * 1024 * 1024
    max_chars: int = 1024 * 1024


DEFAULT_LIMITS = TemplateLimits()


class ChatTemplate:
    """Renders one template; safe to use from several threads.

    Args:
        source: The jinja2 text.
        limits: Bounds of one rendering.
        workers: Processes, so that one slow rendering does not hold up the others.

    Raises:
        UnsupportedModelError: the template is not valid jinja2.
        BrokenStackError: the worker cannot start.
    """

    def __init__(
        self, source: str, *, limits: TemplateLimits = DEFAULT_LIMITS, workers: int = 2
    ) -> None:
        self.source = source
        self._limits = limits
        self._closed = False
        # Only the first starts now: it proves the template. A None is started when it is needed.
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers - 1):
            self._idle.put(None)
        self._idle.put(_Worker(source, limits))

    def render(self, values: Mapping[str, Any]) -> str:
        """The template's text for ``values`` (JSON data); blocks up to the time limit.

        Raises:
            RequestError: the template refuses the values or broke a limit.
        """
        worker = self._idle.get()
        if self._closed:
            self._idle.put(worker)  # for the next who waits
            raise RequestError("the chat template is closed")
        try:
            if worker is None:
                worker = _Worker(self.source, self._limits)
            return worker.render(values)
        finally:
            if worker is not None and (self._closed or not worker.alive):
                worker.close()
                worker = None
            self._idle.put(worker)

    def close(self) -> None:
        """End the workers; one that is rendering ends after that."""
        self._closed = True
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                self._idle.put(None)  # wakes whoever waits
                return
            if worker is not None:
                worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Worker:
    """One child process; dead after its first broken limit."""

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._limits = limits
        # -I: no PYTHON* variables, no user site, and the script's folder is not importable.
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
        )
        config = {
            "template": source,
            "memory_bytes": limits.memory_bytes,
            "max_chars": limits.max_chars,
        }
        answer = self._ask(config, _START_TIMEOUT_S)
        if answer is None:
            self.close()
            raise BrokenStackError(
                "the chat template worker does not start",
                seen=self._process.returncode,
                fix="check that `python -c 'import jinja2'` works: pip install 'hullspeed[engine]'",
            )
        if "error" in answer:
            self.close()
            raise UnsupportedModelError(
                "the model's chat template is not valid", seen=answer["error"]
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def render(self, values: Mapping[str, Any]) -> str:
        answer = self._ask({"values": values}, self._limits.timeout_s)
        if answer is None:
            self.close()
            raise RequestError(
                f"the chat template did not finish in {self._limits.timeout_s:g} s "
                "or within its memory",
                fix="shorten the messages, or check the model's chat template",
                param="messages",
            )
        if "text" in answer:
            return answer["text"]
        what = {
            "limit": "the chat template broke a limit",
            "security": "the chat template does what it must not",
        }.get(answer["kind"], "the chat template refused the messages")
        raise RequestError(what, seen=answer["error"], param="messages")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # unsent bytes to a process that is gone

    def _ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, str] | None:
        """The answer, or ``None`` if the process died or took too long."""
        deadline_s = time.monotonic() + timeout_s
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            return None
        body = json.dumps(message).encode()
        try:
            # The worker reads a whole frame before it does anything, so this cannot block long.
            stdin.write(_LENGTH.pack(len(body)) + body)
            stdin.flush()
        except BrokenPipeError:
            return None
        head = _read(stdout, _LENGTH.size, deadline_s)
        length = _LENGTH.unpack(head)[0] if head else 0
        # JSON escapes take up to 12 bytes a character; errors are short.
        if not 0 < length <= 12 * self._limits.max_chars + 4096:
            return None
        answer = _read(stdout, length, deadline_s)
        return json.loads(answer) if answer else None


def _read(pipe: IO[bytes], n_bytes: int, deadline_s: float) -> bytes | None:
    """Exactly ``n_bytes``, or ``None`` at end of file or deadline."""
    parts = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(parts) < n_bytes:
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                return None
            part = pipe.raw.read(n_bytes - len(parts))  # type: ignore[attr-defined]
            if not part:
                return None
            parts += part
    return bytes(parts)
