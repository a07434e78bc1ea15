"""Prefix-cache policies on the agent trace of the field report, 27B hybrid, one byte budget."""

from __future__ import annotations

import pytest

from hullspeed.arch import catalogue
from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf.roofline import Roofline
from hullspeed.twin.agents import AgentLoad, agent_sessions
from hullspeed.twin.cache_rows import CacheRow, by_name, cache_engine, cache_row
from hullspeed.units import GIB, MIB

ARCH = catalogue.load("Qwen/Qwen3.6-27B-FP8")
COST = Roofline(ARCH, find_gpu("h100-sxm"))


def rows(seed: int, budget_gib: float, *names: str) -> dict[tuple[str, str], CacheRow]:
    workload = agent_sessions(AgentLoad(seed=seed))
    chosen = by_name(ARCH, names)
    found = [cache_row(ARCH, COST, workload, policy, budget_gib) for policy in chosen]
    return {(row.policy, row.state_dtype): row for row in found}


def test_bytes_are_the_models() -> None:
    (policy,) = [p for p in by_name(ARCH, ["segment"]) if p.name == "segment"
                 and p.state_dtype == "int8"]  # fmt: skip
    engine = cache_engine(ARCH, policy, 8 * GIB)
    assert engine.page_bytes == 4 * MIB
    assert engine.state_bytes == pytest.approx(39.4 * MIB, rel=0.02)
    assert engine.shared_bytes == 8 * GIB
    with pytest.raises(UsageError, match="not even one sequence"):
        cache_engine(ARCH, policy, 50 * MIB)
    with pytest.raises(UsageError, match="no such cache policy"):
        by_name(ARCH, ["magic"])


def test_segment_hits_at_8_gib_where_block_aligned_states_do_not() -> None:
    workload = agent_sessions(AgentLoad())
    found = {
        policy.name: cache_row(ARCH, COST, workload, policy, 8)
        for policy in by_name(ARCH, ["segment", "align", "prompt_end"])
        if policy.state_dtype == "int8"
    }
    best = found["segment"]
    assert best.hit_rate >= 0.76
    assert best.refused == 0
    for name in ("align", "prompt_end"):
        assert found[name].hit_rate < best.hit_rate - 0.1


@pytest.mark.deep
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_bars_hold_for_several_seeds(seed: int) -> None:
    small, large = rows(seed, 8), rows(seed, 24)
    # The trace is as hard as the field report's: what a dense model would reach on it.
    assert small["KV only (no state needed), lru", "-"].hit_rate == pytest.approx(0.832, abs=0.03)
    assert large["KV only (no state needed), lru", "-"].hit_rate == pytest.approx(0.912, abs=0.02)
    assert small["segment", "int8"].hit_rate >= 0.76
    assert large["segment", "int8"].hit_rate >= 0.90
    for table in (small, large):
        best = table["segment", "int8"].hit_rate
        assert all(table[p, "fp32"].hit_rate < best for p in ("align", "prompt_end", "lru"))
