"""What the API process costs: CPU time per streamed token and per request, without a model.

    python benchmarks/server_overhead.py [--streams 16] [--tokens 1500] [--requests 300]

The engine is the tests' fake one, on the same event loop; its own cost is measured and taken off.
Clients run in a process of their own. Bar: less than 40 µs of CPU a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hullspeed.core.sampling import SamplingParams
from hullspeed.runtime.messages import Submit
from support.fake_engine import FakeLink
from support.live_server import LiveServer, live_server

STEP_S = 0.003
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CLIENT = """
import json, socket, sys, threading
port, streams, times, body, path = json.loads(sys.argv[1])
def run():
    for _ in range(times):
        sock = socket.create_connection(("127.0.0.1", port))
        head = f"POST {path} HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n"
        sock.sendall((head + f"content-length: {len(body)}\\r\\n\\r\\n" + body).encode())
        while sock.recv(1 << 16): pass
threads = [threading.Thread(target=run) for _ in range(streams)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def load(server: LiveServer, path: str, streams: int, times: int, tokens: int) -> float:
    """CPU seconds of this process while clients run."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    body = json.dumps({**prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True})
    before_s = time.process_time()
    arguments = json.dumps([server.port, streams, times, body, path])
    subprocess.run([sys.executable, "-c", CLIENT, arguments], check=True)
    return time.process_time() - before_s


async def fake_engine_alone(streams: int, tokens: int) -> float:
    """CPU seconds of the fake engine for the same steps."""
    link = FakeLink(step_s=STEP_S)
    running = asyncio.create_task(link.run(lambda _: None))
    await asyncio.sleep(0.05)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    before_s = time.process_time()
    for i in range(streams):
        link.send(Submit(id=i, prompt=[104, 105], sampling=sampling))
    while link.generated < streams * tokens:  # noqa: ASYNC110 # nothing to wait for
        await asyncio.sleep(0.05)
    spent_s = time.process_time() - before_s
    link.die(0)
    await running
    return spent_s


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args()
    n_tokens = options.streams * options.tokens
    alone_s = asyncio.run(fake_engine_alone(options.streams, options.tokens))
    result = {"streams": options.streams, "fake_engine_us_per_token": alone_s / n_tokens * 1e6}
    with live_server(link=lambda: FakeLink(step_s=STEP_S)) as server:
        for name, path in (("chat", CHAT), ("completions", COMPLETION)):
            spent_s = load(server, path, options.streams, 1, options.tokens)
            result[f"{name}_us_per_token"] = (spent_s - alone_s) / n_tokens * 1e6
            spent_s = load(server, path, 1, options.requests, 1)
            result[f"{name}_us_per_request"] = spent_s / options.requests * 1e6
    print(json.dumps({name: round(value, 1) for name, value in result.items()}))


if __name__ == "__main__":
    main()
