"""observed_endpoint: a running endpoint loaded a little, more, and a lot, as observations of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hullspeed.bench import BenchSpec, run_sync
from hullspeed.bench import run as run_bench
from hullspeed.bench.result import BenchResult, Cell
from hullspeed.errors import EngineError
from hullspeed.perf.observed import Observed, ObservedLoad

CONCURRENCIES = (1, 4, 16)
_MOST_FAILED = 0.1  # of a load's requests; beyond it the load was another than the one asked for


class Endpoint(NamedTuple):
    """Whom to load, and with what."""

    url: str
    isl_tokens: int
    osl_tokens: int
    api_key: str | None = None
    model: str | None = None


def observe_endpoint(
    endpoint: Endpoint, say: Callable[[str], None] = lambda _: None
) -> tuple[list[Observed], list[str]]:
    """What it did, and what was not as it should be.

    An endpoint that ends answers early whatever is asked (no ``ignore_eos``) is loaded again with
    whatever lengths it gives.

    Raises:
        EngineError: if it does not answer, or no load came through.
    """
    result = _run(endpoint, say, exact=True)
    notes = []
    if all(set(cell.failures) == {"length"} and not cell.ok for cell in result.cells):
        notes.append("it ends answers early whatever is asked: their lengths are its own")
        result = _run(endpoint, say, exact=False)
    if result.prompt_tokens_by == "estimate" and any(c.prompt_tokens.count for c in result.cells):
        notes.append("it has no /tokenize: prompts are as long as its usage says")
    found: list[Observed] = []
    for concurrency, cell in zip(CONCURRENCIES, result.cells, strict=True):
        if cell.requests - cell.ok > _MOST_FAILED * cell.requests:
            notes.append(_failed(concurrency, cell))
            continue
        if not cell.prompt_tokens.count:
            notes.append(f"{cell.load}: no usage; prompts taken as {endpoint.isl_tokens} words")
        found.append(observed_load(cell, concurrency, endpoint.isl_tokens))
    if not found:
        raise EngineError(
            "no load of the endpoint came through",
            seen=_reason(result.cells),
            fix="see what `hullspeed bench` says of it",
        )
    return found, notes


def observed_load(cell: Cell, concurrency: int, asked_tokens: int) -> ObservedLoad:
    """A measured load; prompts count without what came from the cache."""
    cached = cell.cached_tokens.mean if cell.cached_tokens else 0.0
    prompt = cell.prompt_tokens.mean if cell.prompt_tokens.count else asked_tokens
    return ObservedLoad(
        isl=max(round(prompt - cached), 1),
        osl=max(round(cell.output_tokens.mean), 1),
        concurrency=concurrency,
        requests=cell.ok,
        ttft_s=cell.ttft_s.mean,
        tpot_s=cell.tpot_s.mean,
        output_tokens_per_s=cell.output_tok_s,
    )


def _run(endpoint: Endpoint, say: Callable[[str], None], *, exact: bool) -> BenchResult:
    spec = BenchSpec(
        url=endpoint.url, model=endpoint.model, isl_tokens=endpoint.isl_tokens,
        osl_tokens=endpoint.osl_tokens, concurrency=CONCURRENCIES, api_key=endpoint.api_key,
        exact_osl=exact,
    )  # fmt: skip
    return run_sync(run_bench(spec, progress=say))


def _failed(concurrency: int, cell: Cell) -> str:
    kinds = ", ".join(f"{n} {kind}" for kind, n in cell.failures.items())
    first = f": {cell.first_error[:120]}" if cell.first_error else ""
    return (
        f"concurrency {concurrency} does not count: {cell.requests - cell.ok} of {cell.requests} "
        f"requests failed ({kinds}{first})"
    )


def _reason(cells: Sequence[Cell]) -> str:
    return _failed(CONCURRENCIES[0], cells[0])
