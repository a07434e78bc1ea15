"""Servers side by side: the same loads, by the same client, in alternating order.

Servers never run at the same time: each round starts one, runs its loads, stops it and starts the
next, and the order turns round every round. Figures are medians over rounds. CPU time that belongs
to neither server nor client is recorded beside every measurement; one with more than 12 % of the
machine is not counted. With nothing better the figures are shown, but no bar is judged by them.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from hullspeed.bench import BenchSpec, Cell, run, run_sync
from hullspeed.errors import EngineError

FOREIGN_LIMIT = 0.12  # share of all cores
START_TIMEOUT_S = 300

console = Console(stderr=True, highlight=False, soft_wrap=True)

Count = Callable[[str], Coroutine[Any, Any, int]]


# --- what is compared ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A server: how to start it, and where it answers."""

    name: str
    command: tuple[str, ...]
    url: str


@dataclass(frozen=True)
class Figure:
    """A number read from a load's cells.

    Attributes:
        bar: Limit of ours over the peer's, or of ours alone if ``absolute``; ``at_least`` says
            which side of it is good.
    """

    name: str
    of: Callable[[list[Cell]], float]
    bar: float | None = None
    at_least: bool = True
    absolute: bool = False

    def good(self, ours: float, peer: float) -> bool:
        """Whether ours holds the bar."""
        seen = ours if self.absolute else ours / peer
        bar = seen if self.bar is None else self.bar
        return seen >= bar if self.at_least else seen <= bar


@dataclass(frozen=True)
class Load:
    """A named workload: gives the cells of one run against a URL, from which figures are read."""

    title: str
    run: Callable[[str], Coroutine[Any, Any, list[Cell]]]
    figures: tuple[Figure, ...]


def bench_load(
    title: str,
    specs: Callable[[str], list[BenchSpec]],
    figures: tuple[Figure, ...],
    count: Count | None = None,
) -> Load:
    """A load of bench specs, run in order; ``count`` counts prompts where the endpoint does not."""

    async def cells(url: str) -> list[Cell]:
        results = [await run(spec, count=count) for spec in specs(url)]
        return [cell for result in results for cell in result.cells]

    return Load(title, cells, figures)


# --- measurement --------------------------------------------------------------------------------


@dataclass
class Measured:
    """One load of one side in one round."""

    side: str
    load: str
    values: dict[str, float]
    foreign: float
    verdicts: list[str]
    cells: list[Cell] = field(default_factory=list)


class Server:
    """A side's server process, running while in the ``with`` block."""

    def __init__(self, side: Side, log: Path) -> None:
        self._side, self._log = side, log

    def __enter__(self) -> psutil.Process:
        start_s = time.perf_counter()
        with self._log.open("ab") as log:
            self._process = psutil.Popen(self._side.command, stdout=log, stderr=log)
        try:
            asyncio.run(self._answer(start_s + START_TIMEOUT_S))
        except BaseException:
            self.__exit__()
            raise
        seconds = time.perf_counter() - start_s
        console.print(f"{self._side.name}: first token {seconds:.1f} s after the start")
        return self._process

    async def _answer(self, deadline_s: float) -> None:
        """Wait until it generates."""
        while True:
            spec = BenchSpec(
                url=self._side.url, isl_tokens=4, osl_tokens=1, concurrency=(1,), requests=1
            )
            if not self._process.is_running() or self._process.status() == "zombie":
                raise SystemExit(f"{self._side.name} ended; see {self._log}")
            try:
                await run(spec)
            except EngineError:
                if time.perf_counter() > deadline_s:
                    raise SystemExit(
                        f"{self._side.name} does not answer; see {self._log}"
                    ) from None
                await asyncio.sleep(0.3)
            else:
                return

    def __exit__(self, *_exception: object) -> None:
        if not self._process.is_running():
            return
        tree = self._process.children(recursive=True)
        tree.append(self._process)
        self._process.terminate()
        _gone, alive = psutil.wait_procs(tree, timeout=15)
        for process in alive:
            process.kill()


def measure(side: Side, name: str, load: Load, server: psutil.Process) -> Measured:
    """Run one load."""
    wall_s, busy_s, own_s = time.perf_counter(), _machine_busy_s(), _own_s(server)
    cells = run_sync(load.run(side.url))
    wall_s = time.perf_counter() - wall_s
    foreign_s = (_machine_busy_s() - busy_s) - (_own_s(server) - own_s)
    for cell in cells:
        if cell.failures:
            console.print(f"{side.name} {name}: failed: {cell.failures} {cell.first_error}")
    return Measured(
        side=side.name,
        load=name,
        values={figure.name: figure.of(cells) for figure in load.figures},
        foreign=max(foreign_s, 0.0) / (wall_s * (os.cpu_count() or 1)),
        verdicts=[f"{cell.trust.verdict}" for cell in cells],
        cells=cells,
    )


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _own_s(server: psutil.Process) -> float:
    """CPU seconds of the server's processes and of this one."""
    total = 0.0
    for process in [server, *server.children(recursive=True), psutil.Process()]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def compare(
    sides: Sequence[Side], loads: Mapping[str, Load], rounds: int, logs: Path
) -> list[Measured]:
    """Every load of every side, ``rounds`` times, the order of sides turned round each time."""
    measured: list[Measured] = []
    for n in range(rounds):
        for side in sides if n % 2 == 0 else reversed(sides):
            with Server(side, logs / f"{side.name.replace(' ', '-')}.log") as server:
                for name, load in loads.items():
                    one = measure(side, name, load, server)
                    measured.append(one)
                    values = ", ".join(f"{name} {v:.4g}" for name, v in one.values.items())
                    console.print(
                        f"round {n + 1} {side.name} {name}: {values}; foreign CPU "
                        f"{one.foreign:.0%}; {', '.join(one.verdicts)}"
                    )
    return measured


# --- report -------------------------------------------------------------------------------------


def median(rounds: list[Measured], figure: str) -> tuple[float, int]:
    """Median of the accepted rounds, and how many these were (0: none, so all were taken)."""
    accepted = [m for m in rounds if m.foreign <= FOREIGN_LIMIT]
    return statistics.median(m.values[figure] for m in accepted or rounds), len(accepted)


def report(
    title: str, measured: list[Measured], loads: Mapping[str, Load], names: Sequence[str]
) -> bool:
    """Print the table of ours and, if there is a second name, the peer; whether all bars hold."""
    table = Table(title=title)
    for column in ("load", "figure", *names, "ratio", "bar", "accepted rounds", "foreign CPU"):
        table.add_column(column, justify="left" if column in ("load", "figure") else "right")
    held = True
    for key, load in loads.items():
        rows = [[m for m in measured if (m.load, m.side) == (key, name)] for name in names]
        foreign = " ".join(f"{max(m.foreign for m in rounds):.0%}" for rounds in rows)
        for figure in load.figures:
            medians = [median(rounds, figure.name) for rounds in rows]
            values = [value for value, _ in medians]
            ratio = values[0] / values[1] if len(names) == 2 and values[1] else float("nan")
            bar = "-"
            if figure.bar is not None and (len(names) == 2 or figure.absolute):
                quiet = all(n for _, n in medians)
                good = quiet and figure.good(values[0], values[-1])
                held &= good
                bar = _said(figure, good=good, quiet=quiet)
            accepted = " ".join(
                f"{n}/{len(rounds)}" for (_, n), rounds in zip(medians, rows, strict=True)
            )
            table.add_row(
                key, figure.name, *(f"{value:,.3g}" for value in values), f"{ratio:.2f}", bar,
                accepted, foreign,
            )  # fmt: skip
    out = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    out.print(table)
    for key, load in loads.items():
        out.print(f"{key}: {load.title}")
    return held


def _said(figure: Figure, *, good: bool, quiet: bool) -> str:
    if not quiet:
        return "too busy"
    sign = ">=" if figure.at_least else "<="
    what = "ours " if figure.absolute else ""
    return f"{what}{sign} {figure.bar:.3g} " + ("[green]held[/]" if good else "[red]missed[/]")


def call(*command: str, show: bool = False) -> None:
    """Run a step of the preparation; silent unless it fails, or it is to ``show`` its progress."""
    stderr = None if show else subprocess.STDOUT
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}")
