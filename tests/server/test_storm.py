"""Many clients at once, many of whom leave: none lost, none mixed, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
import re

import httpx2

from support.fake_engine import FakeLink, fake_info
from support.live_server import LiveServer, live_server
from support.patience import until
from support.streams import events, text_of

CLIENTS = 200
OUTPUT_TOKENS = 60


async def one(server: LiveServer, i: int, draw: random.Random) -> str:
    """One client: reads all of its stream, or leaves at a moment of its own."""
    prompt = f"<{i}:" + "".join(draw.choices("abcdefgh", k=draw.randint(3, 9))) + ">"
    leaves_after = draw.choice([None, None, 0, 1, 300, 3000])
    fields = {
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
        "n": draw.choice([1, 1, 2]),
    }
    body = json.dumps(fields).encode()
    await asyncio.sleep(draw.random() * 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = (
        f"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        if leaves_after is not None:
            await reader.read(leaves_after) if leaves_after else None
            return "left"
        data = await reader.read(-1)
    finally:
        writer.close()
    head_text, _, text = data.decode().partition("\r\n\r\n")
    assert head_text.split()[1] == "200", head_text
    if "chunked" in head_text:
        text = re.sub(r"(?m)^[0-9a-f]+\r\n", "", text).replace("\r\n", "")
    chunks = events(text)
    assert chunks.count("[DONE]") == 1
    expected = (prompt * OUTPUT_TOKENS)[:OUTPUT_TOKENS]
    for k in range(fields["n"] if isinstance(fields["n"], int) else 1):
        assert text_of(chunks, k) == expected
        reasons = [c["finish_reason"] for x in chunks[:-1] for c in x["choices"] if c["index"] == k]
        assert reasons.count("length") == 1
    return "read"


async def storm(server: LiveServer, seed: int) -> list[str]:
    draw = random.Random(seed)
    return await asyncio.gather(
        *(one(server, i, random.Random(draw.random())) for i in range(CLIENTS))
    )


def pages_free(client: httpx2.Client) -> float:
    page = client.get("/metrics").text
    match = re.search(r"^hullspeed:kv_pages_free\{.*\} (.+)$", page, re.MULTILINE)
    assert match
    return float(match.group(1))


def test_two_hundred_clients() -> None:
    info = fake_info(max_running=48)
    with (
        live_server(link=lambda: FakeLink(info, step_s=0.001)) as server,
        server.client() as client,
    ):
        outcomes = asyncio.run(storm(server, seed=20))
        assert len(outcomes) == CLIENTS
        assert min(outcomes.count("read"), outcomes.count("left")) > 40
        assert until(lambda: pages_free(client) == info.n_pages)
        assert until(lambda: server.service.in_flight == 0)
        assert not server.link.running
        assert not server.link.waiting
        assert len(server.links) == 1
        assert client.get("/health").status_code == 200
        ended = sum(server.service.metrics.finished.values())
        assert ended == len(server.link.submits)
