"""load_engine: from a configuration to an engine that takes requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import hullspeed.kernels  # noqa: F401 # before torch: it bounds how long idle threads spin
from hullspeed.arch.load import load_arch
from hullspeed.arch.model import ModelArch
from hullspeed.clock import MonotonicClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.errors import CapacityError, UsageError
from hullspeed.hardware.machine import detect_machine
from hullspeed.models.decoder import Decoder
from hullspeed.models.load import load_decoder
from hullspeed.runtime.config import EngineConfig, served_name
from hullspeed.runtime.executor import TorchExecutor
from hullspeed.runtime.messages import ModelInfo
from hullspeed.runtime.sampler import Sampler
from hullspeed.runtime.warmup import warm_up
from hullspeed.sources.files import ModelFiles
from hullspeed.sources.resolve import resolve
from hullspeed.text.model_text import ModelText, read_model_text
from hullspeed.units import format_bytes

Progress = Callable[[str, float], None]
"""Told of the stage and of its share done, 0 to 1."""

_KV_DTYPE = "fp32"  # what both back ends keep


def silent(stage: str, share: float) -> None:
    """A progress that tells nobody."""


class LoadedEngine(NamedTuple):
    """An engine and what is known of its model."""

    loop: EngineLoop
    info: ModelInfo
    text: ModelText


def load_engine(config: EngineConfig, progress: Progress = silent) -> LoadedEngine:
    """Fetch, read and pack the model, size and allocate the KV cache, warm up.

    ``progress`` is told of files that are fetched, then of "weights" and "warm-up".

    Raises:
        ModelError: the model cannot be found, read or run.
        CapacityError: not even one context fits.
        UsageError: a knob that cannot be.
    """

    def fetched(task: str, done_bytes: int, total_bytes: int | None) -> None:
        progress(task, done_bytes / total_bytes if total_bytes else 0.0)

    files = resolve(config.model, fetched)
    arch = load_arch(files)
    text = read_model_text(text_path(files))
    return build_engine(config, files, arch, text, progress)


def build_engine(
    config: EngineConfig, files: ModelFiles, arch: ModelArch, text: ModelText, progress: Progress
) -> LoadedEngine:
    """The rest of :func:`load_engine`, from files that are here and read."""
    machine = detect_machine()
    threads = config.threads or machine.cores
    context_tokens = _context_tokens(config, arch)
    progress("weights", 0.0)
    decoder = load_decoder(
        files.weights,
        arch,
        kernels=config.kernels,
        weight_dtype=config.weight_dtype,
        threads=threads,
        max_context_tokens=context_tokens,
    )
    progress("weights", 1.0)
    page_bytes = arch.kv_bytes_per_token(_KV_DTYPE) * config.page_tokens
    n_pages = page_count(
        config, context_tokens, page_bytes, available_bytes=detect_machine().available_bytes
    )
    decoder.allocate_kv(n_pages, config.page_tokens)
    progress("warm-up", 0.0)
    warm_up(decoder)
    loop = _loop(config, decoder, arch, text, context_tokens, page_bytes)
    info = ModelInfo(
        name=config.served_name or served_name(config.model),
        family=arch.family,
        vocab=arch.vocab,
        max_context_tokens=min(context_tokens, n_pages * config.page_tokens),
        eos_token_ids=loop.limits.eos_token_ids,
        param_count=arch.param_count(extras=False),
        weight_bytes=sum(path.stat().st_size for path in files.weights),
        kv_bytes_per_token=arch.kv_bytes_per_token(_KV_DTYPE),
        page_tokens=config.page_tokens,
        n_pages=n_pages,
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        threads=threads,
        kernels=config.kernels,
        weight_dtype=config.weight_dtype,
    )
    return LoadedEngine(loop, info, text)


def _loop(
    config: EngineConfig,
    decoder: Decoder,
    arch: ModelArch,
    text: ModelText,
    context_tokens: int,
    page_bytes: int,
) -> EngineLoop:
    scheduler = build_scheduler(
        n_pages=decoder.n_pages,
        page_tokens=config.page_tokens,
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        max_context_tokens=context_tokens,
        page_bytes=page_bytes,
        cache=config.cache,
        eviction=config.eviction,
        flops=lambda n_tokens, start: arch.flops(n_tokens, start, 0),
    )
    limits = Limits(
        vocab=arch.vocab,
        max_context_tokens=context_tokens,
        eos_token_ids=tuple(dict.fromkeys((*arch.eos_token_ids, *text.eos_token_ids))),
    )
    executor = TorchExecutor(decoder, Sampler(arch.vocab))
    return EngineLoop(scheduler, executor, MonotonicClock(), limits)


def page_count(
    config: EngineConfig, context_tokens: int, page_bytes: int, *, available_bytes: int
) -> int:
    """Pages of the KV cache: what the budget buys, at most ``max_running`` full contexts.

    The budget is ``config.kv_budget_bytes`` or half of ``available_bytes``, the memory that is
    free with the weights loaded.

    Raises:
        CapacityError: the budget does not hold one context.
    """
    budget = config.kv_budget_bytes
    context_pages = -(-context_tokens // config.page_tokens)
    affordable = (available_bytes // 2 if budget is None else budget) // page_bytes
    if affordable < context_pages:
        context_bytes = context_pages * page_bytes
        raise CapacityError(
            f"the KV cache does not hold one context of {context_tokens} tokens "
            f"({format_bytes(context_bytes)})",
            seen=format_bytes(affordable * page_bytes),
            fix="raise kv_budget_bytes, or lower max_context_tokens",
        )
    if budget is not None:
        return affordable
    return min(affordable, config.max_running * context_pages)


def text_path(files: ModelFiles) -> Path:
    """Where the model's text side is: the GGUF file, or the folder."""
    return files.weights[0] if files.kind == "gguf" else files.root


def _context_tokens(config: EngineConfig, arch: ModelArch) -> int:
    for name in ("threads", "page_tokens", "max_running", "step_tokens", "max_context_tokens"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1", seen=value)
    asked = config.max_context_tokens
    if asked is not None and asked > arch.max_context_tokens:
        raise UsageError(
            "max_context_tokens is beyond what the model was made for",
            seen=asked,
            fix=f"use at most {arch.max_context_tokens}",
        )
    return asked or arch.max_context_tokens
