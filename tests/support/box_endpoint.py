"""A served model whose steps take exactly what a cost model says, in real time, over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from hullspeed.perf.fitted import FittedCost
from hullspeed.perf.work import Shape
from support.patience import until

_STEP_TOKENS = 8192


@dataclass
class Stream:
    prompt_tokens: int
    max_tokens: int
    tokens: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)
    done: int = 0


@dataclass
class Box:
    """A box, and how it differs from a well-behaved endpoint.

    Attributes:
        first_s: What a request costs beside its steps.
        usage: Whether answers end with their token counts.
        ends_early: Whether answers end after three quarters of what was asked.
        most_requests: In flight at once; beyond it 429.
        dies_after: Requests after which every other one is answered 500.
        key: That requests must carry.
    """

    cost: FittedCost
    first_s: float
    usage: bool = True
    ends_early: bool = False
    most_requests: int = 1000
    dies_after: int = 10**9
    key: str = ""
    url: str = ""
    seen: int = 0
    in_flight: int = 0
    waiting: deque[Stream] = field(default_factory=deque)
    running: list[Stream] = field(default_factory=list)

    async def steps(self) -> None:
        """The engine: prompts first come, whole, beside all that decode."""
        now_s = time.perf_counter()
        while True:
            if not self.waiting and not self.running:
                await asyncio.sleep(0.0005)
                now_s = time.perf_counter()
                continue
            chunks, left, started = [], _STEP_TOKENS - len(self.running), []
            while self.waiting and self.waiting[0].prompt_tokens <= left:
                started.append(self.waiting.popleft())
                left -= started[-1].prompt_tokens
                chunks.append(Shape(started[-1].prompt_tokens, 0))
            n = len(self.running)
            context = sum(s.prompt_tokens + s.done for s in self.running)
            now_s += self.cost.batch_seconds(n, context, chunks)
            await asyncio.sleep(max(0.0, now_s - time.perf_counter()))
            self.running += started
            for stream in list(self.running):
                stream.done += 1
                stream.tokens.put_nowait(True)
                if stream.done == stream.max_tokens:
                    self.running.remove(stream)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ", 2)[1]
                sizes = [line for line in head.splitlines() if line.startswith("Content-Length")]
                size = int(sizes[0].split(":")[1]) if sizes else 0
                body = json.loads(await reader.readexactly(size)) if size else {}
                if self.key and f"Authorization: Bearer {self.key}" not in head:
                    _whole(writer, "401 Unauthorized", {"error": {"message": "no key"}})
                elif path == "/v1/models":
                    _whole(writer, "200 OK", {"data": [{"id": "box"}]})
                elif path == "/tokenize":
                    _whole(writer, "200 OK", {"count": len(body["prompt"].split())})
                else:
                    await self.complete(writer, body)
                await writer.drain()

    async def complete(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        self.seen += 1
        if self.seen > self.dies_after:
            _whole(writer, "500 Internal Server Error", {"error": {"message": "out of memory"}})
            return
        if self.in_flight >= self.most_requests:
            _whole(writer, "429 Too Many Requests", {"error": {"message": "slow down"}})
            return
        self.in_flight += 1
        asked = int(str(body["max_tokens"]))
        stream = Stream(
            len(str(body["prompt"]).split()), asked * 3 // 4 if self.ends_early else asked
        )
        await asyncio.sleep(self.first_s)
        self.waiting.append(stream)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                     b"Transfer-Encoding: chunked\r\n\r\n")  # fmt: skip
        for i in range(stream.max_tokens):
            await stream.tokens.get()
            finish = "length" if i + 1 == stream.max_tokens else None
            _event(writer, {"choices": [{"index": 0, "text": " a", "finish_reason": finish}]})
        self.in_flight -= 1
        if self.usage:
            counts = {"prompt_tokens": stream.prompt_tokens, "completion_tokens": stream.max_tokens}
            _event(writer, {"choices": [], "usage": counts})
        _chunk(writer, b"data: [DONE]\n\n")
        _chunk(writer, b"")


def _whole(writer: asyncio.StreamWriter, status: str, answer: object) -> None:
    body = json.dumps(answer).encode()
    writer.write(
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def _event(writer: asyncio.StreamWriter, event: object) -> None:
    _chunk(writer, f"data: {json.dumps(event)}\n\n".encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def serving(box: Box) -> Iterator[Box]:
    """Serve ``box`` in a thread of its own; ``url`` says where."""
    ready, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            connections.add(task)
        try:
            await box.serve(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 22)
        box.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        engine = asyncio.create_task(box.steps())
        ready.set()
        await over.wait()
        server.close()
        for task in (engine, *connections):
            task.cancel()
        await asyncio.gather(engine, *connections, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    if not until(ready.is_set):
        raise TimeoutError("the box did not come up")
    try:
        yield box
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()
