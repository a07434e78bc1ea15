"""Tiny models of all families in the engine loop, with transformers' greedy output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hullspeed.arch.load import load_arch
from hullspeed.clock import MonotonicClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.request import Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.models.decoder import Decoder
from hullspeed.models.load import load_decoder
from hullspeed.models.stored_states import StoredDtype
from hullspeed.runtime.executor import TorchExecutor
from hullspeed.runtime.sampler import Sampler
from hullspeed.sources.files import from_folder
from hullspeed.text.checkpoints import raw_checkpoints
from support.families import VOCAB, write_family

PAGE_TOKENS = 16
N_PAGES = 96
N_SLOTS = 40


@dataclass
class HybridCase:
    """A model as we run it, and transformers' module of the same file.

    Attributes:
        other: The same decoder with memory of its own, for runs without a cache.
    """

    decoder: Decoder
    module: Any
    other: Decoder

    def loop(
        self,
        *,
        step_tokens: int,
        max_running: int,
        n_pages: int = N_PAGES,
        n_slots: int = N_SLOTS,
        cache: str = "segment",
        eviction: str = "lru",
        n_stored: int = 0,
        stored: StoredDtype = "int8",
    ) -> EngineLoop:
        """A fresh scheduler and cache over whatever pages and states hold."""
        if n_stored:
            self.decoder.allocate_states(n_slots, n_stored, stored)
        arch, recurrent = self.decoder.arch, self.decoder.is_recurrent
        scheduler = build_scheduler(
            n_pages=n_pages,
            page_tokens=PAGE_TOKENS,
            max_running=max_running,
            step_tokens=step_tokens,
            max_context_tokens=arch.max_context_tokens,
            n_state_slots=n_slots if recurrent else 0,
            n_stored_slots=n_stored,
            page_bytes=4096,
            state_bytes=20_000 if recurrent else 0,
            cache=cache,
            eviction=eviction,
            flops=lambda n_tokens, start: arch.flops(n_tokens, start, 0),
        )
        executor = TorchExecutor(self.decoder, Sampler(arch.vocab))
        limits = Limits(vocab=arch.vocab, max_context_tokens=arch.max_context_tokens)
        return EngineLoop(scheduler, executor, MonotonicClock(), limits)

    def uncached(self, prompt: list[int], n_output: int) -> list[int]:
        """Output of ``prompt`` alone, in one piece, without a cache."""
        case = HybridCase(self.other, self.module, self.other)
        loop = case.loop(step_tokens=10_000, max_running=1, cache="none")
        return run(loop, [prompt], n_output)[0].output


def hybrid_case(folder: Path, family: str, **changes: Any) -> HybridCase:
    """Through the files that transformers writes."""
    module = write_family(folder, family, **changes)
    files = from_folder(folder, source=str(folder))
    decoders = [load_decoder(files.weights, load_arch(files), weight_dtype="fp32") for _ in "ab"]
    for decoder in decoders:
        decoder.allocate_kv(N_PAGES, PAGE_TOKENS)
        decoder.allocate_states(N_SLOTS)
    return HybridCase(decoders[0], module, decoders[1])


def random_prompt(n_tokens: int, seed: int) -> list[int]:
    """Token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (n_tokens,), generator=generator).tolist()


def run(
    loop: EngineLoop,
    prompts: list[list[int]],
    n_output: int,
    checkpoints: list[tuple[int, ...]] | None = None,
) -> list[Sequence]:
    """Complete ``prompts`` together, every invariant checked after every step. Checkpoints are
    those of raw prompts unless given.
    """
    params = SamplingParams(temperature=0.0, max_tokens=n_output)
    start = 1000 * (1 + loop.scheduler.counters.steps)
    marks = checkpoints or [raw_checkpoints(len(prompt)) for prompt in prompts]
    sequences = [
        loop.add(start + i, prompt, params, checkpoints=places)
        for i, (prompt, places) in enumerate(zip(prompts, marks, strict=True))
    ]
    while loop.has_work:
        loop.step()
        loop.scheduler.check_integrity()
    return sequences
