from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from hullspeed.server.settings import ServerSettings
from support.live_server import live_server

PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
BODIES = [
    b"", b"{", b"[]", b"null", b"1", b'"x"', b"{}", b"\xff\xfe", b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b'{"prompt": 1e999}', b"{'a': 1}",
    b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": "x"', b'{"prompt": "x"} {}', b"\x00",
    b'{"model": 123456789012345678901234567890}',
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:20]))
def test_bodies_that_are_no_request(client: httpx2.Client, path: str, body: bytes) -> None:
    answer = client.post(path, content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert "hullspeed" not in answer.text
    assert "/" not in error["message"]


def test_any_content_type_is_read_as_json(client: httpx2.Client) -> None:
    answer = client.post(
        "/tokenize", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}
    )
    assert answer.json()["tokens"] == [97]


def test_bodies_over_the_cap() -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    settings = ServerSettings(port=0, max_body_bytes=1000)
    with live_server(settings) as server, server.client() as client:
        for content in (b"x" * 1001, chunks()):
            answer = client.post("/tokenize", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        fits = b'{"prompt": "' + b"x" * 980 + b'"}'
        assert client.post("/tokenize", content=fits).status_code == 200
