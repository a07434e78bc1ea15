from __future__ import annotations

from typing import Any

import httpx2
import pytest


def test_text(client: httpx2.Client) -> None:
    body = client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert body["tokens"] == [97, 0xC3, 0xA9]
    assert body["count"] == 3
    assert body["max_model_len"] == 4096
    assert body["token_strs"][0] == "a"


def test_there_and_back(client: httpx2.Client) -> None:
    text = "héllo <|im_start|> 漢字 🙂\n"
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_messages_as_the_engine_sees_them(client: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    chat = client.post(
        "/v1/chat/completions",
        json={"messages": messages, "max_tokens": 1, "return_token_ids": True},
    ).json()
    assert tokens == chat["choices"][0]["prompt_token_ids"]
    shorter = client.post(
        "/tokenize", json={"messages": messages, "add_generation_prompt": False}
    ).json()["tokens"]
    assert tokens[: len(shorter)] == shorter
    assert len(shorter) < len(tokens)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": 1}),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}),
        ("/tokenize", {"prompt": "a", "model": "other"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [258]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
def test_bad_requests(client: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"]
