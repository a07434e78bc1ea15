"""The removed TensorRT-LLM engine path, rewritten for trtllm-serve and its configuration file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from hullspeed.launch.oldcommand import OldCommand

Fault = tuple[str, str, str]  # flags, why, fix


def rewrite_trt(commands: list[OldCommand]) -> tuple[str, str, list[Fault]]:
    """``trtllm-serve`` command, its YAML, and what was never valid in the old commands."""
    options: dict[str, str] = {}
    for command in commands:
        options |= dict(_options(command.arguments))
    model = options.get("--model_dir", "MODEL")
    config = _config(options)
    text = yaml.safe_dump(config, sort_keys=True) if config else "{}\n"
    return f"trtllm-serve {model} --config serve.yaml", text, list(_faults(options))


def _options(arguments: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    words = list(arguments)
    while words:
        name, joined, value = words.pop(0).partition("=")
        if not joined and words and not words[0].startswith("-"):
            value = words.pop(0)
        yield name, value


def _config(options: dict[str, str]) -> dict[str, Any]:
    """The old build options that still have a meaning, in the PyTorch backend's words."""
    config: dict[str, Any] = {}
    for old, new in (
        ("--max_batch_size", "max_batch_size"),
        ("--max_seq_len", "max_seq_len"),
        ("--max_num_tokens", "max_num_tokens"),
        ("--max_beam_width", "max_beam_width"),
    ):
        if options.get(old, "").isdigit():
            config[new] = int(options[old])
    cache: dict[str, Any] = {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.9}
    if options.get("--tokens_per_block", "").isdigit():
        cache["tokens_per_block"] = int(options["--tokens_per_block"])
    if any(name in options for name in ("--fp8_kv_cache", "--int8_kv_cache")):
        cache["dtype"] = "fp8"
    config["kv_cache_config"] = cache
    if options.get("--dtype"):
        config["dtype"] = options["--dtype"]
    for name in ("--tp_size", "--tensor_parallel_size"):
        if options.get(name, "").isdigit():
            config["tensor_parallel_size"] = int(options[name])
    return config


def _faults(options: dict[str, str]) -> Iterator[Fault]:
    if options.get("--gpt_attention_plugin") == "fp8":
        yield (
            "--gpt_attention_plugin fp8",
            "the attention plugin took a 16- or 32-bit type; fp8 was chosen by the checkpoint and"
            " the KV type",
            "take an FP8 checkpoint (its config says so) and kv_cache_config.dtype: fp8",
        )
    if "--fp8_gemm" in options:
        yield (
            "--fp8_gemm",
            "the converter had no such option; FP8 weights came from quantize.py or from an FP8"
            " checkpoint",
            "take an FP8 checkpoint, such as the model's own -FP8 release",
        )
    if "--max_input_len" in options and "--max_seq_len" in options:
        yield (
            "--max_input_len",
            "the length of the prompt alone is no limit any more; max_seq_len bounds prompt and"
            " output together, max_num_tokens the tokens of a step",
            "leave it out",
        )
    if "--paged_kv_cache" in options:
        yield (
            "--paged_kv_cache",
            "the cache is always paged",
            "leave it out; kv_cache_config.tokens_per_block sets the page",
        )
