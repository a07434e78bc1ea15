from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from hullspeed.server.settings import ServerSettings
from support.live_server import PATIENT, LiveServer, live_server
from support.patience import PATIENCE_S, until

LIMITS = ServerSettings(
    port=0, header_deadline_s=0.4, body_deadline_s=0.4, keep_alive_s=1, max_header_bytes=4096,
)  # fmt: skip
BODY = b'{"prompt": "abc", "max_tokens": 3}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(BODY)


@pytest.fixture(scope="module")
def limited() -> Iterator[LiveServer]:
    with live_server(LIMITS) as running:
        yield running


@contextlib.contextmanager
def connect(server: LiveServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        yield sock


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            data += piece
    return data


def read_answer(sock: socket.socket) -> bytes:
    """One answer with a length; the connection stays open."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return head + b"\r\n\r\n" + body


def is_error(answer: bytes, status: int, code: str) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) == status and json.loads(body)["error"]["code"] == code


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD[:-2], b"\r\n"])
def test_headers_have_a_deadline(limited: LiveServer, sent: bytes) -> None:
    with connect(limited) as sock:
        sock.sendall(sent)
        assert is_error(read_to_end(sock), 408, "request_timeout")


def test_a_trickle_does_not_move_the_deadline(limited: LiveServer) -> None:
    with connect(limited) as sock:
        sent = 0
        with contextlib.suppress(OSError):
            for byte in HEAD:
                sock.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.05)
        read_to_end(sock)  # whatever is left of an answer after the reset
        assert sent < len(HEAD)


@pytest.mark.parametrize("sent", [b"", BODY[:5]])
def test_bodies_have_a_deadline(limited: LiveServer, sent: bytes) -> None:
    with connect(limited) as sock:
        sock.sendall(HEAD + sent)
        assert is_error(read_to_end(sock), 408, "request_timeout")


def test_a_chunked_body_has_a_deadline(limited: LiveServer) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(limited) as sock:
        sock.sendall(head + b'5\r\n{"pro\r\n')
        assert is_error(read_to_end(sock), 408, "request_timeout")


def test_a_second_request_has_deadlines_too(limited: LiveServer) -> None:
    for rest in (HEAD[:20], HEAD + BODY[:3]):
        with connect(limited) as sock:
            sock.sendall(HEAD + BODY)
            assert read_answer(sock).split()[1] == b"200"
            sock.sendall(rest)
            assert is_error(read_to_end(sock), 408, "request_timeout")


def test_pipelined_requests_are_answered_in_order(limited: LiveServer) -> None:
    with connect(limited) as sock:
        sock.sendall((HEAD + BODY) * 3)
        answers = read_to_end(sock)  # the server closes when it is kept alive in vain
        assert answers.count(b"HTTP/1.1 200") == 3


def test_an_idle_connection_is_closed(limited: LiveServer) -> None:
    with connect(limited) as sock:
        sock.sendall(HEAD + BODY)
        read_answer(sock)
        assert read_to_end(sock) == b""


@pytest.mark.parametrize("header", [b"x-long: " + b"a" * 5000, b"x: y\r\n" * 1000])
def test_headers_have_a_size(limited: LiveServer, header: bytes) -> None:
    with connect(limited) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n\r\n")
        assert is_error(read_to_end(sock), 431, "headers_too_large")
    with connect(limited) as sock:
        sock.sendall(b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n")
        assert is_error(read_to_end(sock), 431, "headers_too_large")


@pytest.mark.parametrize(
    "garbage",
    [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"hello there\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"],
)
def test_what_is_not_http(limited: LiveServer, garbage: bytes) -> None:
    with connect(limited) as sock:
        sock.sendall(garbage)
        assert is_error(read_to_end(sock), 400, "bad_http")


def test_conflicting_lengths_are_refused(limited: LiveServer) -> None:
    with connect(limited) as sock:
        sock.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        assert is_error(read_to_end(sock), 400, "bad_http")


def test_connections_are_capped() -> None:
    with live_server(msgspec.structs.replace(PATIENT, max_connections=40)) as server:
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(connect(server)) for _ in range(60)]
            answers = [read_to_end(sock) for sock in socks[40:]]
            assert all(is_error(answer, 503, "too_many_connections") for answer in answers)
            socks[0].sendall(HEAD + BODY)
            assert read_answer(socks[0]).split()[1] == b"200"

        def free() -> bool:
            with server.client() as client:
                return client.get("/health").status_code == 200

        assert until(free)
