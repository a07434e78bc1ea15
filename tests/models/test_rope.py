"""Rotary frequencies against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hullspeed.arch.model import Rope
from hullspeed.errors import CorruptFileError, UnsupportedModelError
from hullspeed.models.rope import frequencies, rotary_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "scaling", [{}, {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3]
)
def test_tables_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    parameters = {"rope_type": "default", "rope_theta": 500_000.0, **scaling}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=parameters
    )
    oracle = LlamaRotaryEmbedding(config)
    cos, sin = oracle(torch.zeros(1), torch.arange(2000)[None])
    table = rotary_table(Rope(theta=500_000.0, scaling=tuple(scaling.items())), 128, 2000)
    torch.testing.assert_close(table.cos, cos[0, :, :64], atol=1e-6, rtol=0)
    torch.testing.assert_close(table.sin, sin[0, :, :64], atol=1e-6, rtol=0)


def test_other_scalings_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="longrope"):
        frequencies(Rope(theta=1e4, scaling=(("rope_type", "longrope"), ("factor", 4.0))), 64)


@pytest.mark.parametrize("factor", [None, 0, -1.0, "8", True])
def test_a_scaling_without_its_numbers_is_refused(factor: object) -> None:
    with pytest.raises(UnsupportedModelError, match="factor"):
        frequencies(Rope(theta=1e4, scaling=(("rope_type", "linear"), ("factor", factor))), 64)


def test_factors_of_another_size_are_refused() -> None:
    with pytest.raises(CorruptFileError, match="32 numbers"):
        rotary_table(Rope(theta=1e4), 64, 8, torch.ones(16))
