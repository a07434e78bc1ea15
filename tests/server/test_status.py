from __future__ import annotations

import httpx2
import pytest

import hullspeed
from hullspeed.runtime.messages import Failed
from hullspeed.server.settings import ServerSettings
from support.fake_engine import FakeLink
from support.live_server import PATIENT, live_server
from support.patience import until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def wait_for(client: httpx2.Client, path: str, status: int) -> httpx2.Response:
    answers: list[httpx2.Response] = []

    def answered() -> bool:
        answers.append(client.get(path))
        return answers[-1].status_code == status

    assert until(answered), answers[-1].text
    return answers[-1]


def test_a_healthy_server(client: httpx2.Client) -> None:
    health = client.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    assert health.json()["heartbeat_age_s"] < PATIENT.heartbeat_limit_s
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/version").json() == {"version": hullspeed.__version__}


def test_models(client: httpx2.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "fake"
    assert card["max_model_len"] == 4096
    assert client.get("/v1/models/fake").json() == card
    missing = client.get("/v1/models/a/b")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1", 404), ("GET", "/v1/models/", 404), ("GET", "/health/", 404),
     ("GET", "/v1/completions", 405), ("POST", "/health", 405), ("DELETE", "/v1/models", 405),
     ("OPTIONS", "/v1/completions", 405)],
)  # fmt: skip
def test_paths_and_methods_that_are_not(
    client: httpx2.Client, method: str, path: str, status: int
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_loading_is_healthy_and_not_ready() -> None:
    with live_server(link=lambda: FakeLink(held=True)) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/health").json()["engine"] == "loading"
        ready = client.get("/ready")
        assert ready.status_code == 503
        assert ready.headers["retry-after"]
        assert client.get("/v1/models").status_code == 503
        refused = client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "loading"
        assert refused.headers["retry-after"] == "1"
        server.call(server.link.release)
        assert wait_for(client, "/ready", 200).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_an_engine_that_cannot_load() -> None:
    def link() -> FakeLink:
        return FakeLink(fail=Failed("no such file: /secret/path", 2))

    with live_server(link=link) as server, server.client() as client:
        health = wait_for(client, "/health", 503)
        assert health.json()["engine"] == "failed"
        refused = client.post("/v1/chat/completions", json=CHAT)
        assert refused.json()["error"]["code"] == "engine_down"
        assert "secret" not in refused.text + health.text


def test_a_silent_engine_is_unhealthy_then_replaced() -> None:
    settings = ServerSettings(port=0, heartbeat_limit_s=0.5, hang_limit_s=4.0, restart_delay_s=0.01)
    with live_server(settings) as server, server.client() as client:
        server.link.silent = True
        assert wait_for(client, "/health", 503).json()["engine"] == "ready"
        assert client.get("/ready").status_code == 503
        assert wait_for(client, "/ready", 200).status_code == 200
        assert client.get("/health").json()["restarts"] == 1
        assert len(server.links) == 2


def test_a_full_queue() -> None:
    body = {"prompt": "abc", "max_tokens": 2000, "n": 2, "stream": True}
    with (
        live_server(link=lambda: FakeLink(step_s=0.02), max_waiting=-62) as small,
        small.client() as client,
        client.stream("POST", "/v1/completions", json=body) as first,
    ):
        assert first.status_code == 200
        lines = first.iter_lines()
        next(lines)
        refused = client.post("/v1/completions", json={"prompt": "abc"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        page = client.get("/metrics").text
        assert 'vllm:admission_rejections_total{model_name="fake",reason="queue_full"} 1.0' in page


def test_more_at_once_than_there_is_room_for_submits_nothing() -> None:
    with live_server(max_waiting=-62) as small, small.client() as client:
        refused = client.post("/v1/completions", json={"prompt": "abc", "n": 3})
        assert refused.status_code == 503
        assert small.link.submits == []
        assert client.post("/v1/completions", json={"prompt": "abc", "n": 2}).status_code == 200
