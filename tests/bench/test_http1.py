from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hullspeed.bench.client import Client
from hullspeed.bench.http1 import Exchange, FramingError, ResponseReader, Target
from hullspeed.errors import EngineError, UsageError

from .mock_endpoint import Truth, mock_endpoint


def read(*pieces: bytes) -> tuple[Exchange, ResponseReader, bool]:
    exchange = Exchange(0.0)
    reader = ResponseReader(exchange)
    done = False
    for at, piece in enumerate(pieces):
        assert not done, "bytes after the end"
        done = reader.feed(float(at), piece)
    return exchange, reader, done


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("127.0.0.1:9", "http://127.0.0.1:9"),
        ("http://[::1]:9/api/v1", "http://[::1]:9/api"),
        ("http://h", "http://h:80"),
    ],
)
def test_targets(url: str, shown: str) -> None:
    assert Target.parse(url).url == shown


@pytest.mark.parametrize("url", ["https://h", "ftp://h", "http://", "http://h:x", "http://h/?q=1"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        Target.parse(url)


def test_a_key_cannot_smuggle_a_header() -> None:
    with pytest.raises(UsageError):
        Target.parse("http://h", "key\r\nX: y")


def test_request_bytes() -> None:
    request = Target.parse("http://h:1", "k").request_bytes("/v1/completions", b"{}")
    head, body = request.split(b"\r\n\r\n")
    assert body == b"{}"
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert b"Content-Length: 2" in head
    assert b"Authorization: Bearer k" in head


BODIES = [b"data: a\n\n", b"x", b"0\r\n\r\n", b"\r\n", "é🦊".encode()]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
    b"%x;ext=1\r\n%s\r\n" % (len(body), body) for body in BODIES
)
RESPONSES = [
    (CHUNKED + b"0\r\n\r\n", b"".join(BODIES)),
    (CHUNKED + b"0\r\nTrailer: x\r\n\r\n", b"".join(BODIES)),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
]


@given(st.sampled_from(RESPONSES), st.lists(st.integers(1, 200), max_size=10))
def test_any_split_reads_the_same(response: tuple[bytes, bytes], cuts: list[int]) -> None:
    stream, body = response
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    exchange, reader, done = read(*pieces)
    assert done
    assert exchange.body == body
    assert exchange.status == 200
    assert reader.keep_alive


def test_pieces_keep_the_time_of_their_read() -> None:
    exchange, _, done = read(CHUNKED[:60], CHUNKED[60:], b"0\r\n\r\n")
    assert done
    assert [at_s for at_s, _ in exchange.pieces] == [0.0, 1.0]


def test_a_body_without_length_ends_with_the_connection() -> None:
    exchange, reader, done = read(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert not done
    assert not reader.keep_alive
    assert reader.at_eof()
    assert exchange.body == b"abc"


def test_a_cut_chunked_body_is_no_end() -> None:
    _, reader, done = read(CHUNKED)
    assert not done
    assert not reader.at_eof()


@pytest.mark.parametrize(
    "stream",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nmore",
        b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_said(stream: bytes) -> None:
    with pytest.raises(FramingError):
        read(stream)


async def test_connections_are_kept() -> None:
    async with mock_endpoint(Truth()) as mock, Client(Target.parse(mock.url)) as client:
        await client.open_connections(1)
        for _ in range(3):
            assert (await client.json("/v1/models"))[0] == 200
        assert len(client._idle) == 1


async def test_a_closed_idle_connection_is_replaced() -> None:
    truth = Truth(close_after_each=True)
    async with mock_endpoint(truth) as mock, Client(Target.parse(mock.url)) as client:
        for _ in range(5):
            assert (await client.json("/v1/models"))[0] == 200


async def test_timeouts_end_the_exchange() -> None:
    truth = Truth(ttft_s=3.0)
    async with (
        mock_endpoint(truth) as mock,
        Client(Target.parse(mock.url), timeout_s=0.1) as client,
    ):
        body = b'{"prompt": "a", "max_tokens": 1}'
        exchange = await client.exchange(client.target.request_bytes("/v1/completions", body))
        assert exchange.failure == "timeout"
        assert mock.prompts == ["a"]
        assert mock.sent_s == [[]]  # it ended before the answer began


async def test_nothing_listening_is_an_error() -> None:
    async with Client(Target.parse("http://127.0.0.1:9")) as client:
        with pytest.raises(EngineError, match="nothing answers"):
            await client.open_connections(1)
        assert (await client.json("/v1/models"))[0] == 0
