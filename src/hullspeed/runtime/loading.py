"""load_engine: from a configuration to an engine that takes requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hullspeed.arch.load import load_arch
from hullspeed.arch.model import ModelArch
from hullspeed.clock import MonotonicClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.errors import UsageError
from hullspeed.hardware.machine import detect_machine
from hullspeed.memory.held import held_dtype
from hullspeed.memory.ours import held_weights
from hullspeed.memory.ours_room import Room
from hullspeed.models.decoder import Decoder
from hullspeed.models.load import load_decoder
from hullspeed.models.support import skipped_parts
from hullspeed.runtime.config import EngineConfig, served_name
from hullspeed.runtime.executor import TorchExecutor
from hullspeed.runtime.messages import ModelInfo
from hullspeed.runtime.room import plan_room
from hullspeed.runtime.sampler import Sampler
from hullspeed.runtime.warmup import warm_up
from hullspeed.sources.files import ModelFiles
from hullspeed.sources.resolve import resolve
from hullspeed.text.model_text import ModelText, read_model_text

Progress = Callable[[str, float], None]
"""Told of the stage and of its share done, 0 to 1."""


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
    dtype = held_dtype(arch, config.weight_dtype, machine.isa)
    progress("weights", 0.0)
    decoder = load_decoder(
        files.weights,
        arch,
        kernels=config.kernels,
        weight_dtype=config.weight_dtype,
        threads=threads,
        max_context_tokens=context_tokens,
        draft=config.draft == "mtp",
        progress=lambda share: progress("weights", share),
    )
    progress("weights", 1.0)
    room = plan_room(config, arch, context_tokens, detect_machine().available_bytes)
    decoder.allocate_kv(
        room.n_pages, config.page_tokens, config.kv_dtype, n_window_pages=room.n_window_pages
    )
    if config.state_store == "fp32":
        decoder.allocate_states(room.n_state_slots)
    else:
        decoder.allocate_states(room.n_state_slots, room.n_stored_slots, config.state_store)
    progress("warm-up", 0.0)
    warm_up(decoder)
    loop = _loop(config, decoder, arch, text, context_tokens, room)
    weights = held_weights(arch, dtype)
    info = ModelInfo(
        name=config.served_name or served_name(config.model),
        family=arch.family,
        vocab=arch.vocab,
        max_context_tokens=min(context_tokens, room.n_pages * config.page_tokens),
        eos_token_ids=loop.limits.eos_token_ids,
        param_count=arch.param_count(extras=False),
        weight_bytes=weights.decoder + (weights.mtp if config.draft == "mtp" else 0),
        kv_bytes_per_token=room.page_bytes // config.page_tokens,
        page_tokens=config.page_tokens,
        n_pages=room.n_pages,
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        threads=threads,
        kernels=config.kernels,
        weight_dtype=config.weight_dtype,
        n_state_slots=room.n_state_slots + room.n_stored_slots,
        state_bytes=room.state_bytes,
        n_window_pages=room.n_window_pages,
        window_page_bytes=room.window_page_bytes,
        window_tokens=room.window_tokens,
        skipped=skipped_parts(arch, draft=config.draft == "mtp"),
    )
    return LoadedEngine(loop, info, text)


def _loop(
    config: EngineConfig,
    decoder: Decoder,
    arch: ModelArch,
    text: ModelText,
    context_tokens: int,
    room: Room,
) -> EngineLoop:
    scheduler = build_scheduler(
        n_pages=decoder.n_pages,
        page_tokens=config.page_tokens,
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        max_context_tokens=context_tokens,
        n_state_slots=room.n_state_slots,
        n_stored_slots=room.n_stored_slots,
        n_window_pages=room.n_window_pages,
        window_tokens=room.window_tokens,
        page_bytes=room.page_bytes,
        state_bytes=room.stored_bytes or room.state_bytes,
        window_page_bytes=room.window_page_bytes,
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
