"""Cancel: a client that hangs up stops costing anything."""

from __future__ import annotations

import asyncio
import re
import time

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import complete
from hullspeed.verify.endpoint import Endpoint, Request

_STREAMS = 4
_LIMIT_S = 2.0
_LONG_TOKENS = 1024
_RUNNING = re.compile(r"^(?:\w+:)?num_requests_running(?:\{[^}]*\})?\s+([0-9.eE+]+)$", re.M)


@check(
    "V011",
    "a disconnect frees its capacity within 2 s",
    why="ghost requests go on generating for clients that left, and the queue behind them waits",
    fix="watch for the disconnect while streaming and abort in the engine",
)
async def frees_capacity(endpoint: Endpoint) -> list[Fault]:
    """By the server's own count of running requests, else by the next client's wait."""
    request = endpoint.generation(
        endpoint.api, "A very long story:", max_tokens=_LONG_TOKENS, stream=True, ignore_eos=True
    )
    before = await _running(endpoint)
    waited_s = await _short_answer_s(endpoint)
    started = await asyncio.gather(*(endpoint.start_and_hang_up(request) for _ in range(_STREAMS)))
    if not all(started):
        request = _without_ignore_eos(request)
        started = await asyncio.gather(
            *(endpoint.start_and_hang_up(request) for _ in range(_STREAMS))
        )
    if not any(started):
        raise Skip("no long stream could be started")
    if before is not None:
        return await _by_metrics(endpoint, request, before)
    await asyncio.sleep(_LIMIT_S)
    after_s = await _short_answer_s(endpoint)
    if after_s > 2 * waited_s + 0.5:
        seen: dict[str, object] = {"before": f"{waited_s:.2f} s", "after": f"{after_s:.2f} s"}
        return [Fault("2 s after clients left, the next one still waits", request, seen)]
    return []


async def _by_metrics(endpoint: Endpoint, request: Request, before: float) -> list[Fault]:
    deadline_s = time.perf_counter() + _LIMIT_S
    while True:
        late = time.perf_counter() > deadline_s  # a stalled client still looks once after it
        running = await _running(endpoint)
        if running is not None and running <= before:
            return []
        if late:
            break
        await asyncio.sleep(0.1)
    seen: dict[str, object] = {"running before": before, "running 2 s after": running}
    return [Fault("requests of clients that left are still running", request, seen)]


def _without_ignore_eos(request: Request) -> Request:
    if not isinstance(request.body, dict):
        return request
    body = {name: value for name, value in request.body.items() if name != "ignore_eos"}
    return Request(request.url, body)


async def _short_answer_s(endpoint: Endpoint) -> float:
    start_s = time.perf_counter()
    await complete(endpoint, endpoint.generation(endpoint.api, "Ahoy", max_tokens=2))
    return time.perf_counter() - start_s


async def _running(endpoint: Endpoint) -> float | None:
    """Running requests by ``/metrics`` (vLLM's name, any prefix); None when it does not say."""
    answer = await endpoint.send(endpoint.request("/metrics"))
    values = _RUNNING.findall(answer.text) if answer.status == 200 else []
    return sum(float(value) for value in values[:1]) if values else None
