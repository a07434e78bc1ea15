"""Damaged, mixed and hostile logs: an explanation or one clear refusal, nothing else."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hullspeed.errors import UsageError
from hullspeed.plan.explain_log.explain import explain_log
from hullspeed.plan.explain_log.reader import line_patterns
from hullspeed.plan.explain_log.render import lines_of

EXAMPLES = [row.example for row in line_patterns()]
NUMBER = re.compile(r"\d+(?:\.\d+)?")
DAMAGE = st.sampled_from(
    ["0", "1", "7", "-3", "1e9", "9" * 30, "", "x", "0.0", "1.2.3", "262144", "²", "٣"]
)


def _damaged(example: str, index: int, value: str) -> str:
    spots = list(NUMBER.finditer(example))
    if index >= len(spots):
        return example
    spot = spots[index]
    return example[: spot.start()] + value + example[spot.end() :]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from(EXAMPLES), st.integers(0, 12), DAMAGE), min_size=1, max_size=12
    )
)
def test_damaged_numbers(parts: list[tuple[str, int, str]]) -> None:
    text = "\n".join(_damaged(*part) for part in parts)
    try:
        explanation = explain_log(text)
    except UsageError:
        return
    assert list(lines_of(explanation, verbose=True))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=400))
def test_any_text(text: str) -> None:
    try:
        explain_log(text)
    except UsageError as error:
        assert str(error)


def test_a_kv_dtype_that_the_planner_does_not_know() -> None:
    text = (
        "INFO [core.py:109] Initializing a V1 LLM engine (v0.27.1) with config: "
        "model='Qwen/Qwen3.6-27B', kv_cache_dtype=turbo3, tensor_parallel_size=1\n"
        "GPU KV cache size: 53,312 tokens\n"
        "Maximum concurrency for 32,768 tokens per request: 1.63x\n"
    )
    explanation = explain_log(text)
    assert explanation.fitted == ()
    assert "turbo3" in explanation.inference_note
