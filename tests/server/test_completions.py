from __future__ import annotations

from typing import Any

import httpx2
import pytest

from hullspeed.server.completions import split_prompt
from support.streams import events, text_of


def ask(client: httpx2.Client, prompt: object = "abc", **fields: Any) -> httpx2.Response:
    return client.post("/v1/completions", json={"prompt": prompt, **fields})


def test_an_answer(client: httpx2.Client) -> None:
    body = ask(client, max_tokens=7).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "abcabca", "logprobs": None, "finish_reason": "length",
         "stop_reason": None}
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 7


def test_sixteen_tokens_unless_asked(client: httpx2.Client) -> None:
    assert ask(client).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abca"]), (["abc"], ["abca"]), (["abc", "x"], ["abca", "xxxx"]),
        ([97, 98], ["abab"]), ([[97, 98], [99]], ["abab", "cccc"]),
    ],
)  # fmt: skip
def test_shapes_of_prompts(client: httpx2.Client, prompt: object, texts: list[str]) -> None:
    body = ask(client, prompt, max_tokens=4).json()
    assert [choice["text"] for choice in body["choices"]] == texts
    chunks = events(ask(client, prompt, max_tokens=4, stream=True).text)
    assert [text_of(chunks, i) for i in range(len(texts))] == texts


@pytest.mark.parametrize(
    "prompt",
    [[], [1, "a"], ["a", [1]], [[1], 2], [[True]], [1.5], [None], [[[1]]], [[]], "", [["a"]]],
)
def test_prompts_that_cannot_be(client: httpx2.Client, prompt: object) -> None:
    answer = ask(client, prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("token", [-1, 258, 2**40])
def test_tokens_outside_the_vocabulary(client: httpx2.Client, token: int) -> None:
    assert ask(client, [97, token]).json()["error"]["param"] == "prompt"


def test_too_many_prompts_are_refused_before_they_are_read() -> None:
    with pytest.raises(Exception, match="too many prompts"):
        split_prompt(["a"] * 5, most=4)


def test_choices_are_numbered_by_prompt(client: httpx2.Client) -> None:
    body = ask(client, ["a", "b"], n=2, max_tokens=2).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "aa"), (1, "aa"), (2, "bb"), (3, "bb"),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("ca", "ab"),
        (["zz", "bca"], "a"),
        ("abcabcabc", ""),
        ("xyz", "abcabcabca"),
        (["c", "b"], "a"),
    ],
)
def test_stop_strings_across_tokens(
    client: httpx2.Client, stop: object, text: str, stream: bool
) -> None:
    answer = ask(client, "abc", stop=stop, max_tokens=10, stream=stream)
    if stream:
        chunks = events(answer.text)[:-1]
        last = chunks[-1]["choices"][0]
        assert text_of(chunks) == text
    else:
        last = answer.json()["choices"][0]
        assert last["text"] == text
    found = len(text) < 10
    assert last["finish_reason"] == ("stop" if found else "length")
    assert (last["stop_reason"] is not None) == found


def test_a_character_of_several_tokens_comes_whole(client: httpx2.Client) -> None:
    prompt = "é漢🙂"
    chunks = events(ask(client, prompt, max_tokens=9, stream=True).text)[:-1]
    assert text_of(chunks) == prompt
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["text"]]
    assert pieces == ["é", "漢", "🙂"]
    cut = ask(client, prompt, max_tokens=3).json()["choices"][0]["text"]
    assert cut == "é\N{REPLACEMENT CHARACTER}"


def test_stop_tokens_are_not_shown(client: httpx2.Client) -> None:
    choice = ask(client, "abcd", stop_token_ids=[99], max_tokens=10).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", 99)


def test_echo(client: httpx2.Client) -> None:
    assert ask(client, "abc", echo=True, max_tokens=2).json()["choices"][0]["text"] == "abcab"
    chunks = events(ask(client, "abc", echo=True, max_tokens=2, stream=True).text)
    assert text_of(chunks) == "abcab"
    assert ask(client, echo=True, logprobs=1).json()["error"]["param"] == "echo"


def test_logprobs(client: httpx2.Client) -> None:
    logprobs = ask(client, "abc", logprobs=2, max_tokens=3).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert [sorted(top.values()) for top in logprobs["top_logprobs"]] == [[-2.0, -1.0]] * 3
    chunks = events(ask(client, "abc", logprobs=0, max_tokens=3, stream=True).text)[:-1]
    found = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [x for f in found for x in f["text_offset"]] == [0, 1, 2]


def test_best_of(client: httpx2.Client) -> None:
    assert ask(client, best_of=1).status_code == 200
    assert ask(client, best_of=2).json()["error"]["param"] == "best_of"
    assert ask(client, suffix="x").json()["error"]["param"] == "suffix"


def test_control_tokens_of_a_raw_prompt_are_read(client: httpx2.Client) -> None:
    body = ask(client, "<|im_start|>a", max_tokens=1, return_token_ids=True).json()
    assert body["choices"][0]["prompt_token_ids"] == [256, 97]


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read(client: httpx2.Client) -> None:
    too_long = 2_000_000
    for prompt in ("x" * too_long, [97] * too_long, [[97] * too_long]):
        answer = ask(client, prompt)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
