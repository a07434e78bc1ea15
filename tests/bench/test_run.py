from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from hullspeed.bench import BenchResult, BenchSpec, Objective, run
from hullspeed.bench.workload import PromptWriter, load_words
from hullspeed.errors import EngineError, UsageError

from .mock_endpoint import Truth, mock_endpoint


async def test_prompts_have_the_exact_length() -> None:
    async def two_for_long_words(text: str) -> int:
        return sum(1 + (len(word) > 5) for word in text.split())

    writer = PromptWriter(random.Random(3), two_for_long_words)
    shared = await writer.write(40)
    for n_tokens in (41, 100, 333):
        prompt = await writer.write(n_tokens, shared)
        assert prompt.tokens == await two_for_long_words(prompt.text) == n_tokens
        assert prompt.text.startswith(shared.text + " ")


async def test_without_a_counter_a_word_is_a_token() -> None:
    prompt = await PromptWriter(random.Random(3), None).write(50)
    assert len(prompt.text.split()) == prompt.tokens == 50


def test_words_are_distinct_and_plain() -> None:
    words = load_words()
    assert len(set(words)) == len(words) > 300
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


async def test_the_default_loads_end_with_an_open_loop() -> None:
    async with mock_endpoint(Truth(ttft_s=0.02, itl_s=0.001)) as mock:
        result = await run(BenchSpec(url=mock.url, isl_tokens=8, osl_tokens=4, requests=16))
    assert [cell.load.split()[0] for cell in result.cells] == ["closed", "closed", "poisson"]
    asked = result.cells[2].trust.rate_asked
    assert asked == pytest.approx(0.7 * result.cells[1].requests_per_s)


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_conversations_carry_all_turns_before(api: Any) -> None:
    spec: dict[str, Any] = {
        "isl_tokens": 30, "turn_tokens": 10, "conversations": 3, "turns": 4, "osl_tokens": 5,
    }  # fmt: skip
    async with mock_endpoint(Truth()) as mock:
        result = await run(BenchSpec(url=mock.url, api=api, **spec))
    (cell,) = result.cells
    assert cell.requests == cell.ok == 12
    assert [turn.count for turn in cell.turn_ttft_s] == [3, 3, 3, 3]
    assert result.prompt_tokens_by == "endpoint"
    if api == "completions":
        assert cell.prompt_tokens.max == 30 + 3 * (5 + 10)
        longest = max(mock.prompts, key=len)
        earlier = [prompt for prompt in mock.prompts if longest.startswith(prompt)]
        assert len(earlier) == 4
    else:
        assert max(len(body["messages"]) for body in mock.bodies) == 7


async def test_the_result_is_json_and_hides_the_key() -> None:
    async with mock_endpoint(Truth(tokenize=False)) as mock:
        spec = BenchSpec(
            url=mock.url, isl_tokens=8, osl_tokens=4, requests=2, concurrency=(1,),
            api_key="secret", objective=Objective(ttft_s=1e-6),
        )  # fmt: skip
        result = await run(spec)
    text = msgspec.json.encode(result)
    assert b"secret" not in text
    assert msgspec.json.decode(text, type=BenchResult) == result
    assert result.prompt_tokens_by == "estimate"
    assert not result.held


async def test_the_caller_may_count_where_the_endpoint_does_not() -> None:
    async def count(text: str) -> int:
        return len(text.split()) + 5

    async with mock_endpoint(Truth(tokenize=False)) as mock:
        spec = BenchSpec(
            url=mock.url, isl_tokens=20, osl_tokens=4, requests=2, concurrency=(1,)
        )  # fmt: skip
        result = await run(spec, count=count)
    assert result.prompt_tokens_by == "caller"
    assert all(len(prompt.split()) == 15 for prompt in mock.prompts)


async def test_stopping_keeps_what_was_measured() -> None:
    stop = asyncio.Event()
    async with mock_endpoint(Truth(ttft_s=0.05)) as mock:
        spec = BenchSpec(url=mock.url, isl_tokens=8, osl_tokens=2, requests=1000, concurrency=(2,))
        task = asyncio.ensure_future(run(spec, stop=stop))
        while len(mock.prompts) < 12 and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stop.set()
        result = await task
    (cell,) = result.cells
    assert cell.interrupted
    assert 5 <= cell.ok < 30


async def test_missing_usage_is_not_comparable() -> None:
    async with mock_endpoint(Truth(usage=False)) as mock:
        spec = BenchSpec(url=mock.url, isl_tokens=8, osl_tokens=4, requests=4, concurrency=(1,))
        (cell,) = (await run(spec)).cells
    assert cell.ok == 4
    assert any("no usage" in reason for reason in cell.trust.reasons)


async def test_prompts_of_another_length_are_not_comparable() -> None:
    async with mock_endpoint(Truth(extra_prompt_tokens=9)) as mock:
        spec = BenchSpec(url=mock.url, isl_tokens=20, osl_tokens=4, requests=4, concurrency=(1,))
        (cell,) = (await run(spec)).cells
    assert any("29 tokens on average" in reason for reason in cell.trust.reasons)


async def test_a_body_with_a_length_is_read_too() -> None:
    async with mock_endpoint(Truth(content_length=True)) as mock:
        spec = BenchSpec(url=mock.url, isl_tokens=8, osl_tokens=4, requests=4, concurrency=(2,))
        (cell,) = (await run(spec)).cells
    assert cell.ok == 4


async def test_an_endpoint_that_serves_nothing_is_an_error() -> None:
    async with mock_endpoint(Truth(end="http_500")) as mock:
        with pytest.raises(EngineError, match="does not answer"):
            await run(BenchSpec(url=mock.url, isl_tokens=8, osl_tokens=4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"isl_tokens": 0},
        {"osl_tokens": -1},
        {"shared_prefix_tokens": 600},
        {"concurrency": (0,)},
        {"rates": (0.0,)},
        {"rates": (float("nan"),)},
        {"requests": 0},
        {"turns": 3},
        {"conversations": 2, "rates": (1.0,)},
        {"conversations": 2, "cache": "cached"},
        {"objective": Objective(ttft_s=0.0)},
        {"objective": Objective(attainment=1.5)},
        {"timeout_s": 0.0},
        {"url": "https://x"},
    ],
)
async def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        await run(BenchSpec(**({"url": "http://127.0.0.1:9"} | wrong)))
