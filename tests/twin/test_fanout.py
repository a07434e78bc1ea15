"""Many questions: the same outcomes wherever they are computed, and nothing left behind."""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest

from hullspeed.errors import BrokenStackError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.memory.budget import EngineSettings
from hullspeed.plan.capacity import memory_of
from hullspeed.plan.source import load_model
from hullspeed.twin.arrivals import Arrivals
from hullspeed.twin.fanout import answers, on_cores
from hullspeed.twin.generate import open_loop
from hullspeed.twin.lengths import Lengths
from hullspeed.twin.question import Outcome, Question
from hullspeed.twin.summary import Objective
from hullspeed.twin.sweep import expand, parse_axes
from support.patience import PATIENCE_S, output_of, until

NO_LIMIT = Objective()
WORKLOAD = open_loop(Lengths(tokens=512), Lengths(tokens=16), Arrivals(rate=2.0), requests=20)
COMMAND = [sys.executable, "-m", "hullspeed", "simulate", "Qwen/Qwen3.6-27B-FP8", "--gpu",
           "h100-sxm"]  # fmt: skip


def questions() -> list[Question]:
    planned, gpu = load_model("Qwen/Qwen3.6-27B-FP8"), find_gpu("h100-sxm")
    base = Question(
        label="as asked", arch=planned.arch, weights=planned.weights, gpu=gpu,
        memory=memory_of(gpu), settings=EngineSettings(max_model_len=4096), usd_per_hour=2.0,
    )  # fmt: skip
    axes = parse_axes(["gpu=h100-sxm,a40", "engine=vllm,sglang", "max-num-seqs=8,64,256"])
    return expand(base, axes, memory_of, None)


class FakeRay(types.ModuleType):
    """Ray's contract as far as it is used here; what travels is pickled, as Ray does."""

    class exceptions:  # noqa: N801
        RayError = type("RayError", (Exception,), {})

    def __init__(self, version: str | None = None, fail_at: int = -1) -> None:
        super().__init__("ray")
        self.started: dict[str, Any] | None = None
        self.running: dict[int, bytes] = {}
        self.cancelled: list[int] = []
        self.up = False
        self._version = version
        self._fail_at = fail_at
        self._ids = itertools.count()

    def init(self, **options: Any) -> None:
        self.started, self.up = options, True

    def shutdown(self) -> None:
        self.up = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def put(self, value: object) -> bytes:
        return pickle.dumps(value)

    def remote(self, function: Any) -> Any:
        def submit(version: str, chunk: Sequence[Question], shared: bytes) -> int:
            id_ = next(self._ids)
            sent = pickle.dumps((self._version or version, chunk))
            self.running[id_] = pickle.dumps((function, sent, shared))
            return id_

        return types.SimpleNamespace(remote=submit)

    def get(self, task: int) -> Any:
        if task == self._fail_at:
            raise self.exceptions.RayError("Traceback\nModuleNotFoundError: hullspeed")
        function, sent, shared = pickle.loads(self.running.pop(task))
        version, chunk = pickle.loads(sent)
        return pickle.loads(pickle.dumps(function(version, chunk, pickle.loads(shared))))

    def cancel(self, task: int, *, force: bool) -> None:
        self.cancelled.append(task)


def test_over_ray_the_outcomes_are_the_local_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    asked = questions()
    told: list[int] = []
    found = answers(asked, WORKLOAD, NO_LIMIT, ray="local", progress=told.append)
    assert found == answers(asked, WORKLOAD, NO_LIMIT, workers=1)
    assert told == list(range(1, len(asked) + 1))
    assert ray.started is not None
    assert ray.started["address"] == "local"
    assert (ray.up, ray.running, ray.cancelled) == (False, {}, [])


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, None])
def test_what_is_left_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException] | None
) -> None:
    ray = FakeRay(fail_at=-1 if interrupt else 3)
    monkeypatch.setitem(sys.modules, "ray", ray)

    def progress(done: int) -> None:
        if interrupt and done == 3:
            raise interrupt

    with pytest.raises(interrupt or BrokenStackError):
        answers(questions(), WORKLOAD, NO_LIMIT, ray="auto", progress=progress)
    assert not ray.up
    assert len(ray.cancelled) >= 8


def test_a_node_with_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(version="0.0.0"))
    with pytest.raises(BrokenStackError, match="another hullspeed"):
        answers(questions(), WORKLOAD, NO_LIMIT, ray="auto")


def test_without_ray_or_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:x"):
        with pytest.raises(BrokenStackError, match="cannot be reached"):
            answers(questions(), WORKLOAD, NO_LIMIT, ray=address)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BrokenStackError, match=r"hullspeed\[ray\]") as error:
        answers(questions(), WORKLOAD, NO_LIMIT, ray="local")
    assert error.value.exit_code == 3


def test_an_interrupted_sweep_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())
    found = on_cores(questions(), WORKLOAD, NO_LIMIT, 2)
    assert isinstance(next(found), Outcome)
    found.close()  # type: ignore[attr-defined]
    assert until(lambda: not set(multiprocessing.active_children()) - before)


def test_ctrl_c_ends_the_command_and_its_processes() -> None:
    sweep = [*COMMAND, "--rate", "3", "--requests", "2000", "--workers", "2", "--sweep",
             "max-num-seqs=" + ",".join(str(n) for n in range(1, 120))]  # fmt: skip
    process = subprocess.Popen(
        sweep, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    mine = psutil.Process(process.pid)
    assert until(lambda: len(mine.children()) >= 3)  # two, and the tracker
    children = mine.children()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, errors = output_of(process)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted" in errors
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.deep
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_real_ray() -> None:
    asked = [replace(question, label=f"{n}") for n, question in enumerate(questions())]
    assert answers(asked, WORKLOAD, NO_LIMIT, ray="local") == answers(
        asked, WORKLOAD, NO_LIMIT, workers=1
    )
