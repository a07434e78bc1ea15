"""Versions: which version of an engine is launched unless another is named, and its image."""

from __future__ import annotations

from hullspeed.errors import UsageError
from hullspeed.launch.flagtable import FlagTable

# Registry names of the official images. Source: each project's installation page.
_IMAGES = {
    "vllm": "vllm/vllm-openai:v{version}",
    "sglang": "lmsysorg/sglang:v{version}",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:{version}",
    "transformers": "huggingface/transformers-pytorch-gpu:{version}",
}


def newest(engine: str) -> str:
    """The newest version whose flags are known.

    Raises:
        UsageError: for an engine without a flag table.
    """
    if engine == "trtllm":
        return "1.2.1"  # the newest stable release; the table reaches to a release candidate
    return FlagTable(engine).checked[-1]


def image_name(engine: str, version: str) -> str:
    """The official image of one version.

    Raises:
        UsageError: for an engine without one.
    """
    if engine not in _IMAGES:
        raise UsageError("no image for this engine", seen=engine, fix=f"use {', '.join(_IMAGES)}")
    return _IMAGES[engine].format(version=version)
