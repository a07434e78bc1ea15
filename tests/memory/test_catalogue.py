"""Every model of the catalogue through every planner, and the known errors of calculators."""

from __future__ import annotations

import pytest

from hullspeed.arch import catalogue
from hullspeed.arch.quant import weight_breakdown
from hullspeed.errors import UnsupportedModelError
from hullspeed.memory.allocators import ENGINES, allocator, plan_memory
from hullspeed.memory.budget import EngineSettings, GpuMemory, WeightBytes
from hullspeed.memory.layers import bytes_per_sequence, cache_layers, state_dtype_of
from hullspeed.units import GIB, MIB

GPU = GpuMemory(name="H200", total_bytes=140 * GIB, compute_capability=(9, 0))


@pytest.mark.parametrize("name", catalogue.names())
def test_every_model_on_every_engine(name: str) -> None:
    """A plan exists, never promises less memory than the bytes a request has, and grows with it."""
    arch = catalogue.load(name)
    for engine in ENGINES:
        settings = EngineSettings(engine=engine, kv_dtype="bf16", max_num_seqs=8)
        try:
            pool = allocator(engine).pool(arch, GPU, settings, 60 * GIB)
        except UnsupportedModelError:
            assert engine == "transformers"
            assert arch.state_bytes("fp32", "bf16")
            continue
        state = state_dtype_of(arch, None, default="fp32")
        layers = cache_layers(arch, kv_dtype="bf16", state_dtype=state)
        sizes = [pool.bytes_per_request(n) for n in (1, 1000, 8000)]
        assert sizes == sorted(sizes)
        if engine != "vllm" or state != "fp32":
            assert sizes[2] >= bytes_per_sequence(layers, 8000) * 0.999
        assert pool.served_concurrency(4096) >= 1
        assert pool.max_context_tokens(1) >= pool.max_context_tokens(8)
        assert pool.notes is not None


def _kv_gib(name: str, context: int, dtype: str = "bf16") -> float:
    layers = cache_layers(catalogue.load(name), kv_dtype=dtype, state_dtype="fp32")
    return bytes_per_sequence(layers, context) / GIB


def test_p01_only_full_attention_layers_count() -> None:
    """Qwen3.6-27B at 262,144: 16,384 MiB in 16 layers, and 146.8 MiB of state per sequence."""
    layers = cache_layers(catalogue.load("Qwen/Qwen3.6-27B"), kv_dtype="bf16", state_dtype="fp32")
    state = sum(layer.state_bytes for layer in layers)
    assert state == 153_944_064
    assert bytes_per_sequence(layers, 262_144) - state == 16_384 * MIB


def test_p02_sliding_layers_hold_their_window() -> None:
    """Gemma-3-27B at 131,072: 10.4 GiB where a calculator says 81."""
    assert _kv_gib("google/gemma-3-27b-it", 131_072) == pytest.approx(10.4, abs=0.1)


def test_p03_latent_attention() -> None:
    """DeepSeek-V3.1 at 163,840: 10.7 GiB of compressed keys, on every rank whole."""
    assert _kv_gib("deepseek-ai/DeepSeek-V3.1", 163_840) == pytest.approx(10.7, abs=0.1)
    arch = catalogue.load("deepseek-ai/DeepSeek-V3.1")
    whole, eighth = (
        cache_layers(arch, kv_dtype="bf16", state_dtype="fp32", tp=tp) for tp in (1, 8)
    )
    assert bytes_per_sequence(whole, 1000) == bytes_per_sequence(eighth, 1000)


def test_p04_head_dim_is_a_field() -> None:
    """Qwen3-0.6B: 114,688 bytes a token, twice what hidden / heads gives."""
    assert _kv_gib("Qwen/Qwen3-0.6B", 1) * GIB == 114_688


def test_p05_alternate_layers_are_bounded_not_left_out() -> None:
    """gpt-oss-20b at 131,072: 12 full layers of 256 MiB and 12 windows of 128 tokens."""
    full, window = 12 * 131_072 * 2048, 12 * 128 * 2048
    assert _kv_gib("openai/gpt-oss-20b", 131_072) * GIB == full + window


def test_seed_arithmetic() -> None:
    """256 KiB and 128 KiB per token are Qwen3-32B's shape; the hybrid 27B has 64 KiB, and 23.3 GiB
    of that are 381,700 tokens; eleven sessions of 32k by division, about ten by blocks.
    """
    assert _kv_gib("Qwen/Qwen3-32B", 1) * GIB == 256 * 1024
    assert _kv_gib("Qwen/Qwen3-32B", 1, "fp8") * GIB == 128 * 1024
    arch = catalogue.load("Qwen/Qwen3.6-27B")
    assert arch.kv_bytes_per_token("bf16") == 64 * 1024
    pool_bytes = round(23.3 * GIB)
    assert pool_bytes // (64 * 1024) == pytest.approx(381_700, abs=100)
    assert pool_bytes // (64 * 1024) // 32_768 == 11
    settings = EngineSettings(version="0.28.0", max_model_len=32_768)
    pool = allocator("vllm").pool(arch, GPU, settings, pool_bytes)
    assert pool.concurrency(32_768) == pytest.approx(10.1, abs=0.1)
    assert pool.served_concurrency(32_768) < 11


def test_a40_holds_the_27b_in_fp8() -> None:
    """Seed 001 moves to an A100 for 128k; a field report runs 262,144 on an A40 with FP8 weights
    and keys, drafts and text only.
    """
    arch = catalogue.load("Qwen/Qwen3.8-27B-FP8")
    parts = weight_breakdown(arch)
    weights = WeightBytes(
        decoder=sum(v for k, v in parts.items() if k not in ("mtp", "vision")),
        mtp=parts["mtp"],
        vision=parts["vision"],
    )
    a40 = GpuMemory(name="A40", total_bytes=round(44.4 * GIB), compute_capability=(8, 6))
    for context, drafts in ((32_768, 0), (131_072, 0), (262_144, 2)):
        settings = EngineSettings(
            version="0.28.0",
            kv_dtype="fp8",
            language_model_only=True,
            max_model_len=context,
            draft_tokens=drafts,
        )
        plan = plan_memory(arch, a40, settings, weights)
        assert plan.fits, context
        assert plan.low.served_concurrency(context) >= 1
