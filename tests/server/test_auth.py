from __future__ import annotations

import hmac
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from hullspeed.server import auth
from hullspeed.server.auth import KeyRing
from hullspeed.server.settings import ServerSettings
from support.live_server import LiveServer, live_server

KEYS = ("first-key-of-all", "second-key-of-all", "third-key-of-all")
PATHS = [
    ("GET", "/v1/models"), ("GET", "/v1/models/fake"), ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/metrics"), ("GET", "/version"), ("GET", "/nothing/here"), ("PUT", "/health/"),
]  # fmt: skip


@pytest.fixture(scope="module")
def keyed() -> Iterator[LiveServer]:
    with live_server(ServerSettings(port=0, api_keys=KEYS)) as running:
        yield running


def raw(server: LiveServer, head: str) -> bytes:
    """The answer to a request written by hand."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n")
        return sock.recv(65536)


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_everything_is_closed_without_a_key(keyed: LiveServer, method: str, path: str) -> None:
    with keyed.client() as client:
        answer = client.request(method, path)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_the_public_paths(keyed: LiveServer, path: str) -> None:
    with keyed.client() as client:
        assert client.get(path).status_code == 200


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(keyed: LiveServer, key: str) -> None:
    with keyed.client() as client:
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            assert client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", KEYS[0], "Bearer \xff"],
)
def test_wrong_keys(keyed: LiveServer, value: str) -> None:
    head = f"GET /v1/models HTTP/1.1\nhost: 127.0.0.1\nauthorization: {value}"
    assert raw(keyed, head).split()[1] == b"401"


@pytest.mark.parametrize(
    "target",
    [
        "/health/../v1/models", "/health%2f..%2fv1%2fmodels", "//v1/models", "/ready/..//v1/models",
        "/v1/models?x=/health", "/v1/models;/health", "/%76%31/models", "/v1/models%00/health",
        "http://127.0.0.1/v1/models", "http://x/health/../v1/models", "/HEALTH", "/health/",
    ],
)  # fmt: skip
def test_no_path_leads_around_the_key(keyed: LiveServer, target: str) -> None:
    answer = raw(keyed, f"GET {target} HTTP/1.1\nhost: 127.0.0.1")
    assert answer.split()[1] in (b"401", b"400")


@pytest.mark.parametrize("host", ["x/health", "127.0.0.1/health?", "evil.com", "", "[::1"])
def test_the_host_header_decides_nothing(keyed: LiveServer, host: str) -> None:
    assert raw(keyed, f"GET /v1/models HTTP/1.1\nhost: {host}").split()[1] == b"401"
    with_key = f"GET /v1/models HTTP/1.1\nhost: {host}\nauthorization: Bearer {KEYS[1]}"
    assert raw(keyed, with_key).split()[1] == b"200"


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def counting(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    class Hmac:
        compare_digest = staticmethod(counting)

    monkeypatch.setattr(auth, "hmac", Hmac)
    ring = KeyRing(KEYS)
    for offered in (KEYS[0], KEYS[2], "wrong", ""):
        compared.clear()
        ring.find(offered.encode())
        assert len(compared) == len(KEYS)
        assert all(len(one) == len(other) == 32 for one, other in compared)


def test_tenants_differ_by_key_and_say_nothing_of_it() -> None:
    tenants = [KeyRing(KEYS).find(key.encode()) for key in KEYS]
    salts = {tenant.salt for tenant in tenants if tenant}
    assert len(salts) == 3
    again = KeyRing(KEYS[::-1]).find(KEYS[0].encode())
    assert again == tenants[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.com"}, {"host": "evil.com:80"}, {"host": "127.0.0.1.evil.com"},
        {"host": "127.0.0.1", "origin": "http://evil.com"}, {"host": "localhost", "origin": "null"},
        {"host": "localhost", "origin": "https://localhost.evil.com"},
    ],
)  # fmt: skip
def test_a_keyless_server_answers_loopback_names_only(
    client: httpx2.Client, headers: dict[str, str]
) -> None:
    answer = client.get("/v1/models", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert client.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:1"}, {"host": "[::1]:8000"}, {"host": "127.0.0.1"},
        {"host": "localhost", "origin": "http://localhost:3000"},
    ],
)  # fmt: skip
def test_loopback_names(client: httpx2.Client, headers: dict[str, str]) -> None:
    assert client.get("/v1/models", headers=headers).status_code == 200


def test_further_names_can_be_allowed() -> None:
    settings = ServerSettings(port=0, allowed_hosts=("Box.lan",))
    with live_server(settings) as server, server.client() as client:
        assert client.get("/version", headers={"host": "box.LAN:80"}).status_code == 200


def test_metrics_can_be_public() -> None:
    settings = ServerSettings(port=0, api_keys=KEYS, public_metrics=True)
    with live_server(settings) as server, server.client() as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/version").status_code == 401
