from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.patience import PATIENCE_S, output_of, until
from support.streams import events

TESTS = Path(__file__).parents[1]
LONG = {"prompt": "abc", "max_tokens": 4000, "stream": True}
NEVER_S = 10 * PATIENCE_S  # who waits for this is given up before


class Served:
    """A server process and its URL."""

    def __init__(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.fake_serve", json.dumps(options)],
            cwd=TESTS,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        """Exit code and what it wrote to standard error."""
        _, errors = output_of(self.process)
        return self.process.returncode, errors


@contextlib.contextmanager
def served(**options: Any) -> Iterator[Served]:
    running = Served(**options)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.url, self.body = url, body
        self.text, self.status = "", 0
        self.begun = threading.Event()

    def run(self) -> None:
        with (
            httpx2.Client(timeout=PATIENCE_S) as client,
            client.stream("POST", self.url + "/v1/completions", json=self.body) as answer,
        ):
            self.status = answer.status_code
            for piece in answer.iter_text():
                self.text += piece
                self.begun.set()


def in_flight(url: str) -> float:
    page = httpx2.get(url + "/metrics").text
    match = re.search(r"^hullspeed:requests_in_flight\{.*\} (\S+)$", page, re.MULTILINE)
    assert match
    return float(match.group(1))


def begin(url: str, **fields: Any) -> Reader:
    reader = Reader(url, {**LONG, **fields})
    reader.start()
    assert reader.begun.wait(PATIENCE_S)
    return reader


def test_an_idle_server_ends_at_once() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with served(drain_seconds=NEVER_S) as server:
            assert httpx2.get(server.url + "/ready").status_code == 200
            server.process.send_signal(number)
            assert server.end()[0] == 0


def test_draining_finishes_what_runs_and_admits_nothing() -> None:
    with served(drain_seconds=NEVER_S, step_s=0.004) as server:
        reader = begin(server.url, max_tokens=1500)
        server.terminate()
        assert until(lambda: httpx2.get(server.url + "/ready").status_code == 503)
        ready = httpx2.get(server.url + "/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert httpx2.get(server.url + "/health").status_code == 200
        refused = httpx2.post(server.url + "/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
        code, errors = server.end()
        reader.join(PATIENCE_S)
        assert code == 0, errors
        chunks = events(reader.text)
        assert chunks.pop() == "[DONE]"
        assert chunks.pop()["choices"][0]["finish_reason"] == "length"


def test_what_outlasts_the_drain_is_cut_with_an_error() -> None:
    with served(drain_seconds=0.3, step_s=0.01) as server:
        streams = [begin(server.url) for _ in range(2)]
        whole = Reader(server.url, {**LONG, "stream": False})
        whole.start()
        assert until(lambda: in_flight(server.url) == 3)
        server.terminate()
        code, errors = server.end()
        assert code == 1
        assert "3 requests were cut" in errors
        for reader in streams:
            reader.join(PATIENCE_S)
            chunks = events(reader.text)
            assert chunks.pop() == "[DONE]"
            assert chunks.pop()["error"]["code"] == "shutting_down"
        whole.join(PATIENCE_S)
        assert whole.status == 503
        assert json.loads(whole.text)["error"]["code"] == "shutting_down"


def test_a_second_signal_stops_now() -> None:
    with served(drain_seconds=NEVER_S, step_s=0.01) as server:
        reader = begin(server.url)
        server.terminate()
        assert until(lambda: httpx2.get(server.url + "/ready").status_code == 503)
        server.terminate()
        code, _ = server.end()
        assert code == 1
        reader.join(PATIENCE_S)
        assert events(reader.text)[-2]["error"]["code"] == "shutting_down"


def test_a_stream_that_nobody_reads_does_not_hold_up_the_end() -> None:
    with served(drain_seconds=0.2, step_s=0.0, write_stall_s=NEVER_S) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        body = json.dumps({**LONG, "n": 16, "logprobs": 20}).encode()
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
                % len(body)
                + body
            )
            assert until(lambda: in_flight(server.url) == 16)
            server.terminate()
            code, _ = server.end()
            assert code == 1


def test_a_signal_while_loading_ends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "support.fake_serve", json.dumps({"load_s": NEVER_S, "port": port})],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
    )

    def loading() -> bool:
        with contextlib.suppress(httpx2.TransportError):
            health = httpx2.get(f"http://127.0.0.1:{port}/health")
            return bool(health.json()["engine"] == "loading")
        return False

    assert until(loading)
    process.send_signal(signal.SIGTERM)
    out, _ = output_of(process)
    assert process.returncode == 0
    assert out == b""


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with served(port=port) as server:
            code, errors = server.end()
    assert code == 2
    assert errors.startswith(f"error: cannot listen on 127.0.0.1 port {port}")
    assert "--port 0" in errors


@pytest.mark.parametrize(("code", "text"), [(2, "not a model"), (1, "too little memory"), (3, "x")])
def test_an_engine_that_cannot_load_ends_the_server_with_its_code(code: int, text: str) -> None:
    with served(fail=[text, code]) as server:
        assert server.url == ""
        ended, errors = server.end()
    assert ended == code
    assert f"error: {text}" in errors


def test_a_free_port_can_be_taken_again_at_once() -> None:
    with served() as server:
        port = int(server.url.rpartition(":")[2])
        assert httpx2.get(server.url + "/health").status_code == 200
        server.process.kill()
        server.end()
    with served(port=port) as again:
        assert httpx2.get(again.url + "/health").status_code == 200


def test_beyond_loopback_it_does_not_start_without_a_key() -> None:
    with served(host="0.0.0.0") as server:
        code, errors = server.end()
    assert code == 2
    assert "needs an API key" in errors
