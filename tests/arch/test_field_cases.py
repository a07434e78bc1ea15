"""Public field cases P01 to P05: what calculators get wrong about the cache."""

from __future__ import annotations

from hullspeed.arch import catalogue
from hullspeed.units import GIB, MIB


def test_p01_hybrid_counts_only_its_full_attention_layers() -> None:
    """Qwen3.6-27B at 262,144 tokens: 16,384 MiB of KV in 16 layers, and 598.5 MiB of state for
    four sequences where the convolution's history is kept in fp32 too.
    """
    arch = catalogue.load("Qwen/Qwen3.6-27B")
    assert arch.kv_bytes(262_144, "bf16") == 16_384 * MIB
    assert 4 * arch.state_bytes("fp32", "fp32") / MIB == 598.5
    attending = [layer for layer in arch.layers if layer.mixer.kv_bytes(1, "bf16")]
    assert len(attending) == 16


def test_p02_sliding_layers_hold_only_their_window() -> None:
    """Gemma-3-27B at 131,072 tokens: 10.41 GiB, not 81.4."""
    arch = catalogue.load("google/gemma-3-27b-it")
    assert round(arch.kv_bytes(131_072, "bf16") / GIB, 2) == 10.41
    unbounded = sum(2 * 16 * 128 * 2 * 131_072 for _ in arch.layers)
    assert arch.kv_bytes(131_072, "bf16") < unbounded / 5


def test_p03_latent_attention_keeps_one_vector() -> None:
    """DeepSeek-V3.1 at 163,840 tokens: 10.72 GiB."""
    arch = catalogue.load("deepseek-ai/DeepSeek-V3.1")
    assert round(arch.kv_bytes(163_840, "bf16") / GIB, 2) == 10.72
    assert arch.kv_bytes_per_token("bf16") == 61 * (512 + 64) * 2


def test_p04_head_dim_is_a_field() -> None:
    """Qwen3-0.6B at 40,960 tokens: 4.38 GiB; hidden / heads would give half."""
    arch = catalogue.load("Qwen/Qwen3-0.6B")
    assert round(arch.kv_bytes(40_960, "bf16") / GIB, 3) == 4.375
    assert arch.hidden // 16 == 64


def test_p05_alternate_sliding_layers_are_bounded_not_left_out() -> None:
    """gpt-oss-20b: 12 full layers grow, 12 sliding ones stop at 128 tokens."""
    arch = catalogue.load("openai/gpt-oss-20b")
    per_layer = 2 * 8 * 64 * 2
    assert arch.kv_bytes(131_072, "bf16") == 12 * per_layer * (131_072 + 128)
    assert arch.kv_bytes(100, "bf16") == 24 * per_layer * 100
    assert arch.kv_bytes_per_token("bf16") == 12 * per_layer
