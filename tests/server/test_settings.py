from __future__ import annotations

import pytest

from hullspeed.errors import UsageError
from hullspeed.server.settings import ServerSettings, is_loopback

KEY = "a-long-enough-key"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]", "a.localhost"]
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    ServerSettings(host=host).check()


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "", "127.0.0.1.evil.com"]
)
def test_beyond_loopback_needs_a_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(UsageError, match="needs an API key"):
        ServerSettings(host=host).check()
    ServerSettings(host=host, api_keys=(KEY,)).check()


@pytest.mark.parametrize(
    "key", ["", "short", "has a space in it", "ключ-ключ-ключ", "new\nline-key"]
)
def test_keys_that_cannot_be(key: str) -> None:
    with pytest.raises(UsageError, match="API key"):
        ServerSettings(api_keys=(key,)).check()


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_that_cannot_be(port: int) -> None:
    with pytest.raises(UsageError, match="--port"):
        ServerSettings(port=port).check()


def test_keys_are_not_shown() -> None:
    assert KEY not in repr(ServerSettings(api_keys=(KEY,)))
