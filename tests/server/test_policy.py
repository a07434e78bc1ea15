from __future__ import annotations

from typing import Any

import pytest

from hullspeed.errors import ContextOverflowError, RequestError, UnknownModelError
from hullspeed.server.auth import ANYONE, Tenant
from hullspeed.server.policy import Job, RequestPolicy
from hullspeed.server.schemas import GenerationFields
from hullspeed.server.settings import ServerSettings
from support.fake_engine import VOCAB, fake_info

POLICY = RequestPolicy(
    ServerSettings(max_prompts=4, max_sequences=8), ("fake",), fake_info(context=100)
)


def job(*, prompts: list[list[int]] | None = None, tenant: Tenant = ANYONE, **fields: Any) -> Job:
    parsed = GenerationFields(**fields)
    return POLICY.job(
        parsed, [[1, 2, 3]] if prompts is None else prompts, tenant, max_tokens=parsed.max_tokens
    )


def test_defaults() -> None:
    plain = job()
    assert plain.max_tokens == (97,)
    assert plain.sampling.temperature == 1.0
    assert plain.sampling.n == 1
    assert not plain.stream
    assert plain.salt == b""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**62}, "max_tokens"),
        ({"max_tokens": 98}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 98}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 9}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"priority": 1001}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)  # fmt: skip
def test_values_that_cannot_be(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        job(**fields)
    assert caught.value.param == param
    assert caught.value.http_status == 400


def test_n_counts_with_prompts() -> None:
    assert len(job(prompts=[[1], [2]], n=4).prompts) == 2
    with pytest.raises(RequestError, match="prompts times n"):
        job(prompts=[[1], [2]], n=5)
    with pytest.raises(RequestError, match="too many prompts"):
        job(prompts=[[1]] * 5)


def test_context() -> None:
    assert job(prompts=[[1] * 99]).max_tokens == (1,)
    for length in (100, 101, 1000):
        with pytest.raises(ContextOverflowError) as caught:
            job(prompts=[[1] * length])
        assert caught.value.code == "context_length_exceeded"
        assert str(length) in str(caught.value)
    with pytest.raises(RequestError, match="no tokens"):
        job(prompts=[[]])


def test_models() -> None:
    assert job(model="fake").model == "fake"
    assert job().model == "fake"
    with pytest.raises(UnknownModelError, match="use 'fake'") as caught:
        job(model="gpt-5")
    assert caught.value.http_status == 404


def test_top_k_of_all() -> None:
    assert job(top_k=-1).sampling.top_k == 0
    assert job(top_k=10**6).sampling.top_k == VOCAB


def test_salts_separate_tenants_and_add_up() -> None:
    one, two = Tenant(b"1" * 16), Tenant(b"2" * 16)
    salts = [
        job(tenant=tenant, cache_salt=salt).salt
        for tenant in (ANYONE, one, two)
        for salt in (None, "a", "b")
    ]
    assert len(set(salts)) == len(salts)
    assert job(tenant=one, cache_salt="a").salt == job(tenant=one, cache_salt="a").salt
