"""``hullspeed bench``: how fast an endpoint is, and whether to believe it."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from hullspeed.bench import BenchResult, BenchSpec

Many = Parameter(consume_multiple=True, negative="")


def bench(
    url: str,
    *,
    model: str | None = None,
    api: Literal["completions", "chat"] = "completions",
    isl: int = 512,
    osl: int = 64,
    exact_osl: bool = True,
    temperature: float = 0.0,
    concurrency: Annotated[tuple[int, ...], Many] = (),
    rate: Annotated[tuple[float, ...], Many] = (),
    arrival: Literal["poisson", "constant"] = "poisson",
    requests: int | None = None,
    shared_prefix: int = 0,
    cached: Annotated[bool, Parameter(name="--cached", negative="--cold")] = False,
    conversations: int = 0,
    turns: int = 1,
    turn_tokens: int = 128,
    ttft: str | None = None,
    tpot: str | None = None,
    itl: str | None = None,
    max_gap: str | None = None,
    attainment: float = 0.9,
    api_key: Annotated[str | None, Parameter(env_var="HULLSPEED_API_KEY")] = None,
    seed: int | None = None,
    warmup: int = 1,
    timeout: str = "600s",
    json: Annotated[bool, Parameter(name="--json")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
) -> int:
    """Measure an OpenAI-compatible endpoint: latency and throughput by load, with their evidence.

    Example: ``hullspeed bench http://127.0.0.1:8000 --rate 2 4 --ttft 500ms --tpot 50ms``

    Without --concurrency and --rate: closed loop with 1 and 8 in flight, then open loop at 0.7 of
    the request rate reached. Ctrl-C prints what was measured so far. Exit codes: 0 fine, 1 an
    objective was missed or no request succeeded, 2 usage, 3 the endpoint does not answer.

    Parameters
    ----------
    url
        Endpoint over plain HTTP, with or without /v1.
    model
        Model to ask for; the first that the endpoint names unless given.
    api
        completions has no chat template and so exact prompt lengths; chat where there is only that.
    isl
        Prompt tokens, shared prefix included.
    osl
        Output tokens.
    exact_osl
        Ask for exactly --osl tokens (ignore_eos, min_tokens) and fail any other length.
    temperature
        Sampling temperature, always sent.
    concurrency
        Closed loop: requests in flight; several measure one after the other.
    rate
        Open loop: requests per second; several measure one after the other.
    arrival
        How the open loop spaces its requests.
    requests
        Requests of each load.
    shared_prefix
        First tokens that all prompts share.
    cached
        Repeat one prompt, sent once before, instead of new prompts.
    conversations
        Agent load: so many conversations of --turns turns, each turn carrying all before it.
    turns
        Turns of a conversation.
    turn_tokens
        New prompt tokens of each turn after the first.
    ttft
        Objective: time to first token, such as 500ms.
    tpot
        Objective: mean time per output token; with --ttft also a deadline for every token.
    itl
        Objective: 99th percentile of a request's inter-token latencies.
    max_gap
        Objective: longest silence within a stream.
    attainment
        Share of requests that must keep the objective.
    api_key
        Bearer token.
    seed
        Draw the same prompts and arrivals again; they may then be in the server's cache.
    warmup
        Requests before the first load that are not counted.
    timeout
        Limit for one request.
    json
        Print JSON.
    quiet
        No progress on stderr.
    """
    from hullspeed.bench import BenchSpec, Objective, run_sync
    from hullspeed.units import parse_seconds

    def seconds(text: str | None) -> float | None:
        return None if text is None else parse_seconds(text)

    objective = Objective(
        ttft_s=seconds(ttft),
        tpot_s=seconds(tpot),
        itl_s=seconds(itl),
        max_gap_s=seconds(max_gap),
        attainment=attainment,
    )
    spec = BenchSpec(
        url=url,
        model=model,
        api=api,
        isl_tokens=isl,
        osl_tokens=osl,
        exact_osl=exact_osl,
        temperature=temperature,
        concurrency=concurrency,
        rates=rate,
        arrival=arrival,
        requests=requests,
        shared_prefix_tokens=shared_prefix,
        cache="cached" if cached else "cold",
        conversations=conversations,
        turns=turns,
        turn_tokens=turn_tokens,
        objective=objective,
        api_key=api_key,
        seed=seed,
        warmup=warmup,
        timeout_s=parse_seconds(timeout),
    )
    result = run_sync(_run(spec, quiet=quiet))
    _print(result, json=json)
    return 0 if result.held and any(cell.ok for cell in result.cells) else 1


async def _run(spec: BenchSpec, *, quiet: bool) -> BenchResult:
    """Run with Ctrl-C meaning: stop measuring and keep what there is."""
    from hullspeed.bench import run

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        return await run(spec, progress=None if quiet else _progress, stop=stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _progress(line: str) -> None:
    sys.stderr.write(line + "\n")


def _print(result: BenchResult, *, json: bool) -> None:
    if json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        sys.stdout.buffer.flush()
        return
    from rich.console import Console

    from hullspeed.bench.table import render

    Console().print(render(result))
