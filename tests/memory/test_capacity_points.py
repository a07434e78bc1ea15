"""Every public capacity row, reproduced from what the row itself states, or listed with a reason.

Rows are numbered as in ``tests/data/kv_capacity_points.csv`` (0 is the first). What a row does not
state (prefix caching, draft depth) is given here as settings; block sizes, bytes and blocks are
never given: the planner must find them.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hullspeed.arch.model import ModelArch
from hullspeed.memory.budget import EngineSettings, GpuMemory, Term, WeightBytes
from hullspeed.memory.drafters import with_dflash
from hullspeed.memory.sglang import SglangAllocator
from hullspeed.memory.vllm import VllmAllocator
from hullspeed.memory.vllm_pool import VllmPool
from hullspeed.units import GIB

CSV = Path(__file__).parents[1] / "data" / "kv_capacity_points.csv"
with CSV.open(encoding="utf-8") as _file:
    ROWS = list(csv.DictReader(_file))

CAPABILITY = {"RTX 5090": (12, 0), "RTX 3090": (8, 6), "H100 80GB": (9, 0)}

DFLASH = {"tp": 2, "prefix_caching": True, "draft_tokens": 7, "max_num_batched_tokens": 16384}

# row: (architecture, settings); `tokens` rows state 'GPU KV cache size' and concurrency
TOKENS: dict[int, tuple[str, dict[str, Any]]] = {
    0: ("qwen3.5-27b", {"kv_dtype": "fp8", "prefix_caching": True}),
    1: ("qwen3.5-27b", {"kv_dtype": "fp8", "prefix_caching": True}),
    2: ("qwen3.5-27b", {"kv_dtype": "fp8", "prefix_caching": True}),
    3: ("qwen3.5-27b", {"kv_dtype": "fp8", "prefix_caching": True, "draft_tokens": 3}),
    4: ("qwen3.5-27b", {"tp": 2, "prefix_caching": True}),
    5: ("qwen3.5-27b", {"tp": 2, "kv_dtype": "fp8", "prefix_caching": True}),
    6: ("qwen3.5-27b", {"tp": 2, "kv_dtype": "fp8_e4m3", "prefix_caching": True}),
    8: (
        "qwen3.5-27b",
        {"tp": 2, "kv_dtype": "fp8_e5m2", "prefix_caching": True, "draft_tokens": 3},
    ),
    9: (
        "qwen3.5-27b",
        {"tp": 2, "kv_dtype": "fp8_e5m2", "prefix_caching": True, "draft_tokens": 3},
    ),
    10: ("qwen3.5-27b", {"tp": 2, "kv_dtype": "fp8", "prefix_caching": True, "draft_tokens": 3}),
    11: ("qwen3.5-27b", {"tp": 2, "kv_dtype": "fp8", "prefix_caching": True, "draft_tokens": 4}),
    12: ("qwen3.6-35b-a3b", {"kv_dtype": "fp8", "prefix_caching": True}),
    # an external DFlash drafter: five sliding layers of 2,048 tokens (memory/drafters.py); seven
    # drafts and 16,384 batched tokens are common to the three rows
    14: ("qwen3.5-27b+dflash", {**DFLASH, "kv_dtype": "fp8"}),
    15: ("qwen3.5-27b+dflash", DFLASH),
    16: ("qwen3.5-27b+dflash", DFLASH),
    # the row's own note calls it ambiguous: k = 2 at 0.28 (no 64 rule yet) fits without a guess
    17: ("qwen3.5-27b", {"tp": 2, "prefix_caching": True, "draft_tokens": 2}),
    18: ("qwen3.5-27b", {"kv_dtype": "fp8", "state_dtype": "bfloat16", "prefix_caching": True}),
    34: ("llama-3.1-8b", {}),
    35: ("llama-3.1-8b", {}),
    36: ("qwen3-0.6b", {}),
    37: ("qwen3-8b", {}),
    38: ("qwen3-235b", {"tp": 4}),
}
# Old releases print blocks // groups x block; they lie before the checked range and are asked for
# as extrapolations.
OLD = {34: "0.6.0", 35: "0.6.0", 36: "0.10.2", 37: "0.21.0", 38: "0.8.5"}
NEAREST = {"nightly Aug 2026": "0.27.1", "Aug 2026": "0.27.1", "~0.22": "0.22.0"}

# start-up errors: row -> (architecture, settings, needed GiB, longest context or None)
NEEDED: dict[int, tuple[str, dict[str, Any], float, int | None]] = {
    7: (
        "qwen3.5-27b",
        {
            "kv_dtype": "fp8", "state_dtype": "bfloat16", "draft_tokens": 2,
            "prefix_caching": True, "max_model_len": 65536, "version": "0.27.1",
        },
        2.45,
        None,
    ),
    31: (
        "qwen3.5-27b",
        {
            "state_dtype": "bfloat16", "draft_tokens": 4, "prefix_caching": True,
            "max_model_len": 65536, "version": "0.27.1",
        },
        4.76,
        15984,
    ),
}  # fmt: skip

# rows that state a block count in 'max_num_seqs exceeds available Mamba cache blocks'
BLOCKS: dict[int, tuple[str, dict[str, Any], int, float | None]] = {
    20: ("qwen3.5-27b", {"version": "0.28.0", "max_model_len": 132000}, 969, None),
    21: ("qwen3.5-27b", {"version": "0.27.1"}, 939, None),
    22: ("qwen3.5-27b", {"version": "0.27.1"}, 1011, None),
    23: ("qwen3.5-27b", {"version": "0.27.1"}, 556, None),
    24: ("qwen3.5-27b", {"version": "0.23.0"}, 856, None),
    26: (
        "qwen3.6-35b-a3b",
        {"version": "0.25.1", "kv_dtype": "fp8", "max_model_len": 131072, "max_num_seqs": 256},
        95,
        1.44,
    ),
}

NOT_REPRODUCED = {
    19: "sizing boot with an external drafter: states overheads, no pool of ours",
    25: "600 blocks, but the model variant and its TP are not stated",
    27: "states GiB without tokens: used for the overhead model only",
    28: "states GiB without tokens: used for the overhead model only",
    29: "states GiB without tokens: used for the overhead model only",
    30: "XPU fork with blocks of 64/128 tokens: not this planner",
    32: "model not stated (thread excerpt): only the utilization identity holds, tested below",
    33: "other model class, no GiB stated: graph estimate anecdote",
    42: "model not stated: only max_running_requests = slots // 5 is testable",
}
ELSEWHERE = {13, 32, 39, 40, 41, 42}


def _version(row: int) -> str:
    text = ROWS[row]["version"]
    return OLD.get(row) or NEAREST.get(text, text)


def _gpu(row: int) -> GpuMemory:
    name = ROWS[row]["gpu"]
    total = float(ROWS[row]["vram_gib"] or 80)
    return GpuMemory(
        name=name,
        total_bytes=round(total * GIB),
        compute_capability=CAPABILITY.get(name, (0, 0)),
    )


def _pool(arch: ModelArch, row: int, settings: EngineSettings, pool_bytes: int) -> VllmPool:
    return VllmAllocator(extrapolate=True).pool(arch, _gpu(row), settings, pool_bytes)


def _settings(row: int, extra: dict[str, Any]) -> EngineSettings:
    return EngineSettings(
        version=_version(row), max_model_len=int(ROWS[row]["max_model_len"]), **extra
    )


@pytest.fixture(scope="session")
def arch_of(shapes: Callable[[str], ModelArch]) -> Callable[[str], ModelArch]:
    def build(name: str) -> ModelArch:
        if name.endswith("+dflash"):
            return with_dflash(shapes(name.removesuffix("+dflash")))
        if name != "qwen3-235b":
            return shapes(name)
        base = shapes("qwen3-32b")
        mixer: Any = dataclasses.replace(base.layers[0].mixer, q_heads=64, kv_heads=4)  # type: ignore[type-var]
        layer = dataclasses.replace(base.layers[0], mixer=mixer)
        return dataclasses.replace(base, layers=(layer,) * 94)

    return build


def test_every_row_is_accounted_for() -> None:
    named = set(TOKENS) | set(NEEDED) | set(BLOCKS) | set(NOT_REPRODUCED) | ELSEWHERE
    assert named == set(range(len(ROWS)))
    assert not set(TOKENS) & set(NOT_REPRODUCED)


@pytest.mark.parametrize("row", TOKENS)
def test_tokens_and_concurrency_to_the_token(row: int, arch_of: Callable[[str], ModelArch]) -> None:
    """From the printed GiB (two decimals: a few blocks either way) where there is one, else from
    an integer block count; both printed numbers must come out exactly.
    """
    name, extra = TOKENS[row]
    arch, settings = arch_of(name), _settings(row, extra)
    tokens = int(ROWS[row]["reported_kv_tokens"])
    concurrency = float(ROWS[row]["reported_max_concurrency"])
    base = _pool(arch, row, settings, 1 << 40)
    unit = base.bytes_per_block
    gib = ROWS[row]["reported_kv_gib"]
    if gib:
        low, high = ((float(gib) + d) * GIB for d in (-0.005, 0.005))
        counts = range(int(low // unit), int(high // unit) + 1)
    else:
        counts = range(1, 45000)
    pools = (dataclasses.replace(base, pool_bytes=n * unit) for n in counts)
    exact = [pool for pool in pools if pool.printed_tokens == tokens]
    assert exact
    pool = exact[0]
    # an old release rounds tokens down to blocks before dividing
    assert pool.printed_concurrency == pytest.approx(concurrency, abs=0.0051)


@pytest.mark.parametrize("row", NEEDED)
def test_start_up_refusals(row: int, arch_of: Callable[[str], ModelArch]) -> None:
    name, extra, needed, longest = NEEDED[row]
    available = float(ROWS[row]["reported_kv_gib"])
    pool = _pool(arch_of(name), row, EngineSettings(**extra), round(available * GIB))
    assert round(pool.needed_bytes / GIB, 2) == needed
    assert "MEM001" in {finding.code for finding in pool.findings}
    if longest is not None:
        # this release plans without the null block
        low = (pool.blocks - pool.blocks_per_request(1) + 1) * pool.block_tokens
        assert low == longest


@pytest.mark.parametrize("row", BLOCKS)
def test_mamba_block_errors(row: int, arch_of: Callable[[str], ModelArch]) -> None:
    name, extra, blocks, concurrency = BLOCKS[row]
    arch, settings = arch_of(name), EngineSettings(**extra)
    unit = _pool(arch, row, settings, 1 << 40).bytes_per_block
    pool = _pool(arch, row, settings, blocks * unit + unit // 2)
    assert pool.max_num_seqs == blocks
    (finding,) = (f for f in pool.findings if f.code == "MEM002")
    assert finding.fix == f"--max-num-seqs {blocks}"
    if "49 MiB/block" in ROWS[row]["notes"]:
        assert unit == 49 << 20
    if concurrency is not None:
        assert round(pool.printed_concurrency, 2) == concurrency


def test_row_13_is_the_pool_formula() -> None:
    """28.88 - 15.03 - 1.59 = 12.26 GiB: requested, consumed, peak with the graph estimate."""
    gpu = _gpu(13)
    settings = EngineSettings(version="0.27.1", memory_fraction=0.92)
    requested = VllmAllocator().requested_bytes(gpu, settings) / GIB
    assert round(requested, 2) == 28.89 or round(requested - 0.005, 2) == 28.88
    assert round(28.88 - 15.03 - 1.59, 2) == float(ROWS[13]["reported_kv_gib"])


def test_row_32_utilization_identity() -> None:
    """A graph estimate of 0.36 GiB turns 0.82 into an effective 0.8048 of a 23.7 GiB card."""
    total = 0.36 / (0.82 - 0.8048)
    assert 23.3 < total < 24.1


def test_row_39_sglang_bytes_per_token(arch_of: Callable[[str], ModelArch]) -> None:
    """367,404 tokens of Qwen3-235B at TP4 are 16.46 GB of K and V (8.23 each)."""
    gpu = _gpu(39)
    settings = EngineSettings(engine="sglang", version="0.5.0", tp=4)
    pool = SglangAllocator(extrapolate=True).pool(
        arch_of("qwen3-235b"), gpu, settings, round(16.468 * GIB)
    )
    assert pool.bytes_per_token == 48128
    assert int(ROWS[39]["reported_kv_tokens"]) * 48128 / GIB == pytest.approx(16.46, abs=0.01)


def test_row_40_slots_against_tokens(arch_of: Callable[[str], ModelArch]) -> None:
    """K 21 -> 10 turns 158,116 tokens into 182,901: eleven slots of 2,253.2 tokens."""
    gpu = _gpu(40)
    base = EngineSettings(
        engine="sglang", version="0.5.20", tp=2, kv_dtype="fp8_e4m3", state_dtype="bfloat16",
        draft_tokens=4, max_num_seqs=1,
    )  # fmt: skip
    arch, allocator = arch_of("qwen3.5-27b"), SglangAllocator()
    shapes = allocator.cells(arch, base)
    assert (shapes.slot_bytes, shapes.token_bytes) == (39_223_296, 17_408)
    few, many = (
        allocator.pool(arch, gpu, dataclasses.replace(base, mamba_slots=k), 8 * GIB)
        for k in (21, 10)
    )
    assert many.printed_tokens - few.printed_tokens == pytest.approx(182_901 - 158_116, abs=1)


def test_row_41_and_42_slots_per_request(arch_of: Callable[[str], ModelArch]) -> None:
    """429 slots cap running requests at 85 under extra_buffer; 33 requests are 165 to 169 slots."""
    gpu = GpuMemory(name="any", total_bytes=200 * GIB)
    arch = arch_of("qwen3.5-27b")
    for slots, running in ((429, 85), (165, 33), (169, 33)):
        settings = EngineSettings(
            engine="sglang", mamba_slots=slots, radix_strategy="extra_buffer", max_num_seqs=1024
        )
        pool = SglangAllocator().pool(arch, gpu, settings, 120 * GIB)
        assert pool.max_running_requests == running


# --- rows that state only GPU and flags: the pool from an overhead model ------------------------
# Weights as loaded, GiB: (decoder, MTP, vision, replicated). FP8 and BF16 are exact; the NVFP4
# size is the checkpoint on disk; 15.27 is 8.19 G parameters in 16 bit.
WEIGHTS = {
    "fp8": (27.49, 0.40, 0.858, 0.10),
    "bf16": (50.10, 0.791, 0.858, 0.02),
    "nvfp4": (22.92, 0.79, 0.858, 0.02),
    "nvfp4-unsloth": (20.42, 0.79, 0.858, 0.02),  # 10.64 GiB a rank, as the row states
    "8b": (15.27, 0.0, 0.0, 0.0),
}
# row: (architecture, weights, settings, (blocks, bytes per block) or GiB)
EAGER = {"version": "0.26.1", "enforce_eager": True}
POOLS: dict[int, tuple[str, str, dict[str, Any], float]] = {
    0: ("qwen3.5-27b", "nvfp4", EAGER, 75 * 49 / 1024),
    1: ("qwen3.5-27b", "nvfp4", {**EAGER, "language_model_only": True}, 112 * 49 / 1024),
    2: (
        "qwen3.5-27b",
        "nvfp4",
        {**EAGER, "language_model_only": True, "max_num_seqs": 8},
        126 * 49 / 1024,
    ),
    4: ("qwen3.5-27b", "fp8", {"version": "0.26.1", "tp": 2}, 491 * 24.5 / 1024),
    5: ("qwen3.5-27b", "nvfp4-unsloth", {"version": "0.26.1", "tp": 2}, 611 * 24.5 / 1024),
    6: (
        "qwen3.5-27b",
        "fp8",
        {
            "version": "0.27.1", "tp": 2, "memory_fraction": 0.92, "max_num_seqs": 2,
            "max_num_batched_tokens": 8192,
        },
        4.99,
    ),
    10: ("qwen3.5-27b", "fp8", {"version": "0.27.1", "tp": 2, "draft_tokens": 3}, 12.52),
    13: ("qwen3.5-27b", "fp8", {"version": "0.27.1", "tp": 2, "memory_fraction": 0.92}, 12.26),
    21: ("qwen3.5-27b", "fp8", {"version": "0.27.1", "memory_fraction": 0.92}, 939 * 49 / 1024),
    22: ("qwen3.5-27b", "nvfp4", {"version": "0.27.1", "memory_fraction": 0.92}, 1011 * 49 / 1024),
    23: ("qwen3.5-27b", "bf16", {"version": "0.27.1", "memory_fraction": 0.95}, 556 * 49 / 1024),
    24: ("qwen3.5-27b", "fp8", {"version": "0.22.0", "memory_fraction": 0.95}, 856 * 49 / 1024),
    37: (
        "qwen3-8b",
        "8b",
        {"version": "0.21.0", "memory_fraction": 0.9764, "max_model_len": 16384},
        6.37,
    ),
}  # fmt: skip


def _predicted(row: int, arch: ModelArch) -> tuple[float, float, float, float]:
    _, weights, extra, actual = POOLS[row]
    decoder, mtp, vision, replicated = (round(v * GIB) for v in WEIGHTS[weights])
    loaded = WeightBytes(decoder=decoder, mtp=mtp, vision=vision, replicated=replicated)
    quant = "none" if weights in ("bf16", "8b") else weights
    gpu = _gpu(row)
    if row == 37:  # "24 GB": the log's two utilizations give 23.53 GiB
        gpu = dataclasses.replace(gpu, total_bytes=round(23.53 * GIB))
    stack = VllmAllocator().stack(
        dataclasses.replace(arch, quant=quant), gpu, EngineSettings(**extra), loaded
    )
    low, high = stack.pool_interval
    return stack.bytes_of(Term.SEQUENCE_STATE) / GIB, low / GIB, high / GIB, actual


def test_pools_from_gpu_and_flags(arch_of: Callable[[str], ModelArch]) -> None:
    """Median error within 6 %, and the 90 % interval covers at least nine of ten."""
    results = [_predicted(row, arch_of(POOLS[row][0])) for row in POOLS]
    errors = [abs(value / actual - 1) for value, _, _, actual in results]
    covered = [low <= actual <= high for _, low, high, actual in results]
    assert statistics.median(errors) <= 0.06
    assert sum(covered) >= 0.9 * len(covered)
    # an interval as wide as the pool would cover everything and say nothing
    widths = [(high - low) / actual for _, low, high, actual in results]
    assert statistics.median(widths) < 0.35
