"""Any request gets an answer, and the server lives."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hullspeed.server.schemas import (
    HARMLESS,
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from support.live_server import LiveServer
from support.patience import until

FIELDS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, -(2**31), 2**63 - 1, -(2**63), 2**64, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "x"])},
        optional={"content": TEXTS | JSON, "name": JSON},
    ),
    max_size=3,
)


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies near enough to right ones that many get past the first check."""
    names = [*FIELDS[path].__struct_fields__, *sorted(NEUTRAL), *sorted(HARMLESS), "unknown"]
    likely = {
        "messages": MESSAGES,
        "prompt": TEXTS | st.lists(TEXTS, max_size=3) | st.lists(st.integers(-1, 258), max_size=4),
        "max_tokens": st.integers(-1, 30),
        "tokens": st.lists(st.integers(-1, 258), max_size=5),
        "stream": st.booleans(),
        "model": st.sampled_from(["fake", "other"]),
    }
    optional = {name: likely.get(name, st.nothing()) | JSON for name in names}
    required = {"max_tokens": st.integers(1, 30), "messages": MESSAGES, "prompt": TEXTS}
    required["tokens"] = likely["tokens"]
    if path == "/tokenize":
        del required["messages"]  # it takes one of the two
    keep = {k: v for k, v in required.items() if k in FIELDS[path].__struct_fields__}
    return st.one_of(
        st.dictionaries(st.sampled_from(names), JSON, max_size=4),
        st.builds(lambda a, b: {**a, **b}, st.fixed_dictionaries(keep), _some(optional)),
    )


def _some(optional: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({name: optional[name] for name in names})

    return st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True).flatmap(build)


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_any_json_gets_an_answer(path: str, client: httpx2.Client, server: LiveServer) -> None:
    seen: set[int] = set()

    @settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(bodies(path))
    def check(body: dict[str, Any]) -> None:
        answer = client.post(path, json=body)
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert "Traceback" not in answer.text
        elif body.get("stream"):
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text

    check()
    assert {200, 400} <= seen
    assert client.get("/health").status_code == 200
    # The last answer may be read before its request is closed.
    assert until(lambda: server.service.in_flight == 0)
    assert len(server.links) == 1


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(body=st.binary(max_size=60))
def test_any_bytes_get_an_answer(body: bytes) -> None:
    assert _post(body).status_code in (200, 400)


_client: httpx2.Client | None = None


@pytest.fixture(autouse=True)
def _share(client: httpx2.Client) -> None:
    global _client  # noqa: PLW0603 # hypothesis cannot be given a fixture for each example
    _client = client


def _post(body: bytes) -> httpx2.Response:
    assert _client is not None
    return _client.post("/v1/completions", content=body)
