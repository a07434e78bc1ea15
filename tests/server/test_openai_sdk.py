"""The real client of OpenAI's API against our server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from hullspeed.server.settings import ServerSettings
from support.live_server import live_server

KEY = "a-key-for-the-sdk"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def sdk() -> Iterator[openai.OpenAI]:
    with (
        live_server(ServerSettings(port=0, api_keys=(KEY,))) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["fake"]
    assert sdk.models.retrieve("fake").owned_by == "hullspeed"


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="fake", messages=MESSAGES, logprobs=True, top_logprobs=1, n=2, max_tokens=20
    )
    assert [choice.message.content for choice in answer.choices] == ["user\nhi"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[1].top_logprobs[0].logprob == -1.0


def test_chat_stream(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "user\nhi"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


def test_chat_stream_helper(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model="fake", messages=MESSAGES) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content == "user\nhi"
    assert final.choices[0].finish_reason == "stop"


def test_completions(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model="fake", prompt=["ab", "c"], max_tokens=4, logprobs=1, echo=False, stop=["zz"]
    )
    assert [choice.text for choice in answer.choices] == ["abab", "cccc"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["a", "b", "a", "b"]
    stream = sdk.completions.create(model="fake", prompt="ab", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abab"


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_request"),
        ({"messages": []}, openai.BadRequestError, "invalid_request"),
        ({"extra_headers": {"authorization": "Bearer wrong"}}, openai.AuthenticationError,
         "invalid_api_key"),
    ],
)  # fmt: skip
def test_errors(
    sdk: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        sdk.chat.completions.create(**{"model": "fake", "messages": MESSAGES, **fields})
    assert caught.value.code == code


async def test_async(sdk: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=sdk.base_url, api_key=KEY) as client:
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "user\nhi"
