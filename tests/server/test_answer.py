"""What happens to answers that do not go to their end: clients leave, stall, engines fail."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import msgspec
import pytest

from hullspeed.server.settings import ServerSettings
from support.fake_engine import FakeLink
from support.live_server import PATIENT, LiveServer, live_server
from support.patience import PATIENCE_S, until
from support.streams import events, text_of

SLOW = 0.01
NEVER = 2 * PATIENCE_S  # the first step of an engine that is not to come that far


def open_request(server: LiveServer, **fields: Any) -> socket.socket:
    """A request on a bare socket, sent and not read."""
    body = json.dumps({"prompt": "abc", "max_tokens": 2000, **fields}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x.localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    sock.sendall(head.encode() + body)
    return sock


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_frees_everything_at_once(stream: bool, n: int) -> None:
    with live_server(link=lambda: FakeLink(step_s=0.3)) as server:
        sock = open_request(server, stream=stream, n=n)
        assert until(lambda: len(server.link.running) == n)
        steps = server.link.steps
        sock.close()
        assert until(lambda: not server.link.running)
        assert server.link.steps - steps <= 3
        assert len(server.link.cancels) == n
        assert server.service.in_flight == 0


def test_a_client_that_leaves_before_its_turn() -> None:
    with live_server(link=lambda: FakeLink(step_s=NEVER)) as server:
        sock = open_request(server)
        assert until(lambda: len(server.link.waiting) == 1)
        sock.close()
        assert until(lambda: not server.link.waiting and not server.link.running)


def test_nothing_is_cancelled_that_ended(server: LiveServer) -> None:
    before = len(server.link.cancels)
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "stream": True})
    time.sleep(0.05)
    assert len(server.link.cancels) == before


def test_a_stop_string_cancels_in_the_engine(server: LiveServer) -> None:
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 500, "stop": "ca"})
    assert until(lambda: not server.link.running)
    assert server.link.submits[-1].id in server.link.cancels


def test_a_reader_that_stalls_is_cut_off() -> None:
    settings = ServerSettings(port=0, write_stall_s=1.0)
    # 4,000 steps take 20 s at least, so none ends by itself before the reader is cut off.
    with live_server(settings, link=lambda: FakeLink(step_s=0.005)) as server:
        # Many choices fill the socket's buffers quickly; nobody reads.
        sock = open_request(server, stream=True, n=16, logprobs=20, max_tokens=4000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert until(lambda: server.service.in_flight == 16)
        assert until(lambda: server.service.in_flight == 0)
        assert len(server.link.cancels) > 0
        sock.close()
        with server.client() as client:
            assert client.get("/health").status_code == 200


def test_an_engine_that_dies_before_the_first_token_is_an_http_error() -> None:
    settings = msgspec.structs.replace(PATIENT, restart_delay_s=0.05)
    with live_server(settings, link=lambda: FakeLink(step_s=NEVER)) as server:
        for stream in (True, False):
            sock = open_request(server, stream=stream)
            assert until(lambda: server.service.in_flight == 1)
            server.call(server.link.die, -9)
            answer = sock.recv(65536)
            assert answer.split()[1] == b"503"
            assert b"retry-after: 1" in answer
            assert b'"engine_error"' in answer
            sock.close()
            assert until(lambda: server.service.admitting)


def test_an_engine_that_dies_under_a_stream_ends_it_with_an_error() -> None:
    settings = ServerSettings(port=0, restart_delay_s=0.05)
    body = {"prompt": "abc", "max_tokens": 2000, "stream": True}
    with (
        live_server(settings, link=lambda: FakeLink(step_s=SLOW)) as server,
        server.client() as client,
    ):
        with client.stream("POST", "/v1/completions", json=body) as answer:
            text = ""
            for piece in answer.iter_text():
                text += piece
                if server.link.steps > 5 and len(server.links) == 1:
                    server.call(server.link.die, -9)
        chunks = events(text)
        assert chunks.pop() == "[DONE]"
        assert chunks.pop()["error"]["code"] == "engine_error"
        assert text_of(chunks).startswith("abcab")
        assert all(choice["finish_reason"] is None for c in chunks for choice in c["choices"])
        assert until(lambda: server.service.admitting)
        assert client.get("/health").json()["restarts"] == 1
        again = client.post("/v1/completions", json={"prompt": "xy", "max_tokens": 3})
        assert again.json()["choices"][0]["text"] == "xyx"


def test_an_engine_that_dies_again_and_again_is_given_up() -> None:
    settings = ServerSettings(port=0, restart_delay_s=0.001, max_restarts=2)
    with live_server(settings) as server, server.client() as client:
        for lives in (1, 2, 3):
            assert until(lambda: len(server.links) == lives and server.service.admitting)  # noqa: B023
            server.call(server.link.die, 1)
        assert until(lambda: client.get("/health").status_code == 503)
        assert len(server.links) == 3
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.json()["error"]["code"] == "engine_down"


def test_an_error_of_one_request_is_that_request_s_alone() -> None:
    with live_server(link=lambda: FakeLink(step_s=SLOW)) as server:
        bad, good = open_request(server), open_request(server, max_tokens=150)
        assert until(lambda: len(server.link.running) == 2)
        server.call(server.link.error, min(server.link.running), "NaN in /some/internal/file.py")
        answer = bad.recv(65536)
        assert answer.split()[1] == b"503"
        assert b"internal" not in answer
        assert good.recv(65536).split()[1] == b"200"
        bad.close()
        good.close()
