"""Load: when requests are sent. Closed loop: as many as may be in flight. Open loop: a schedule.

The open loop sleeps to absolute times, so that lateness never accumulates, and it does not wait
for answers: a server that stalls meets the requests that would have come.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from hullspeed.bench.client import Client
from hullspeed.bench.http1 import Exchange
from hullspeed.bench.spec import Arrival
from hullspeed.bench.workload import Conversation, Job

_LAG_PERIOD_S = 0.01


@dataclass(slots=True)
class Recording:
    """What a load produced: every finished exchange with its job, and the generator's own lag."""

    samples: list[tuple[Job, Exchange]] = field(default_factory=list)
    loop_lags_s: list[float] = field(default_factory=list)
    offsets_s: list[float] | None = None  # of the open loop's schedule
    interrupted: bool = False

    async def watch_loop(self) -> None:
        """Measure how late this event loop wakes up, until cancelled."""
        due = time.perf_counter()
        while True:
            due = max(due + _LAG_PERIOD_S, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            self.loop_lags_s.append(max(time.perf_counter() - due, 0.0))


async def closed_loop(
    client: Client, work: Iterable[Job | Conversation], concurrency: int, recording: Recording
) -> None:
    """Keep ``concurrency`` jobs (or conversations) under way until ``work`` is used up."""
    queue = iter(work)

    async def send(job: Job) -> Exchange:
        exchange = await client.exchange(job.request)
        recording.samples.append((job, exchange))
        return exchange

    async def worker() -> None:
        for item in queue:
            if isinstance(item, Conversation):
                await item.run(send)
            else:
                await send(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())


def arrival_offsets(n: int, rate: float, arrival: Arrival, rng: random.Random) -> list[float]:
    """Send times in seconds from the start: ``n`` of them at ``rate`` per second, the first at 0.

    ``constant`` has equal gaps; ``poisson`` has independent exponential ones.
    """
    gaps = [1 / rate if arrival == "constant" else rng.expovariate(rate) for _ in range(n - 1)]
    offsets = [0.0]
    for i, gap in enumerate(gaps, 1):
        offsets.append(i / rate if arrival == "constant" else offsets[-1] + gap)
    return offsets


async def open_loop(
    client: Client, jobs: list[Job], offsets_s: list[float], recording: Recording
) -> None:
    """Send every job at its offset, whatever has become of the ones before."""
    recording.offsets_s = offsets_s
    start_s = time.perf_counter() + 0.02

    async def send(job: Job, intended_s: float) -> None:
        recording.samples.append((job, await client.exchange(job.request, intended_s)))

    async with asyncio.TaskGroup() as group:
        for job, offset_s in zip(jobs, offsets_s, strict=True):
            intended_s = start_s + offset_s
            await _sleep_until(intended_s)
            group.create_task(send(job, intended_s))
            await asyncio.sleep(0)  # let it start even when the schedule is behind


async def _sleep_until(when_s: float) -> None:
    """Sleep to an absolute time; a timer that fires early (libuv's round) is waited out."""
    while (wait_s := when_s - time.perf_counter()) > 0:  # noqa: ASYNC110 - time has no event
        await asyncio.sleep(wait_s)


async def record(load: asyncio.Task[None], recording: Recording, stop: asyncio.Event) -> None:
    """Run ``load`` to its end, or until ``stop``; requests then in flight are dropped."""
    watcher = asyncio.create_task(recording.watch_loop())
    stopper = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({load, stopper}, return_when=asyncio.FIRST_COMPLETED)
        if load.done():
            await load
        else:
            recording.interrupted = True
    finally:
        for task in (load, watcher, stopper):
            task.cancel()
        await asyncio.gather(load, watcher, stopper, return_exceptions=True)
