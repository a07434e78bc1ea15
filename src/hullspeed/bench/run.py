"""run: a whole benchmark, from the endpoint's model name to the last cell."""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec

from hullspeed.bench import metrics, trust
from hullspeed.bench.client import Client
from hullspeed.bench.http1 import Target
from hullspeed.bench.load import Recording, arrival_offsets, closed_loop, open_loop, record
from hullspeed.bench.reply import Reply, read_reply
from hullspeed.bench.result import BenchResult, Cell, Distribution
from hullspeed.bench.spec import BenchSpec
from hullspeed.bench.workload import (
    PromptWriter,
    RequestWriter,
    decoding_of,
    endpoint_counter,
    write_conversations,
    write_jobs,
)
from hullspeed.errors import EngineError, UsageError

Progress = Callable[[str], None]
Count = Callable[[str], Awaitable[int]]
T = TypeVar("T")

_DEFAULT_CONCURRENCY = (1, 8)
_DEFAULT_RATE_SHARE = 0.7  # of the highest closed-loop request rate
_DEFAULT_OPEN_SECONDS = 10.0
_MIN_REQUESTS = 16
_MAX_OPENED_AHEAD = 256


async def run(
    spec: BenchSpec,
    *,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
    count: Count | None = None,
) -> BenchResult:
    """Measure every load of ``spec``.

    Without ``concurrency`` and ``rates`` the loads are: closed loop with 1 and 8 in flight, then
    open loop at 0.7 of the request rate the latter reached.

    Args:
        spec: What to measure.
        progress: Called with one line before each step.
        stop: Set it to end early; the result holds what was measured until then.
        count: Tokens of a text, where the caller has the tokenizer; the endpoint is asked unless
            given.

    Raises:
        UsageError: the spec cannot be measured.
        EngineError: the endpoint does not answer, or does not serve completions.
    """
    spec.check()
    target = Target.parse(spec.url, spec.api_key)
    session = _Session(spec, progress or (lambda _line: None), stop or asyncio.Event(), count)
    async with Client(target, timeout_s=spec.timeout_s) as client:
        return await session.run(client)


def run_sync(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on uvloop where it is installed: its time stamps lag less."""
    try:
        import uvloop  # noqa: PLC0415 - optional, and not on every platform
    except ImportError:
        return asyncio.run(main)
    if sys.version_info >= (3, 12):
        return asyncio.run(main, loop_factory=uvloop.new_event_loop)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class _Session:
    def __init__(
        self, spec: BenchSpec, progress: Progress, stop: asyncio.Event, count: Count | None
    ) -> None:
        self._count = count
        self._progress = progress
        self._stop = stop
        self._seed = secrets.randbits(48) if spec.seed is None else spec.seed
        self._spec = msgspec.structs.replace(spec, seed=self._seed)
        self._rng = random.Random(self._seed)  # noqa: S311 - workload, not a secret
        self._cells: list[Cell] = []

    async def run(self, client: Client) -> BenchResult:
        spec = self._spec
        model = spec.model or await _first_model(client)
        self._spec = spec = msgspec.structs.replace(spec, model=model)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        count = self._count or await endpoint_counter(client, model)
        prompts = PromptWriter(self._rng, count)
        requests = RequestWriter(client, spec, model, decoding_of(spec))
        await self._warm_up(client, requests, prompts)
        for concurrency, rate in self._loads():
            if self._stop.is_set():
                break
            await self._measure(client, requests, prompts, concurrency, rate)
        if not spec.concurrency and not spec.rates and not spec.conversations and self._cells:
            rate = _DEFAULT_RATE_SHARE * self._cells[-1].requests_per_s
            if rate > 0 and not self._stop.is_set():
                await self._measure(client, requests, prompts, None, rate)
        return BenchResult(
            spec=msgspec.structs.replace(spec, api_key=None),
            version=version("hullspeed"),
            started_at=started_at,
            prompt_tokens_by="caller" if self._count else prompts.counted_by,
            decoding=requests.decoding,
            cells=self._cells,
        )

    def _loads(self) -> list[tuple[int | None, float | None]]:
        spec = self._spec
        if spec.conversations:
            return [(n, None) for n in spec.concurrency or (spec.conversations,)]
        closed = spec.concurrency or (() if spec.rates else _DEFAULT_CONCURRENCY)
        return [*((n, None) for n in closed), *((None, rate) for rate in spec.rates)]

    async def _warm_up(
        self, client: Client, requests: RequestWriter, prompts: PromptWriter
    ) -> None:
        """Unmeasured requests; the first also proves that the endpoint serves what is asked."""
        for i in range(max(self._spec.warmup, 1)):
            self._progress(f"warm-up {i + 1}")
            prompt = await prompts.write(self._spec.isl_tokens)
            reply = read_reply(
                await client.exchange(requests.bytes_of(prompt.text)), asked_tokens=None
            )
            if reply.exchange.status != 200 or not reply.chunks:
                raise EngineError(
                    f"the endpoint does not answer a {self._spec.api} request",
                    seen=reply.error or reply.failure,
                    fix="check --model and --api (completions or chat)",
                )

    async def _measure(
        self, client: Client, requests: RequestWriter, prompts: PromptWriter,
        concurrency: int | None, rate: float | None,
    ) -> None:  # fmt: skip
        spec = self._spec
        recording = Recording()
        load = await self._load(client, requests, prompts, concurrency, rate, recording)
        self._progress(f"measuring {_name(spec, concurrency, rate)}")
        await record(asyncio.ensure_future(load), recording, self._stop)
        self._cells.append(summarise(spec, recording, concurrency=concurrency, rate=rate))

    async def _load(
        self, client: Client, requests: RequestWriter, prompts: PromptWriter,
        concurrency: int | None, rate: float | None, recording: Recording,
    ) -> Coroutine[Any, Any, None]:  # fmt: skip
        """Write the prompts and open the connections; the load itself starts when awaited."""
        spec = self._spec
        if concurrency is not None and spec.conversations:
            self._progress("writing conversations")
            conversations = await write_conversations(requests, prompts)
            await client.open_connections(min(concurrency, spec.conversations))
            return closed_loop(client, conversations, concurrency, recording)
        n = spec.requests or max(
            _MIN_REQUESTS,
            4 * concurrency if concurrency else round((rate or 0) * _DEFAULT_OPEN_SECONDS),
        )
        self._progress(f"writing {n} prompts")
        jobs = await write_jobs(requests, prompts, n)
        if spec.cache == "cached":
            await client.exchange(jobs[0].request)
        if concurrency is not None:
            await client.open_connections(min(concurrency, n))
            return closed_loop(client, jobs, concurrency, recording)
        if rate is None:
            raise UsageError("a load needs a concurrency or a rate")
        await client.open_connections(min(n, _MAX_OPENED_AHEAD))
        offsets_s = arrival_offsets(n, rate, spec.arrival, self._rng)
        return open_loop(client, jobs, offsets_s, recording)


async def _first_model(client: Client) -> str:
    status, answer = await client.json("/v1/models")
    if status == 0:
        raise EngineError(
            f"nothing answers at {client.target.url}",
            seen=answer,
            fix="start the server, or check host and port",
        )
    try:
        return str(answer["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise EngineError(
            "the endpoint names no model at /v1/models", seen=(status, answer), fix="give --model"
        ) from None


def _name(spec: BenchSpec, concurrency: int | None, rate: float | None) -> str:
    if rate is not None:
        return f"{spec.arrival} {rate:.4g}/s"
    if spec.conversations:
        return f"closed {concurrency}, {spec.conversations} conversations x {spec.turns} turns"
    return f"closed {concurrency}"


def summarise(
    spec: BenchSpec, recording: Recording, *, concurrency: int | None, rate: float | None
) -> Cell:
    """Interpret a recording: this is where bytes become tokens and latencies."""
    asked = spec.osl_tokens if spec.exact_osl else None
    replies = [read_reply(exchange, asked_tokens=asked) for _, exchange in recording.samples]
    good = [reply for reply in replies if not reply.failure]
    latencies = [metrics.latency_of(reply) for reply in good]
    start_s = min((reply.exchange.intended_s for reply in replies), default=0.0)
    duration_s = max((reply.exchange.end_s for reply in replies), default=0.0) - start_s
    received = sum(chunk.tokens for reply in replies for chunk in reply.chunks)
    in_flight = metrics.in_flight_of(replies)
    spread = metrics.distribution
    cached = [reply.cached_tokens for reply in good if reply.cached_tokens is not None]
    return Cell(
        load=_name(spec, concurrency, rate),
        requests=len(replies),
        ok=len(good),
        failures=dict(Counter(reply.failure for reply in replies if reply.failure)),
        first_error=next((reply.error for reply in replies if reply.error), ""),
        interrupted=recording.interrupted,
        duration_s=duration_s,
        ttft_s=spread(latency.ttft_s for latency in latencies),
        ttfot_s=spread(t.ttfot_s for t in latencies if t.ttfot_s is not None),
        itl_s=spread(gap for latency in latencies for gap in latency.itl_s),
        chunk_gap_s=spread(gap for latency in latencies for gap in latency.chunk_gaps_s),
        tpot_s=spread(t.tpot_s for t in latencies if t.tpot_s is not None),
        max_gap_s=spread(t.max_gap_s for t in latencies if t.max_gap_s is not None),
        e2e_s=spread(latency.e2e_s for latency in latencies),
        turn_ttft_s=_by_turn(spec, recording, replies),
        output_tok_s=received / duration_s if duration_s > 0 else 0.0,
        steady_output_tok_s=(
            metrics.steady_rate(replies, in_flight, concurrency) if concurrency else None
        ),
        requests_per_s=len(good) / duration_s if duration_s > 0 else 0.0,
        prompt_tokens=spread(r.prompt_tokens for r in good if r.prompt_tokens is not None),
        output_tokens=spread(reply.tokens for reply in good),
        cached_tokens=spread(cached) if cached else None,
        hit_rate=_hit_rate(good),
        goodput=(
            metrics.goodput(replies, spec.objective, duration_s) if spec.objective.given else None
        ),
        trust=trust.judge(spec, recording, replies, concurrency=concurrency, rate=rate),
    )


def _by_turn(spec: BenchSpec, recording: Recording, replies: list[Reply]) -> list[Distribution]:
    if not spec.conversations:
        return []
    by_turn: list[list[float]] = [[] for _ in range(spec.turns)]
    for (job, _), reply in zip(recording.samples, replies, strict=True):
        if not reply.failure:
            by_turn[job.turn].append(metrics.latency_of(reply).ttft_s)
    return [metrics.distribution(turn) for turn in by_turn]


def _hit_rate(replies: list[Reply]) -> float | None:
    known = [reply for reply in replies if reply.cached_tokens is not None and reply.prompt_tokens]
    if not known:
        return None
    cached = sum(reply.cached_tokens or 0 for reply in known)
    return cached / sum(reply.prompt_tokens or 0 for reply in known)
