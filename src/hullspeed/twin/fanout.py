"""fanout: many questions at once, on this machine's cores or over a Ray cluster.

Outcomes come in the order of their questions and do not depend on where they were computed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from hullspeed.errors import BrokenStackError, HullspeedError
from hullspeed.twin.question import Outcome, Question
from hullspeed.twin.summary import Objective
from hullspeed.twin.workload import Workload
from hullspeed.version import __version__

LOCAL = "local"
"""Ray address that starts Ray on this machine."""

MAX_CHUNK = 32
"""Questions in one task at most, so that progress is told now and then."""


def answers(
    questions: Sequence[Question],
    workload: Workload,
    objective: Objective,
    *,
    workers: int | None = None,
    ray: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
    keep: Callable[[int, Outcome], None] = lambda _place, _outcome: None,
) -> list[Outcome]:
    """Every question's answer, in their order.

    Args:
        questions: What differs.
        workload: The same for all.
        objective: The same for all.
        workers: Processes on this machine; as many as it has cores unless given.
        ray: Address of a Ray cluster to use instead; ``auto`` finds one, ``local`` starts one.
        progress: Told how many are done.
        keep: Given each outcome with its place, as it comes.

    Raises:
        BrokenStackError: Ray is asked for and is not installed, not reached, or its nodes have
            another hullspeed.
    """
    if ray is not None:
        found = over_ray(questions, workload, objective, ray)
    else:
        workers = min(workers or os.cpu_count() or 1, len(questions))
        found = on_cores(questions, workload, objective, workers)
    outcomes: list[Outcome] = []
    for outcome in found:
        keep(len(outcomes), outcome)
        outcomes.append(outcome)
        progress(len(outcomes))
    return outcomes


def one(question: Question, workload: Workload, objective: Objective) -> Outcome:
    """One answer; a configuration that cannot be is an outcome too."""
    try:
        cost = question.cost()
        summary = question.sum_up(question.play(workload, cost), objective)
        return Outcome(
            label=question.label, changes=dict(question.changes), summary=summary,
            cost_source=cost.source,
        )  # fmt: skip
    except HullspeedError as error:
        return Outcome(label=question.label, changes=dict(question.changes), error=str(error))


def on_cores(
    questions: Sequence[Question], workload: Workload, objective: Objective, workers: int
) -> Iterator[Outcome]:
    """In ``workers`` processes of this machine; ended at once when the caller is interrupted."""
    if workers <= 1:
        yield from (one(question, workload, objective) for question in questions)
        return
    others = set(multiprocessing.active_children())
    # Spawned, not forked: the parent may have threads. What travels between the processes are our
    # own objects; nothing is read from outside.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(workload, objective),
    )
    done = False
    try:
        with _interrupts_later():
            found = pool.map(_work, questions, chunksize=_chunk(len(questions), workers))
        yield from found
        done = True
    finally:
        if not done:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Processes started meanwhile never see a Ctrl-C, which is the parent's to handle, not even
    before their first line of Python. The parent is interrupted afterwards, when it knows them all.
    """
    seen: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # they inherit it
    # Another thread of ours, such as one of a numerical library, may still take the signal, and
    # Python then interrupts the main thread: so it is written down there.
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
    if seen:
        raise KeyboardInterrupt


_shared: list[tuple[Workload, Objective]] = []


def _begin(workload: Workload, objective: Objective) -> None:
    _shared[:] = [(workload, objective)]


def _work(question: Question) -> Outcome:
    return one(question, *_shared[0])


def _chunk(n_questions: int, workers: int) -> int:
    return min(MAX_CHUNK, max(1, n_questions // (8 * workers)))


def over_ray(
    questions: Sequence[Question], workload: Workload, objective: Objective, address: str
) -> Iterator[Outcome]:
    """As tasks of a Ray cluster, whose nodes need the same hullspeed installed.

    Raises:
        BrokenStackError: see :func:`answers`.
    """
    ray = _connected(address)
    tasks: list[Any] = []
    try:
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        size = _chunk(len(questions), cores)
        shared = ray.put((workload, objective))
        task = ray.remote(_task)
        tasks += [
            task.remote(__version__, questions[start : start + size], shared)
            for start in range(0, len(questions), size)
        ]
        while tasks:
            yield from _result(ray, tasks[0])
            del tasks[0]
    finally:
        for left in tasks:
            ray.cancel(left, force=True)
        ray.shutdown()


def _task(
    version: str, questions: Sequence[Question], shared: tuple[Workload, Objective]
) -> list[Outcome] | str:
    """Runs on a node; its version where that is another one, whose answers would differ."""
    if version != __version__:
        return __version__
    return [one(question, *shared) for question in questions]


def _result(ray: Any, task: Any) -> list[Outcome]:
    try:
        found = ray.get(task)
    except ray.exceptions.RayError as error:
        # A node's traceback ends with what went wrong there, such as hullspeed missing.
        raise BrokenStackError(
            "a Ray task failed",
            seen=str(error).strip().rpartition("\n")[2],
            fix=f"install hullspeed {__version__} on every node",
        ) from error
    if isinstance(found, str):
        raise BrokenStackError(
            "a node of the Ray cluster has another hullspeed",
            seen=found,
            fix=f"install {__version__} on every node",
        )
    return list(found)


def _connected(address: str) -> Any:
    """The ray module, connected."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise BrokenStackError(
            "sweeps over Ray need ray, which is not installed",
            fix="pip install 'hullspeed[ray]', or leave out --ray",
        ) from None
    _check_listens(address)
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _unreached(address) from error
    return ray


def _check_listens(address: str) -> None:
    """Ray itself tries an address where nobody listens for four minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _unreached(address) from error


def _unreached(address: str) -> BrokenStackError:
    return BrokenStackError(
        "the Ray cluster cannot be reached",
        seen=address,
        fix="give its address, auto for one that runs here, or local to start one",
    )
