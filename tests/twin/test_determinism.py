"""The same seed gives the same bytes: across hash seeds, runs and Python versions."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import hullspeed
from hullspeed.twin.agents import AgentLoad, agent_sessions
from hullspeed.twin.arrivals import Arrivals
from hullspeed.twin.engine import EngineModel
from hullspeed.twin.generate import open_loop
from hullspeed.twin.lengths import Lengths
from hullspeed.twin.player import play
from hullspeed.twin.summary import Objective, summarize

SIMULATE = ["simulate", "Qwen/Qwen3.6-27B-FP8", "--gpu", "h100-sxm", "--json"]
COMMANDS = (
    [*SIMULATE, "--requests", "40", "--rate", "3", "--isl-sigma", "0.5", "--shared-prefix", "900",
     "--prefixes", "3"],
    [*SIMULATE, "--requests", "20", "--rate", "4", "--workers", "1", "--sweep",
     "gpu=h100-sxm,a40", "engine=vllm,sglang"],
    [*SIMULATE, "--agents", "3", "--compare-cache", "--cache-budget", "4GiB"],
)  # fmt: skip
GOLDEN = "db71f15335e620ab"


class _Linear:
    """A step of a size has the same cost for ever, unlike a fitted one."""

    def seconds(self, shapes: list[tuple[int, int, bool]]) -> float:
        return 0.005 + sum(1e-5 * n + 1e-8 * n * past for n, past, *_ in shapes)


def digest() -> str:
    gamma = Arrivals(rate=4.0, kind="gamma", cv=2.0)
    isl, osl = (Lengths(tokens=n, kind="lognormal", sigma=0.5, most=4_000) for n in (600, 60))
    workloads = [
        open_loop(isl, osl, gamma, requests=80, shared_tokens=200, n_shared=3, seed=5),
        agent_sessions(AgentLoad(sessions=6, over_s=60.0, seed=5)),
    ]
    found = []
    for slots in (0, 40):
        engine = EngineModel(
            n_pages=3_000, page_tokens=16, max_running=12, step_tokens=512,
            max_context_tokens=32_768, state_slots=slots, stored_slots=slots // 4,
        )  # fmt: skip
        for workload in workloads:
            played = play(engine, _Linear(), workload)  # type: ignore[arg-type]
            found.append(summarize(played, Objective(ttft_s=0.5), usd_per_hour=3.0))
    return hashlib.sha256(msgspec.json.encode(found)).hexdigest()[:16]


def test_the_bytes_are_the_committed_ones() -> None:
    """A change here is a change of the scheduler, the cache or the drawing of workloads."""
    assert digest() == GOLDEN


def output(python: str, hash_seed: str, arguments: list[str]) -> bytes:
    source = str(Path(hullspeed.__file__).parents[1])
    found = subprocess.run(
        [python, "-m", "hullspeed", *arguments],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": source},
        capture_output=True, check=True,
    )  # fmt: skip
    assert found.stdout
    return found.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_hash_seeds_change_nothing(command: list[str]) -> None:
    assert output(sys.executable, "0", command) == output(sys.executable, "77", command)


@pytest.mark.deep
@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_python_versions_change_nothing(minor: int) -> None:
    """Every interpreter of ``HULLSPEED_TEST_PYTHONS`` (paths, by ``:``) or of the path that has
    the dependencies.
    """
    paths = os.environ.get("HULLSPEED_TEST_PYTHONS", "").split(":")
    named = [path for path in paths if path and _version(path) == minor]
    python = named[0] if named else shutil.which(f"python3.{minor}")
    if python is None or _version(python) != minor:
        pytest.skip(f"no Python 3.{minor} with the dependencies")
    for command in COMMANDS:
        assert output(python, "1", command) == output(sys.executable, "0", command)


def _version(python: str) -> int | None:
    """The minor version of an interpreter that has the dependencies."""
    code = "import sys, cyclopts, msgspec, numpy, pydantic; print(sys.version_info.minor)"
    found = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True)
    return int(found.stdout) if found.returncode == 0 else None
