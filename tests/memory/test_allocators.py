"""Every allocator: terms add up, knobs mean what each engine means, bad input is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UnsupportedModelError, UsageError
from hullspeed.memory.allocators import (
    ENGINES,
    allocator,
    budget_of,
    plan_memory,
    translate,
    with_starting_seqs,
)
from hullspeed.memory.budget import EngineSettings, GpuMemory, Term, WeightBytes
from hullspeed.memory.layers import bytes_per_sequence, cache_layers
from hullspeed.memory.ours import held_weights
from hullspeed.memory.profile import engine_profile, parse_version
from hullspeed.units import GIB, MIB
from support.patience import calls_of

Shapes = Callable[[str], ModelArch]
H100 = GpuMemory(name="H100 SXM", total_bytes=round(79.2 * GIB), compute_capability=(9, 0))
FP8 = WeightBytes(decoder=round(27.49 * GIB), mtp=round(0.4 * GIB), vision=round(0.858 * GIB))


@pytest.mark.parametrize("engine", ENGINES)
def test_terms_add_up_to_the_gpu(engine: str, shapes: Shapes) -> None:
    plan = plan_memory(shapes("qwen3-8b"), H100, EngineSettings(engine=engine), FP8)
    total = sum(plan.stack.bytes_of(term) for term in Term) + plan.stack.free_bytes
    assert total == H100.total_bytes
    assert abs(plan.stack.free_bytes) <= 1
    assert plan.fits
    low, high = plan.stack.pool_interval
    assert low <= plan.stack.pool_bytes <= high


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_goes_below_the_exact_bytes(engine: str, shapes: Shapes) -> None:
    arch = shapes("qwen3-8b")
    settings = EngineSettings(engine=engine, kv_dtype="bf16")
    pool = allocator(engine).pool(arch, H100, settings, 20 * GIB)
    layers = cache_layers(arch, kv_dtype="bf16", state_dtype="fp32")
    for context in (1, 100, 4097, 32768):
        assert pool.bytes_per_request(context) >= bytes_per_sequence(layers, context)
    for n in (1, 4, 16):
        longest = pool.max_context_tokens(n)
        assert pool.served_concurrency(longest) >= n
        assert pool.served_concurrency(longest * 2) < max(2 * n, n + 1)


def test_the_same_share_means_three_things(shapes: Shapes) -> None:
    """0.9 of total with everything in it, 0.9 of total for weights and pools only, 0.9 of what is
    free after loading: three pools for one number (vllm-project/vllm#21348 is this confusion).
    """
    arch = shapes("qwen3-8b")
    pools = [
        plan_memory(arch, H100, EngineSettings(engine=e, memory_fraction=0.9), FP8).stack.pool_bytes
        for e in ("vllm", "sglang", "trtllm")
    ]
    assert pools[0] < pools[1] < pools[2]


def test_one_budget_becomes_each_engines_knobs(shapes: Shapes) -> None:
    arch = shapes("qwen3.5-27b")
    settings = EngineSettings(version="0.28.0", max_model_len=32768)
    plan = plan_memory(arch, H100, settings, FP8)
    knobs = translate(budget_of(plan, H100, 32768))
    assert knobs["vllm"]["--kv-cache-memory-bytes"] == str(plan.stack.pool_bytes)
    assert int(knobs["vllm"]["--max-num-seqs"]) == plan.starting_num_seqs
    msf = float(knobs["sglang"]["--mem-fraction-static"])
    weights = plan.stack.bytes_of(Term.WEIGHTS)
    assert msf * H100.total_bytes == pytest.approx(weights + plan.stack.pool_bytes, rel=0.005)
    share = float(knobs["trtllm"]["kv_cache_config.free_gpu_memory_fraction"])
    free = H100.total_bytes - weights - plan.stack.bytes_of(Term.RUNTIME)
    assert share * free == pytest.approx(plan.stack.pool_bytes, rel=0.005)


def test_defaults_that_do_not_start_are_found_and_repaired(shapes: Shapes) -> None:
    """S01, S02: 1,024 sequences against 856 blocks on an H100 with FP8 weights."""
    arch = dataclasses.replace(shapes("qwen3.5-27b"), quant="fp8_block")
    settings = EngineSettings(version="0.23.0", memory_fraction=0.95)
    plan = plan_memory(arch, H100, settings, FP8)
    assert "MEM002" in {finding.code for finding in plan.pool.findings}
    assert plan.pool.max_num_seqs == pytest.approx(856, rel=0.03)
    repaired = with_starting_seqs(plan)
    assert repaired.max_num_seqs == plan.starting_num_seqs
    again = plan_memory(arch, H100, repaired, FP8)
    assert "MEM002" not in {finding.code for finding in again.low.findings}


def test_scratch_of_the_gated_delta_rule_is_reserved(shapes: Shapes) -> None:
    """S06: an RTX 5090 at 0.93 with 8,192 batched tokens starts and dies on a 6k prompt."""
    gpu = GpuMemory(name="RTX 5090", total_bytes=round(31.4 * GIB), compute_capability=(12, 0))
    int4 = WeightBytes(decoder=15 * GIB, vision=round(0.858 * GIB))
    codes = {}
    for chunk, share in ((8192, 0.985), (2048, 0.93)):
        settings = EngineSettings(
            version="0.28.0", memory_fraction=share, max_num_batched_tokens=chunk
        )
        stack = plan_memory(shapes("qwen3.5-27b"), gpu, settings, int4).stack
        scratch = next(i for i in stack.items if i.name == "GDN prefill scratch")
        assert scratch.bytes == 72 * 1024 * chunk
        codes[chunk] = {finding.code for finding in stack.findings}
    assert "MEM005" in codes[8192]
    assert "MEM005" not in codes[2048]


def test_s31_capture_needs_room_outside_the_pool(shapes: Shapes) -> None:
    """An RTX 5090 dies in graph capture (784 MiB); utilization does not help, eager mode does."""
    gpu = GpuMemory(
        name="RTX 5090",
        total_bytes=round(31.4 * GIB),
        compute_capability=(12, 0),
        baseline_bytes=GIB,
    )
    nvfp4 = WeightBytes(decoder=round(22.92 * GIB), vision=round(0.858 * GIB))
    seen = {}
    for share, eager in ((0.92, False), (0.97, False), (0.97, True), (0.85, False)):
        settings = EngineSettings(
            version="0.20.0", memory_fraction=share, enforce_eager=eager, language_model_only=True
        )
        stack = plan_memory(shapes("qwen3.5-27b"), gpu, settings, nvfp4).stack
        seen[share, eager] = "MEM008" in {finding.code for finding in stack.findings}
    assert seen == {
        (0.92, False): False,
        (0.97, False): True,
        (0.97, True): False,
        (0.85, False): False,
    }


def test_drafts_with_prefix_caching_on_a_hybrid_are_an_error(shapes: Shapes) -> None:
    """S08: default prefix caching since 0.28 makes the official MTP recipe the dangerous one."""
    arch = shapes("qwen3.5-27b")
    for version, caching, expected in (
        ("0.27.1", None, False), ("0.28.0", None, True), ("0.28.0", False, False),
        ("0.27.1", True, True),
    ):  # fmt: skip
        settings = EngineSettings(version=version, draft_tokens=3, prefix_caching=caching)
        codes = {f.code for f in plan_memory(arch, H100, settings, FP8).stack.findings}
        assert ("MEM007" in codes) is expected


def test_prefix_checkpoints_lower_what_is_served(shapes: Shapes) -> None:
    """P12: the line says 2.02 x 262,144, two 200k prompts preempt each other; a large
    --mamba-block-size gives the room back.
    """
    gpu = GpuMemory(name="RTX 3090", total_bytes=round(23.56 * GIB), compute_capability=(8, 6))
    settings = EngineSettings(
        version="0.27.1", tp=2, kv_dtype="fp8", draft_tokens=4, prefix_caching=True,
        max_model_len=262144,
    )  # fmt: skip
    vllm = allocator("vllm")
    pool = vllm.pool(shapes("qwen3.5-27b"), gpu, settings, 366 * 28131328)
    assert round(pool.printed_concurrency, 2) == 2.02
    assert pool.served_concurrency(200_000) == 1
    large = dataclasses.replace(settings, mamba_block_tokens=8192)
    pool = vllm.pool(shapes("qwen3.5-27b"), gpu, large, 366 * 28131328)
    assert pool.served_concurrency(200_000) == 2


def test_sglang_defaults_on_an_h100(shapes: Shapes) -> None:
    """Facts: msf about 0.83, 0.767 with the vision tower; about 19 running requests with FP8
    weights, about 10 with four draft tokens.
    """
    sglang = allocator("sglang")
    arch = shapes("qwen3.5-27b")
    settings = EngineSettings(engine="sglang", kv_dtype="fp8")
    fraction = sglang.static_fraction(arch, H100, settings, vision=False)  # type: ignore[attr-defined]
    assert fraction == pytest.approx(0.83, abs=0.01)
    seen = sglang.static_fraction(arch, H100, settings, vision=True)  # type: ignore[attr-defined]
    assert seen == pytest.approx(0.767, abs=0.01)
    plan = plan_memory(arch, H100, settings, FP8)
    assert plan.pool.max_num_seqs == pytest.approx(19, abs=3)
    drafted = dataclasses.replace(settings, draft_tokens=4)
    assert plan_memory(arch, H100, drafted, FP8).pool.max_num_seqs == pytest.approx(10, abs=3)


def test_sglang_strategies_and_windows(shapes: Shapes) -> None:
    sglang = allocator("sglang")
    arch = shapes("qwen3.5-27b")
    running = {}
    for strategy in ("no_buffer", "extra_buffer", "extra_buffer_lazy"):
        settings = EngineSettings(engine="sglang", mamba_slots=60, radix_strategy=strategy)
        running[strategy] = sglang.pool(arch, H100, settings, 30 * GIB).max_num_seqs
    assert running == {"no_buffer": 20, "extra_buffer": 12, "extra_buffer_lazy": 15}
    off = EngineSettings(engine="sglang", mamba_slots=60, prefix_caching=False)
    assert sglang.pool(arch, H100, off, 30 * GIB).max_num_seqs == 60
    with pytest.raises(UsageError, match="strategy"):
        bad = EngineSettings(engine="sglang", radix_strategy="lru")
        sglang.pool(arch, H100, bad, GIB)
    window = sglang.pool(shapes("gpt-oss-20b"), H100, EngineSettings(engine="sglang"), 10 * GIB)
    # 12 full layers and 0.8 x 12 sliding ones, 2,048 bytes a token and layer
    assert window.printed_tokens == int(10 * GIB / (12 * 2048 * 1.8))


def test_transformers_refuses_hybrids(shapes: Shapes) -> None:
    settings = EngineSettings(engine="transformers")
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        plan_memory(shapes("qwen3.5-27b"), H100, settings, FP8)


def test_trtllm_marks_hybrids_experimental(shapes: Shapes) -> None:
    plan = plan_memory(shapes("qwen3.5-27b"), H100, EngineSettings(engine="trtllm"), FP8)
    assert "MEM021" in {finding.code for finding in plan.stack.findings}


def test_the_embedded_engine_counts_its_own_copies(shapes: Shapes) -> None:
    arch = shapes("qwen3-0.6b")
    half, full = held_weights(arch), held_weights(arch, "fp32")
    assert half.decoder < full.decoder < 2 * half.decoder
    tied = dataclasses.replace(arch, tied_embeddings=True)
    assert held_weights(tied).decoder == half.decoder  # one tensor, two copies
    machine = GpuMemory(name="this machine", total_bytes=24 * GIB, baseline_bytes=2 * GIB)
    settings = EngineSettings(engine="hullspeed", max_model_len=4096)
    plan = plan_memory(arch, machine, settings, half)
    per_request = plan.pool.bytes_per_request(4096)
    assert per_request == 28 * 4096 * 2 * 8 * 128 * 4  # fp32 on a CPU
    assert plan.stack.pool_bytes <= 64 * per_request
    assert plan.pool.hit_granularity_tokens == 1  # the segment tree copies the last page
    with pytest.raises(UsageError, match="one machine"):
        plan_memory(arch, machine, EngineSettings(engine="hullspeed", tp=2), half)
    with pytest.raises(UsageError, match="fp16 or fp32"):
        held_weights(arch, "int3")


def test_the_embedded_engine_counts_a_draft_layer_only_when_it_drafts(shapes: Shapes) -> None:
    arch = shapes("qwen3.5-27b")
    weights = held_weights(arch)
    layer = 2 * sum(t.elements for t in arch.extras[0].tensors if len(t.shape) == 2)
    assert weights.mtp == pytest.approx(layer, rel=1e-3)
    machine = GpuMemory(name="this machine", total_bytes=256 * GIB, baseline_bytes=2 * GIB)
    plans = [
        plan_memory(
            arch,
            machine,
            EngineSettings(engine="hullspeed", max_model_len=4096, draft_tokens=n),
            weights,
        )
        for n in (0, 1)
    ]
    held = [
        sum(item.bytes for item in plan.stack.items if item.term is Term.WEIGHTS) for plan in plans
    ]
    assert held == [weights.decoder, weights.decoder + weights.mtp]
    per_token = [
        plan.pool.bytes_per_request(4096) - plan.pool.bytes_per_request(2048) for plan in plans
    ]
    assert per_token[1] * 16 == per_token[0] * 17  # 16 layers of attention, and the draft's


@pytest.mark.parametrize(
    "bad",
    [
        {"max_model_len": -1},
        {"max_num_seqs": 0},
        {"draft_tokens": -2},
        {"memory_fraction": 1.2},
        {"memory_fraction": 0.0},
        {"tp": 0},
        {"kv_cache_bytes": -5},
    ],
)
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        EngineSettings(**bad)  # type: ignore[arg-type]


def test_bad_gpus_dtypes_and_engines_are_refused(shapes: Shapes) -> None:
    with pytest.raises(UsageError):
        GpuMemory(name="none", total_bytes=0)
    with pytest.raises(UsageError):
        GpuMemory(name="x", total_bytes=GIB, baseline_bytes=-1)
    with pytest.raises(UsageError, match="unknown engine"):
        allocator("llama.cpp")
    arch = shapes("qwen3.5-27b")
    with pytest.raises(UsageError, match="no KV cache type"):
        allocator("vllm").pool(arch, H100, EngineSettings(kv_dtype="fp9"), GIB)
    with pytest.raises(UsageError, match="negative"):
        allocator("vllm").pool(arch, H100, EngineSettings(), -1)
    with pytest.raises(UsageError, match="multi-token-prediction"):
        allocator("vllm").pool(shapes("qwen3-8b"), H100, EngineSettings(draft_tokens=2), GIB)
    gone = EngineSettings(version="0.33.0", extra={"mamba_cache_mode": "align"})
    with pytest.raises(UsageError, match="gone"):
        allocator("vllm").pool(arch, H100, gone, GIB)


def test_versions(shapes: Shapes) -> None:
    assert parse_version("0.26.1rc1.dev608+g99a10304d") == (0, 26, 1)
    for text in ("nightly", "", "latest"):
        with pytest.raises(UsageError):
            parse_version(text)
    with pytest.raises(UsageError, match="older"):
        engine_profile("vllm", "0.8.5")
    newer = engine_profile("vllm", "0.40.0")
    assert newer.extrapolated
    plan = plan_memory(shapes("qwen3-8b"), H100, EngineSettings(version="0.40.0"), FP8)
    assert "MEM006" in {finding.code for finding in plan.stack.findings}
    assert engine_profile("vllm", "0.19.1").rule("default_utilization") == 0.90
    assert engine_profile("vllm", "0.20.0").rule("default_utilization") == 0.92


def test_gpu_class_defaults(shapes: Shapes) -> None:
    """A100 takes the small defaults in spite of its 80 GB."""
    arch = shapes("qwen3.5-27b")
    asked = {}
    for name, gib in (("H100 SXM", 79.2), ("A100 80GB SXM", 79.2), ("B200", 178.0), ("L40S", 44.4)):
        gpu = GpuMemory(name=name, total_bytes=round(gib * GIB))
        asked[name] = allocator("vllm").pool(arch, gpu, EngineSettings(), GIB)
    seqs = {name: pool.asked_num_seqs for name, pool in asked.items()}  # type: ignore[attr-defined]
    assert seqs == {"H100 SXM": 1024, "A100 80GB SXM": 256, "B200": 1024, "L40S": 256}


def test_packed_and_scaled_kv(shapes: Shapes) -> None:
    arch = shapes("qwen3-8b")
    per_token = {
        dtype: sum(
            layer.token_bytes for layer in cache_layers(arch, kv_dtype=dtype, state_dtype="fp32")
        )
        for dtype in ("bf16", "fp8", "int8_per_token_head", "nvfp4")
    }
    assert per_token["bf16"] == 147456
    assert per_token["int8_per_token_head"] == per_token["fp8"] + 36 * 2 * 8 * 4
    assert per_token["nvfp4"] == per_token["fp8"] * 9 / 16


def test_a_plan_is_fast(shapes: Shapes) -> None:
    """10,000 configurations have 30 s, 3 ms each: of memory, a core's calls in half of one."""
    arch, settings = shapes("qwen3.5-27b"), EngineSettings(version="0.28.0", max_num_seqs=64)
    plan_memory(arch, H100, settings, FP8)
    assert calls_of(lambda: plan_memory(arch, H100, settings, FP8)) < 6_000
    assert MIB == 1 << 20
