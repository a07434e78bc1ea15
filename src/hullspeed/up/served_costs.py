"""served_costs: a server as users have it, loaded by a client, to see what costs beside the steps.

An API process, an engine process and here the client share the cores, so what they take from one
another is in the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from hullspeed.arch.model import ModelArch
from hullspeed.bench import BenchSpec, run_sync
from hullspeed.bench import run as run_bench
from hullspeed.bench.result import Cell
from hullspeed.errors import EngineError
from hullspeed.hardware.ceilings import Ceilings, disturbed
from hullspeed.hardware.foreign import ForeignLoad
from hullspeed.hardware.machine import detect_machine
from hullspeed.memory.held import held_dtype
from hullspeed.runtime.config import EngineConfig
from hullspeed.up.served import Server, served
from hullspeed.up.served_fit import Cached, Seen, fit

_STREAMS = {1: 8, 6: 24, 24: 72}  # at once: requests of a load
_SHORT, _LONG = (64, 32), (768, 16)  # prompt and output tokens
_COLD_TOKENS = (192, 640)


def measure_served(
    config: EngineConfig,
    arch: ModelArch,
    ceilings: Ceilings,
    progress: Callable[[str], None] = lambda _: None,
) -> Ceilings:
    """``ceilings`` with overheads as a served model shows them; takes some forty seconds.

    Raises:
        EngineError: if the server does not start or does not answer.
    """
    foreign = ForeignLoad()
    progress("a server")
    with served(config) as server:
        progress("requests and streams")
        seen = observe(server, config, arch)
    machine = detect_machine()
    dtype = held_dtype(arch, config.weight_dtype, machine.isa)
    fitted = fit(
        seen, ceilings, arch, dtype, config.step_tokens,
        own_core=ceilings.threads < machine.cores,
    )  # fmt: skip
    return disturbed(fitted, foreign.share())


def observe(server: Server, config: EngineConfig, arch: ModelArch) -> Seen:
    """Measure a server that nobody else uses. What is over within seconds is measured twice, some
    fifteen seconds apart, since a machine's speed changes meanwhile; means are taken.
    """
    context = config.max_context_tokens or arch.max_context_tokens
    streams = {n: requests for n, requests in _STREAMS.items() if n <= config.max_running}
    short, long = (
        [
            Cached(n, requests, min(isl, context * 3 // 4), min(osl, context // 4), 0.0, 0.0)
            for n, requests in streams.items()
        ]
        for isl, osl in (_SHORT, _LONG)
    )
    cached: dict[Cached, list[Cell]] = {load: [] for load in (*short, *long)}
    cold: dict[int, list[float]] = {min(n, context - 2): [] for n in _COLD_TOKENS}
    for loads, prompts in ((short, cold), (long, {}), (short[:2], cold)):
        for load in loads:
            cached[load].append(_cell(server, load))
        for isl, ttft_s in prompts.items():
            ttft_s.append(_cell(server, Cached(1, 3, isl, 2, 0.0, 0.0), cold=True).ttft_s.p50)
    return Seen(
        cached=tuple(
            load._replace(
                ttft_s=fmean(cell.ttft_s.p50 for cell in found),
                itl_s=fmean(cell.itl_s.p50 for cell in found),
            )
            for load, found in cached.items()
        ),
        cold_ttft_s={isl: fmean(ttft_s) for isl, ttft_s in cold.items()},
        mean_itl_s=fmean(cell.itl_s.mean for cell in cached[short[0]]),
    )


def _cell(server: Server, load: Cached, *, cold: bool = False) -> Cell:
    spec = BenchSpec(
        url=server.url, model=server.model, isl_tokens=load.isl_tokens,
        osl_tokens=load.osl_tokens, requests=load.requests, concurrency=(load.streams,),
        cache="cold" if cold else "cached",
    )  # fmt: skip
    cell = run_sync(run_bench(spec)).cells[0]
    if cell.ok < cell.requests:
        raise EngineError("the server fails requests", seen=cell.first_error or cell.failures)
    return cell
