"""Families that the decoder runs, by name; free of torch, so that the gate can ask."""

from __future__ import annotations

DENSE = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES = (
    *DENSE, "qwen3_moe", "mixtral", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma3", "gpt_oss",
)  # fmt: skip
