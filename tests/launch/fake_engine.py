"""A stand-in for an engine: logs as vLLM does, answers HTTP, and fails as it is told to.

Usage: fake_engine.py PORT [--delay S] [--crash STAGE] [--linger S] [--child] [--deaf]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LINES = [
    ("start", "INFO 11-30 10:00:00 [core.py:70] Initializing a V1 LLM engine (v0.33.0)"),
    ("weights", "INFO Starting to load model org/name..."),
    ("weights", "Loading safetensors checkpoint shards:  50% Completed | 1/2"),
    ("loaded", "INFO Model loading took 28.75 GiB and 12.3 seconds"),
    ("cache", "INFO GPU KV cache size: 381,700 tokens"),
    ("up", "INFO:     Application startup complete."),
]
CRASH = (
    "ERROR [core.py:900] EngineCore failed to start.\n"
    "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (969).\n"
    "RuntimeError: Engine core initialization failed. See root cause above."
)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--crash", default="")
    parser.add_argument("--linger", type=float, default=0.0)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    args = parser.parse_args()
    if args.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    for stage, line in LINES:
        if args.crash == stage:
            print(CRASH, flush=True)
            os._exit(1)
        print(line, flush=True)
        time.sleep(args.delay)
    if args.deaf:
        time.sleep(600)
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)

    def finish(number: int, frame: object) -> None:
        print("draining", flush=True)
        time.sleep(args.linger)
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, finish)
    if args.crash == "serving":
        threading.Timer(0.7, lambda: (print(CRASH, flush=True), os._exit(9))).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
