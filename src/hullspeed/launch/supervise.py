"""Supervise: one engine's process from start to end, read top-down.

Start it in a session of its own, follow its log, wait until it answers, serve until it ends or is
told to; then let it finish its requests, and leave no process behind. A crash is explained from
the log by a function that the caller gives, since the explanation lives above this layer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Self

import httpx2

from hullspeed.clock import Clock, MonotonicClock
from hullspeed.errors import BrokenStackError, EngineError
from hullspeed.findings import Finding
from hullspeed.launch.command import Command
from hullspeed.launch.startlog import Stage, StartLog

Explain = Callable[[str], Sequence[Finding]]
"""From the text of a log to what it means."""

_POLL_S = 0.25
_PROBE_TIMEOUT_S = 2.0
_KILL_WAIT_S = 10.0
_CLEANUP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run and how long to wait.

    Attributes:
        argv: Program and arguments.
        env: Variables beside those of this process.
        base_url: Where the server will answer.
        start_timeout_s: From start to ready; large models from slow disks take half an hour.
        drain_s: What running requests get to finish after a stop.
        log_path: File that receives every line of the engine's output.
        cwd: Folder of the configuration files that ``argv`` names.
    """

    engine: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    base_url: str
    ready_path: str = "/health"
    start_timeout_s: float = 1800.0
    drain_s: float = 30.0
    log_path: Path | None = None
    cwd: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How it ended.

    Attributes:
        exit_code: Of the process; negative for a signal.
        stopped: Whether it was told to.
        drained: Whether it ended by itself within the time given.
    """

    exit_code: int
    stopped: bool
    drained: bool = True


class EngineCrashedError(EngineError):
    """The engine ended by itself.

    Args:
        findings: What the log means, from the explanation given; may be empty.
        log: The end of the log.
    """

    def __init__(
        self, what: str, *, findings: Sequence[Finding] = (), log: str = "", fix: str = ""
    ) -> None:
        super().__init__(what, fix=fix)
        self.findings = tuple(findings)
        self.log = log


def _ignore(_said: object) -> None:
    """For a caller that does not want to be told."""


def _no_findings(_log: str) -> Sequence[Finding]:
    return ()


class _Stop(BaseException):
    """SIGTERM, made an exception so that it unwinds like Ctrl-C."""


def launch_of(command: Command, *, log_path: Path | None = None, cwd: Path | None = None) -> Launch:
    """The launch of a command on this machine; its configuration files are written to ``cwd``."""
    settings = command.settings
    for name, text in command.files.items():
        ((cwd or Path()) / name).write_text(text, encoding="utf-8")
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "") else settings.host  # noqa: S104
    shown = f"[{host}]" if ":" in host else host
    return Launch(
        engine=settings.engine,
        argv=command.argv,
        env=command.env,
        base_url=f"http://{shown}:{settings.port}",
        ready_path=command.ready_path,
        log_path=log_path,
        cwd=cwd,
    )


class Supervisor:
    """A running engine; a context manager that leaves nothing running.

    Args:
        on_stage: Told of each stage of the start.
        on_line: Given each line of the engine's output.
        explain: From the log of a crash to findings.

    Raises:
        BrokenStackError: on entering, if the program cannot be run at all.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        on_stage: Callable[[Stage], None] = _ignore,
        on_line: Callable[[str], None] = _ignore,
        explain: Explain = _no_findings,
        clock: Clock | None = None,
    ) -> None:
        self.launch = launch
        self.log = StartLog(launch.engine)
        self._on_stage, self._on_line, self._explain = on_stage, on_line, explain
        self._clock = clock or MonotonicClock()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(drain_s=0.0)

    @property
    def pid(self) -> int | None:
        """Process id of the engine; ``None`` before the start."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process.

        Raises:
            BrokenStackError: if the program cannot be run.
        """
        try:
            self._process = subprocess.Popen(
                self.launch.argv,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.launch.env},
                cwd=self.launch.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                bufsize=1,
                start_new_session=True,  # Ctrl-C reaches us alone, and its children end together
            )
        except OSError as error:
            raise BrokenStackError(
                f"the engine's program cannot be run: {error.strerror}", seen=self.launch.argv[0],
                fix="install the engine, or give the path of its environment with --python",
            ) from error  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="engine-log", daemon=True)
        self._reader.start()

    def wait_ready(self) -> float:
        """Wait until the server answers; returns the seconds it took.

        Raises:
            EngineCrashedError: if it ends before.
            EngineError: if it is not ready within the time allowed; it is stopped then.
        """
        started = self._clock.now()
        with httpx2.Client(timeout=_PROBE_TIMEOUT_S, trust_env=False) as client:
            while True:
                if self._ended_within(_POLL_S):
                    raise self._crash("the engine ended before it was ready")
                if self._answers(client):
                    return self._clock.now() - started
                if self._clock.now() - started > self.launch.start_timeout_s:
                    self.stop(drain_s=0.0)
                    raise EngineError(
                        f"the engine was not ready after {self.launch.start_timeout_s:g} s",
                        seen=str(self.log.stage),
                        fix="read its log; raise the time with --start-timeout",
                    )

    def wait(self) -> Ended:
        """Serve until the engine ends.

        Raises:
            EngineCrashedError: if it ends with an error.
        """
        while not self._ended_within(_POLL_S):
            pass
        code = self._exit_code()
        if code != 0:
            raise self._crash("the engine stopped while serving")
        return Ended(exit_code=code, stopped=False)

    def run(self) -> Ended:
        """Start, wait until ready, serve; Ctrl-C or SIGTERM drains, a second one kills.

        Raises:
            BrokenStackError, EngineError: as the steps do.
        """
        with _sigterm_raises(), self:
            try:
                took_s = self.wait_ready()
                self._on_stage(Stage("ready", f"after {took_s:.1f} s at {self.launch.base_url}"))
                return self.wait()
            except (KeyboardInterrupt, _Stop):
                self._on_stage(Stage("draining", f"up to {self.launch.drain_s:g} s"))
                return self.stop()

    def stop(self, drain_s: float | None = None) -> Ended:
        """Ask it to finish, wait, and kill what is left of its session."""
        process = self._process
        if process is None:
            return Ended(exit_code=0, stopped=True)
        allowed_s = self.launch.drain_s if drain_s is None else drain_s
        drained = True
        if process.poll() is None:
            self._signal(signal.SIGTERM, group=False)
            try:
                drained = self._ended_within(allowed_s)
            except (KeyboardInterrupt, _Stop):  # asked a second time
                drained = False
        # Workers that outlive the engine hold the GPU: end the whole session in any case, after a
        # moment for those that clean up shared memory.
        if drained and allowed_s > 0:
            self._wait_for_group(_CLEANUP_S)
        self._signal(signal.SIGKILL, group=True)
        process.wait(_KILL_WAIT_S)
        if self._reader is not None:
            self._reader.join(_KILL_WAIT_S)
        return Ended(exit_code=self._exit_code(), stopped=True, drained=drained)

    def _read(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(process.stdout)
            copy: IO[str] | None = None
            if self.launch.log_path is not None:
                copy = stack.enter_context(self.launch.log_path.open("a", encoding="utf-8"))
            for line in process.stdout:
                if copy is not None:
                    copy.write(line)
                    copy.flush()
                stage = self.log.add(line)
                self._on_line(line.rstrip("\n"))
                if stage is not None:
                    self._on_stage(stage)

    def _answers(self, client: httpx2.Client) -> bool:
        try:
            url = self.launch.base_url + self.launch.ready_path
            return client.get(url).status_code == httpx2.codes.OK
        except httpx2.HTTPError:  # not listening yet, or busy
            return False

    def _ended_within(self, seconds: float) -> bool:
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _wait_for_group(self, seconds: float) -> None:
        deadline_s = self._clock.now() + seconds
        while self._process is not None and self._clock.now() < deadline_s:
            try:
                os.killpg(self._process.pid, 0)
            except (ProcessLookupError, PermissionError):  # empty, or not ours any more
                return
            time.sleep(_CLEANUP_S / 40)

    def _exit_code(self) -> int:
        code = self._process.poll() if self._process else 0
        return 0 if code is None else code

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing left of it
            send = os.killpg if group else os.kill
            send(self._process.pid, number)

    def _crash(self, what: str) -> EngineCrashedError:
        if self._reader is not None:
            self._reader.join(_POLL_S * 8)  # the last lines hold the reason
        code = self._exit_code()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        findings = tuple(self._explain(self.log.text))
        reason = findings[0].what if findings else self.log.last_error()
        return EngineCrashedError(
            f"{what} ({how}, {self.log.stage}): {reason}",
            findings=findings,
            log=self.log.text,
            fix=findings[0].fix if findings else "read the log above the last error",
        )


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_stop(_number: int, _frame: FrameType | None) -> None:
        raise _Stop

    before = signal.signal(signal.SIGTERM, raise_stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
