"""Tiny models of all families in the engine loop, with transformers' greedy output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from hullspeed.arch.load import load_arch
from hullspeed.clock import MonotonicClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.request import Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.memory.windows import largest_window
from hullspeed.models.decoder import Decoder
from hullspeed.models.load import load_decoder
from hullspeed.models.stored_states import StoredDtype
from hullspeed.runtime.executor import TorchExecutor
from hullspeed.runtime.sampler import Sampler
from hullspeed.sources.files import from_folder
from hullspeed.text.checkpoints import raw_checkpoints
from support.families import VOCAB, write_family

from .tiny import CLEAR_MARGIN

PAGE_TOKENS = 16
N_PAGES = 96
N_SLOTS = 40
N_WINDOW_PAGES = 72


@dataclass
class HybridCase:
    """A model as we run it, and transformers' module of the same file.

    Attributes:
        other: The same decoder with memory of its own, for runs without a cache; layers with a
            window keep the whole context there.
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
        n_window_pages: int = N_WINDOW_PAGES,
        cache: str = "segment",
        eviction: str = "lru",
        n_stored: int = 0,
        stored: StoredDtype = "int8",
    ) -> EngineLoop:
        """A fresh scheduler and cache over whatever pages and states hold."""
        if n_stored:
            self.decoder.allocate_states(n_slots, n_stored, stored)
        arch, recurrent = self.decoder.arch, self.decoder.is_recurrent
        window_tokens = largest_window(arch) if self.decoder.n_window_pages else 0
        scheduler = build_scheduler(
            n_pages=n_pages,
            page_tokens=PAGE_TOKENS,
            max_running=max_running,
            step_tokens=step_tokens,
            max_context_tokens=arch.max_context_tokens,
            n_state_slots=n_slots if recurrent else 0,
            n_stored_slots=n_stored,
            n_window_pages=n_window_pages if window_tokens else 0,
            window_tokens=window_tokens,
            page_bytes=4096,
            state_bytes=20_000 if recurrent else 0,
            window_page_bytes=8192,
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
    if largest_window(decoders[0].arch):
        decoders[0].allocate_kv(N_PAGES, PAGE_TOKENS, n_window_pages=N_WINDOW_PAGES)
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


@st.composite
def prompt_trees(draw: st.DrawFn) -> list[tuple[list[int], tuple[int, ...]]]:
    """Prompts that share prefixes of one another, and checkpoints in them."""
    prompts: list[list[int]] = [random_prompt(draw(st.integers(20, 60)), draw(st.integers(0, 2)))]
    for _ in range(draw(st.integers(1, 6))):
        parent = draw(st.sampled_from(prompts))
        keep = draw(st.one_of(st.just(len(parent)), st.integers(0, len(parent))))
        own = draw(st.integers(1, 40))
        prompts.append(parent[:keep] + random_prompt(own, 10_000 + 50 * keep + own))
    marked = []
    for prompt in prompts:
        places = st.sets(st.integers(1, len(prompt) - 1), max_size=3) if len(prompt) > 1 else None
        marked.append((prompt, tuple(sorted(draw(places))) if places is not None else ()))
    return marked


def is_close_call(case: HybridCase, prompt: list[int], got: list[int], want: list[int]) -> bool:
    """Whether the outputs part where transformers finds the two tokens equally likely."""
    at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    with torch.inference_mode():
        logits = case.module(torch.tensor([prompt + want[:at]])).logits[0, -1]
    return bool((logits[got[at]] - logits[want[at]]).abs() < CLEAR_MARGIN)
