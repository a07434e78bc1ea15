"""On the same trace with the same results, the engine and its twin plan the same steps.

The engine is loaded from files and computes with torch; the twin gets its memory from the sizing
that ``simulate`` uses, and never sees the model.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from hullspeed.arch.load import load_arch
from hullspeed.arch.model import ModelArch
from hullspeed.clock import VirtualClock
from hullspeed.core.request import Request
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.step import Step, StepResult
from hullspeed.errors import CapacityError
from hullspeed.memory.budget import EngineSettings, GpuMemory, WeightBytes
from hullspeed.runtime.config import EngineConfig
from hullspeed.runtime.loading import LoadedEngine, load_engine
from hullspeed.runtime.room import plan_room
from hullspeed.sources.files import from_folder
from hullspeed.text.checkpoints import raw_checkpoints
from hullspeed.twin.engine import EngineModel
from hullspeed.twin.scheduler import TwinScheduler
from hullspeed.twin.setup import engine_model
from support.families import write_family

from .tiny import VOCAB, write_checkpoint, write_tokenizer

CONTEXT = 256
RUNNING = 4
STEP_TOKENS = 24
PAGE_TOKENS = 16
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
WINDOWED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("llama", {}, {}),
    "dense, hashes of pages": ("llama", {}, {"cache": "hash"}),
    "dense, int8 pages": ("llama", {}, {"kv_dtype": "int8"}),
    "hybrid": ("qwen3_5", HYBRID, {}),
    "hybrid, density": ("qwen3_5", HYBRID, {"eviction": "density"}),
    "hybrid, int8 states": ("qwen3_5", HYBRID, {"state_store": "int8"}),
    "hybrid, bf16 states": ("qwen3_5", HYBRID, {"state_store": "bf16", "state_share": 0.2}),
    "hybrid, aligned states": ("qwen3_5", HYBRID, {"cache": "align"}),
    "windows": ("gemma3", WINDOWED, {}),
    "windows, a small share": ("gemma3", WINDOWED, {"state_share": 0.1}),
    "windows, hashes of pages": ("gemma3", WINDOWED, {"cache": "hash"}),
    "experts": ("qwen3_moe", {"num_hidden_layers": 2}, {}),
    "hybrid, experts": ("qwen3_5_moe", HYBRID, {}),
}


class Asked(NamedTuple):
    """A request, the step before which it comes, and the one before which its client leaves."""

    step: int
    prompt: list[int]
    max_tokens: int
    priority: int
    leaves: int


def trace(seed: int) -> list[Asked]:
    """Branches of two conversations, some in bursts."""
    rng = random.Random(seed)
    roots = [[rng.randrange(VOCAB) for _ in range(150)] for _ in range(2)]
    asked, step = [], 0
    for i in range(22):
        step += rng.choice([0, 0, 3, 11])
        prompt = rng.choice(roots)[: rng.randint(20, 150)]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        leaves = step + rng.randint(0, 20) if i in (5, 11, 16) else 10**9
        asked.append(Asked(step, prompt, rng.randint(2, 60), rng.choice([0, 0, 0, 1]), leaves))
    return asked


def least_budget(config: EngineConfig, arch: ModelArch) -> int:
    """A little above the least with which the engine starts, so that memory is scarce."""
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high) // 2
        try:
            plan_room(replaced(config, middle), arch, CONTEXT, 0)
            high = middle
        except CapacityError:
            low = middle + 1
    return low + low // 8


def replaced(config: EngineConfig, budget: int) -> EngineConfig:
    return msgspec.structs.replace(config, kv_budget_bytes=budget)


def twin_of(config: EngineConfig, arch: ModelArch) -> EngineModel:
    """As ``simulate`` sets it up."""
    settings = EngineSettings(
        engine="hullspeed",
        max_model_len=CONTEXT,
        max_num_seqs=config.max_running,
        max_num_batched_tokens=config.step_tokens,
        block_tokens=config.page_tokens,
        kv_dtype=config.kv_dtype,
        state_dtype=config.state_store,
        state_share=config.state_share,
        kv_cache_bytes=config.kv_budget_bytes,
    )
    return engine_model(
        arch,
        GpuMemory(name="this machine", total_bytes=1 << 36),
        settings,
        WeightBytes(decoder=1 << 20),
        typical_tokens=CONTEXT,
        cache=config.cache,
        eviction=config.eviction,
    )


def played(engine: LoadedEngine, asked: list[Asked]) -> tuple[list[object], dict[int, list[int]]]:
    """What the engine planned step by step, and what each request was answered."""
    loop, clock = engine.loop, VirtualClock()
    keys: list[object] = []
    loop.clock = clock
    execute = loop.executor.execute

    def recorded(step: Step) -> StepResult:
        keys.append(step.key())
        result = execute(step)
        clock.advance(1.0)
        return result

    loop.executor.execute = recorded  # type: ignore[method-assign]
    sequences = {}
    n_steps = 0
    while n_steps <= asked[-1].step or loop.has_work:
        for i, request in enumerate(asked):
            if request.step == n_steps:
                params = SamplingParams(
                    temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True
                )
                sequences[i] = loop.add(
                    i, request.prompt, params, priority=request.priority,
                    checkpoints=raw_checkpoints(len(request.prompt)),
                )  # fmt: skip
            if request.leaves == n_steps:
                loop.cancel(i)
        loop.step()
        if len(keys) == n_steps:  # nothing to do
            clock.advance(1.0)
            keys.append(None)
        loop.scheduler.check_integrity()
        n_steps += 1
    return keys, {i: sequence.output for i, sequence in sequences.items()}


def replayed(
    twin: TwinScheduler, asked: list[Asked], said: dict[int, list[int]], n_steps: int
) -> list[object]:
    """What the twin plans where every token comes out the same."""
    keys: list[object] = []
    for now in range(n_steps):
        for i, request in enumerate(asked):
            if request.step == now:
                twin.filler[i] = said[i]
                twin.add(
                    Request(
                        id=i,
                        prompt=tuple(request.prompt),
                        sampling=SamplingParams(temperature=0.0, ignore_eos=True),
                        max_tokens=request.max_tokens,
                        priority=request.priority,
                        arrival_s=float(now),
                        checkpoints=raw_checkpoints(len(request.prompt)),
                    )
                )
            if request.leaves == now:
                twin.cancel(i)
        step = twin.schedule(float(now))
        keys.append(twin.key(step) if step else None)
        if step:
            twin.commit(step, StepResult([]), float(now + 1))
        twin.check_integrity()
    return keys


@pytest.mark.parametrize("name", CASES)
def test_the_twin_plans_the_engines_steps(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    family, changes, options = CASES[name]
    if family == "llama":
        write_checkpoint(tmp_path, family)
    else:
        write_family(tmp_path, family, vocab_size=VOCAB, **changes)
    write_tokenizer(tmp_path)
    arch = load_arch(from_folder(tmp_path, source=str(tmp_path)))
    config = EngineConfig(
        model=str(tmp_path), weight_dtype="fp32", kernels="ref", threads=1, max_running=RUNNING,
        step_tokens=STEP_TOKENS, page_tokens=PAGE_TOKENS, max_context_tokens=CONTEXT, **options,
    )  # fmt: skip
    config = replaced(config, least_budget(config, arch))
    engine, model = load_engine(config), twin_of(config, arch)
    info = engine.info
    assert (model.n_pages, model.page_tokens) == (info.n_pages, info.page_tokens)
    assert model.page_bytes == info.kv_bytes_per_token * info.page_tokens
    assert model.state_slots + model.stored_slots == info.n_state_slots
    assert (model.n_window_pages, model.window_tokens) == (info.n_window_pages, info.window_tokens)
    assert (model.max_running, model.step_tokens) == (info.max_running, info.step_tokens)
    asked = trace(len(name))
    keys, said = played(engine, asked)
    twin = model.scheduler()
    assert replayed(twin, asked, said, len(keys)) == keys
    assert twin.counters == engine.loop.scheduler.counters
    assert twin.cache.stats() == engine.loop.scheduler.cache.stats()
    assert twin.counters.preemptions > 0, "the trace is too easy"
    if name != "hybrid, aligned states":  # blocks of 784 tokens are longer than these prompts
        assert twin.counters.cached_tokens > 0, "the trace shares too little"
