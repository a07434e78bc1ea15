from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from hullspeed.core.sampling import SamplingParams
from hullspeed.errors import CapacityError, EngineError, ModelError
from hullspeed.runtime.config import EngineConfig
from hullspeed.runtime.messages import (
    Cancel,
    Delta,
    EngineStats,
    Failed,
    FromEngine,
    Loading,
    Outputs,
    Ready,
    Shutdown,
    Submit,
)
from hullspeed.runtime.process import EngineProcess, start_error
from hullspeed.runtime.wire import frame

from .tiny import write_checkpoint, write_tokenizer

START_S = 120.0  # torch is slow to import on a machine under load


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, "qwen3")
    write_tokenizer(path)
    return EngineConfig(
        model=str(path), kernels="ref", threads=1, page_tokens=16, max_running=4,
        kv_budget_bytes=2**21,
    )  # fmt: skip


class Life:
    """One process and everything that it said."""

    def __init__(self, config: EngineConfig) -> None:
        self.process = EngineProcess(config)
        self.messages: list[FromEngine] = []
        self._ended: set[int] = set()
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self.process.run(self._hear))
        self.task.add_done_callback(lambda _: self._news.set())

    def _hear(self, message: FromEngine) -> None:
        self.messages.append(message)
        if isinstance(message, Outputs):
            self._ended.update(d.id for d in message.deltas if d.finish)
        self._news.set()

    async def until(self, done: Callable[[], bool], timeout_s: float = START_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not done():
                self._news.clear()
                await self._news.wait()

    @property
    def ready(self) -> bool:
        return any(isinstance(m, Ready) for m in self.messages)

    def deltas(self, id_: int) -> list[Delta]:
        outputs = (m for m in self.messages if isinstance(m, Outputs))
        return [d for m in outputs for d in m.deltas if d.id == id_]

    def finished(self, id_: int) -> bool:
        return id_ in self._ended

    @property
    def stats(self) -> EngineStats:
        return next(m for m in reversed(self.messages) if isinstance(m, EngineStats))


@asynccontextmanager
async def living(config: EngineConfig) -> AsyncIterator[Life]:
    life = Life(config)
    try:
        await life.until(lambda: life.ready or life.task.done())
        yield life
    finally:
        life.process.kill()
        await asyncio.wait([life.task])


def submit(id_: int, n_output: int, prompt: list[int] | None = None) -> Submit:
    params = SamplingParams(temperature=0.0, max_tokens=n_output, ignore_eos=True)
    return Submit(id=id_, prompt=prompt or [1, 2, 3], sampling=params)


async def test_a_whole_life(config: EngineConfig) -> None:
    async with living(config) as life:
        assert any(isinstance(m, Loading) for m in life.messages)
        pid = life.process.pid
        assert pid is not None

        # Requests run together; a bad one ends alone.
        life.process.send(submit(1, 20))
        life.process.send(submit(2, 5, [10**9]))
        life.process.send(submit(3, 20))
        await life.until(lambda: life.finished(1) and life.finished(3))
        tokens = [[t for d in life.deltas(i) for t in d.tokens] for i in (1, 3)]
        assert tokens[0] == tokens[1]
        assert len(tokens[0]) == 20
        (bad,) = life.deltas(2)
        assert (bad.finish, bad.error_type) == ("error", "RequestError")

        # Cancelled, a request's pages are free within a step.
        life.process.send(submit(4, 400))
        await life.until(lambda: len(life.deltas(4)) > 3)
        life.process.send(Cancel([4]))
        await life.until(lambda: life.finished(4))
        n_beats = sum(isinstance(m, EngineStats) for m in life.messages)
        await life.until(
            lambda: sum(isinstance(m, EngineStats) for m in life.messages) > n_beats + 1
        )
        assert life.stats.pages_used == 0
        assert life.stats.running == 0

        # It beats while it is idle.
        n_beats = sum(isinstance(m, EngineStats) for m in life.messages)
        await life.until(
            lambda: sum(isinstance(m, EngineStats) for m in life.messages) >= n_beats + 3
        )

        # Interrupts are the parent's business.
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        life.process.send(submit(5, 3))
        await life.until(lambda: life.finished(5))

        life.process.send(Shutdown())
        assert await asyncio.wait_for(life.task, START_S) == 0
        assert life.process.pid is None
        life.process.send(submit(6, 3))  # dropped, no error


async def test_a_crash_is_seen(config: EngineConfig) -> None:
    async with living(config) as life:
        life.process.send(submit(1, 400))
        await life.until(lambda: len(life.deltas(1)) > 2)
        assert life.process.pid is not None
        os.kill(life.process.pid, signal.SIGKILL)
        assert await asyncio.wait_for(life.task, START_S) == -signal.SIGKILL
        assert not life.finished(1)


async def test_cancelling_run_ends_the_process(config: EngineConfig) -> None:
    async with living(config) as life:
        pid = life.process.pid
        assert pid is not None
        life.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await life.task
        assert not psutil.pid_exists(pid)


async def test_it_ends_when_its_parent_does(config: EngineConfig) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: ASYNC220 # returns at once
            [sys.executable, "-m", "hullspeed.runtime.engine_process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
        )
    with ours:
        ours.sendall(frame(config))
        ours.settimeout(START_S)
        data = b""
        while b"ready" not in data:
            data += ours.recv(65536)
    assert process.wait(START_S) == 0


async def test_why_it_cannot_start(tmp_path: Path) -> None:
    async with living(EngineConfig(model=str(tmp_path / "nothing.gguf"), threads=1)) as life:
        code = await asyncio.wait_for(life.task, START_S)
    (failed,) = [m for m in life.messages if isinstance(m, Failed)]
    assert code == failed.exit_code == 2
    assert "nothing.gguf" in failed.error
    assert isinstance(start_error(failed), ModelError)
    assert isinstance(start_error(Failed("x", 1)), CapacityError)
    assert isinstance(start_error(Failed("x", 3)), EngineError)


async def test_what_is_no_message_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "liar.py"
    script.write_text(
        "import socket, sys, time\n"
        "s = socket.socket(fileno=int(sys.argv[1]))\n"
        "s.sendall(bytes([4, 0, 0, 0]) + b'evil')\n"
        "time.sleep(600)\n"
    )
    process = EngineProcess(EngineConfig(model="m"), command=(sys.executable, str(script)))
    with pytest.raises(EngineError, match="malformed"):
        await asyncio.wait_for(process.run(lambda _: None), START_S)
    assert process.pid is None


async def test_the_client_side_needs_no_torch() -> None:
    code = "import sys, hullspeed.runtime.process; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


async def test_a_storm_of_requests_and_cancellations(config: EngineConfig) -> None:
    """200 requests at once, a third of them cancelled on the way: none lost, none mixed."""
    rng = random.Random(8)
    async with living(config) as life:
        prompts = [[rng.randrange(250) for _ in range(rng.randint(1, 40))] for _ in range(10)]
        for i, prompt in enumerate(prompts):
            life.process.send(submit(i, 24, prompt))
        await life.until(lambda: all(life.finished(i) for i in range(10)))
        alone = [[t for d in life.deltas(i) for t in d.tokens] for i in range(10)]
        life.messages.clear()

        ids = range(100, 300)
        for i in ids:
            life.process.send(submit(i, 2 + i % 9, prompts[i % 10]))
        gone = {i for i in ids if rng.random() < 0.33}
        for i in sorted(gone):
            if rng.random() < 0.5:
                await asyncio.sleep(0.002)
            life.process.send(Cancel([i]))
        await life.until(lambda: all(map(life.finished, ids)))
        beats = len(life.messages)
        await life.until(lambda: any(isinstance(m, EngineStats) for m in life.messages[beats:]))

        outputs: dict[int, list[Delta]] = {i: [] for i in ids}
        for message in life.messages:
            for delta in message.deltas if isinstance(message, Outputs) else ():
                outputs[delta.id].append(delta)
        for i, deltas in outputs.items():
            tokens = [t for d in deltas for t in d.tokens]
            assert [d.finish for d in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert tokens == alone[i % 10][: len(tokens)]
            if i not in gone:
                assert (deltas[-1].finish, len(tokens)) == ("length", 2 + i % 9)
        stats = life.stats
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == stats.pages_total
