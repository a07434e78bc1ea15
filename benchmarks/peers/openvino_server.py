"""OpenVINO GenAI's continuous-batching pipeline behind a thin `/v1/completions`.

    .venv-openvino/bin/python benchmarks/peers/openvino_server.py MODEL_DIR --port 8101

The pipeline runs in a process of its own: its `step()` would otherwise hold up the event loop and
tokens would leave in bursts. Once per step the engine process sends one line with all new tokens,
the HTTP process writes one event per token. Greedy decoding only; that is all the comparison uses.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import select
import socket
from pathlib import Path
from typing import Any

NAME = "openvino"


# --- the engine process -------------------------------------------------------------------------


def engine_main(link: socket.socket, inherited: socket.socket, args: argparse.Namespace) -> None:
    """Run the pipeline; commands come in and tokens go out as JSON lines over ``link``."""
    inherited.close()  # the other end: with a copy open here, its closing would go unseen
    import numpy as np
    import openvino as ov  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = args.cache_gib
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = args.batched_tokens
    scheduler.dynamic_split_fuse = True
    properties = (
        {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        if args.precision == "f32"
        else {}
    )
    pipeline = genai.ContinuousBatchingPipeline(str(args.model), scheduler, "CPU", properties)
    handles: dict[int, Any] = {}
    lines = _Lines(link)
    link.sendall(b'{"ready":true}\n')
    while True:
        for command in lines.read(wait=not handles):
            if "cancel" in command:
                handle = handles.pop(command["cancel"], None)
                if handle is not None:
                    handle.cancel()
                continue
            config = genai.GenerationConfig()
            config.max_new_tokens = command["max_tokens"]
            config.ignore_eos = command["ignore_eos"]
            config.do_sample = False
            ids = ov.Tensor(np.array([command["ids"]], dtype=np.int64))
            handles[command["id"]] = pipeline.add_request(command["id"], ids, config)
        if lines.closed:
            return
        if pipeline.has_non_finished_requests():
            pipeline.step()
        news = _collect(handles)
        if news:
            link.sendall(json.dumps({"news": news}).encode() + b"\n")


def _collect(handles: dict[int, Any]) -> list[tuple[int, list[int], str | None]]:
    """New tokens of every request as (id, token ids, finish reason); forgets the finished."""
    news: list[tuple[int, list[int], str | None]] = []
    for request_id, handle in list(handles.items()):
        if not handle.can_read():
            continue
        ids: list[int] = []
        finish = None
        for output in handle.read().values():
            ids.extend(output.generated_ids)
            finish = output.finish_reason.name.lower()
        done = finish in ("stop", "length")
        news.append((request_id, ids, finish if done else None))
        if done:
            del handles[request_id]
    return news


class _Lines:
    """JSON lines from a socket; blocks only when asked to."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._rest = b""
        self.closed = False

    def read(self, *, wait: bool) -> list[dict[str, Any]]:
        ready, _, _ = select.select([self._link], [], [], None if wait else 0)
        if not ready:
            return []
        data = self._link.recv(1 << 20)
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


# --- the HTTP process ---------------------------------------------------------------------------


class Engine:
    """The HTTP side of the link: one queue per request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._ids = itertools.count()
        self._queues: dict[int, asyncio.Queue[tuple[list[int], str | None]]] = {}

    async def pump(self) -> None:
        """Hand every token to the request it belongs to."""
        async for line in self._reader:
            for request_id, ids, finish in json.loads(line)["news"]:
                queue = self._queues.get(request_id)
                if queue is not None:
                    queue.put_nowait((ids, finish))

    def submit(
        self, ids: list[int], max_tokens: int, *, ignore_eos: bool
    ) -> tuple[int, asyncio.Queue[tuple[list[int], str | None]]]:
        """Start a request; its tokens and finish reason come through the queue."""
        request_id = next(self._ids)
        queue = self._queues[request_id] = asyncio.Queue()
        command = {
            "id": request_id, "ids": ids, "max_tokens": max_tokens, "ignore_eos": ignore_eos,
        }  # fmt: skip
        self._writer.write(json.dumps(command).encode() + b"\n")
        return request_id, queue

    def forget(self, request_id: int, *, cancel: bool) -> None:
        """Drop a request's queue, and the request itself with ``cancel``."""
        self._queues.pop(request_id, None)
        if cancel:
            self._writer.write(json.dumps({"cancel": request_id}).encode() + b"\n")


class App:
    """Just enough HTTP/1.1 for a load generator."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
                size = 0
                for line in head.split(b"\r\n")[1:]:
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        size = int(value)
                body = json.loads(await reader.readexactly(size)) if size else {}
                await self._route(method, path, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _route(
        self, method: str, path: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if path == "/v1/models":
            _reply(writer, 200, {"object": "list", "data": [{"id": NAME, "object": "model"}]})
        elif path in ("/health", "/ready"):
            _reply(writer, 200, {"status": "ok"})
        elif path == "/tokenize":
            ids = self._encode(body["prompt"])
            _reply(writer, 200, {"count": len(ids), "tokens": ids})
        elif path == "/v1/completions":
            await self._complete(body, writer)
        else:
            _reply(writer, 404, {"error": {"message": f"no {method} {path}", "code": "not_found"}})

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        return ids

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = self._encode(body["prompt"])
        request_id, queue = self._engine.submit(
            prompt, body.get("max_tokens", 16), ignore_eos=bool(body.get("ignore_eos"))
        )
        stream = bool(body.get("stream"))
        if stream:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
        ids: list[int] = []
        sent = 0
        finish: str | None = None
        while finish is None:
            new, finish = await queue.get()
            ids.extend(new)
            text = self._tokenizer.decode(ids)
            if finish is None and text.endswith("\ufffd"):
                continue  # half a character; the next token completes it
            if stream:
                _chunk(writer, _event(text[sent:], finish))
                sent = len(text)
                if writer.is_closing():
                    break
        self._engine.forget(request_id, cancel=finish is None)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt) + len(ids),
        }
        if stream:
            _chunk(writer, {"object": "text_completion", "choices": [], "usage": usage})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            _reply(writer, 200, {**_event(self._tokenizer.decode(ids), finish), "usage": usage})


def _event(text: str, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    return {"id": "cmpl", "object": "text_completion", "model": NAME, "choices": [choice]}


def _chunk(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _reply(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (status, len(data), data)
    )


async def http_main(link: socket.socket, args: argparse.Namespace) -> None:
    """Wait for the engine, then serve."""
    import tokenizers

    reader, writer = await asyncio.open_unix_connection(sock=link, limit=1 << 24)
    if not await reader.readline():
        raise SystemExit("the pipeline did not start")
    tokenizer = tokenizers.Tokenizer.from_file(str(args.model / "tokenizer.json"))
    engine = Engine(reader, writer)
    pump = asyncio.create_task(engine.pump())
    server = await asyncio.start_server(App(engine, tokenizer).serve, "127.0.0.1", args.port)
    async with server:
        await pump  # ends when the engine process does


def main() -> None:
    """Start the engine process, then the HTTP server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--cache-gib", type=int, default=4)
    parser.add_argument("--batched-tokens", type=int, default=512)
    parser.add_argument("--precision", choices=("f32", "native"), default="f32")
    args = parser.parse_args()
    ours, theirs = socket.socketpair()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=engine_main, args=(theirs, ours, args), daemon=True)
    process.start()
    theirs.close()
    ours.setblocking(False)
    asyncio.run(http_main(ours, args))


if __name__ == "__main__":
    main()
