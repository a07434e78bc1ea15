"""Every KV cache type in the engine loop, on a dense model, one with recurrent states and one with
sliding windows: how far from transformers' float32, and that cached equals uncached.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hullspeed.core.engine import EngineLoop
from hullspeed.core.request import Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.step import Step, StepResult
from hullspeed.errors import UnsupportedModelError, UsageError
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.memory.windows import least_pages
from hullspeed.models.attention import Attention
from hullspeed.models.decoder import Decoder
from hullspeed.runtime.config import KvDtype
from hullspeed.runtime.library import Engine

from .hybrids import (
    N_PAGES,
    N_WINDOW_PAGES,
    PAGE_TOKENS,
    HybridCase,
    hybrid_case,
    random_prompt,
    run,
)
from .tiny import write_checkpoint, write_tokenizer

DTYPES: list[KvDtype] = ["fp32", "fp16", "bf16", "int8", "fp8"]
WINDOW = 40

# Largest change of a logit against transformers in float32, in standard deviations of the logits:
# two to three times what these models show. A key rounded to b bits of mantissa is 2^-(b+1) off;
# int8 is as fine as its scale, the largest of a head's 32 numbers.
FROM_TRANSFORMERS: dict[KvDtype, float] = {
    "fp32": 2e-4, "fp16": 6e-3, "bf16": 4e-2, "int8": 0.15, "fp8": 0.5,
}  # fmt: skip

# The same between two runs in one type. A token's codes depend on its key and value alone, but
# these are float32 sums, taken in another order in a chunk of another size: a number that lies
# between two codes may fall to the other one. Few do, and one step of one number of one token in a
# hundred is far below the rounding of all of them; what is more than a fifth of that is an error.
OF_ONE_TYPE: dict[KvDtype, float] = {
    "fp32": 2e-4, "fp16": 1.2e-3, "bf16": 8e-3, "int8": 0.03, "fp8": 0.1,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("mistral", {"sliding_window": None}),
    "hybrid": (
        "qwen3_5",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "windowed": (
        "gemma3",
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


# No choice of experts: a token at the border between two takes the other one at any rounding (int8
# moved the logits of one in 300 tokens by half a standard deviation), and a bound says nothing.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "windows only": ("mistral", {}),
    "scalar decay": ("qwen3_next", {**MODELS["hybrid"][1], "mlp_only_layers": [0, 1]}),
    "sinks": ("gpt_oss", {**MODELS["windowed"][1], "num_local_experts": 3}),
}


@pytest.fixture(
    scope="module", params=[*MODELS, *(pytest.param(name, marks=pytest.mark.deep) for name in MORE)]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HybridCase:
    torch.set_num_threads(1)
    family, changes = (MODELS | MORE)[request.param]
    return hybrid_case(tmp_path_factory.mktemp("model"), family, **changes)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest, case: HybridCase) -> KvDtype:
    """Both decoders of the case have pages of this type."""
    name: KvDtype = request.param
    windowed = N_WINDOW_PAGES if case.decoder.n_window_pages else 0
    case.decoder.allocate_kv(N_PAGES, PAGE_TOKENS, name, n_window_pages=windowed)
    case.other.allocate_kv(N_PAGES, PAGE_TOKENS, name)
    return name


class Traffic:
    """A loop under watch: what it samples from, with NaN in all that nobody holds."""

    def __init__(self, case: HybridCase, loop: EngineLoop) -> None:
        self.case, self.loop = case, loop
        self._logits: dict[int, dict[int, Tensor]] = {}
        self._execute, loop.executor.execute = loop.executor.execute, self._watched  # type: ignore[method-assign]

    def run(
        self, prompts: list[list[int]], n_output: int, marks: list[tuple[int, ...]] | None = None
    ) -> list[Sequence]:
        """Complete ``prompts`` together."""
        return run(self.loop, prompts, n_output, marks)

    def worst(self, sequences: list[Sequence]) -> float:
        """Largest difference of a logit that ``sequences`` were sampled from and that of the same
        tokens computed alone, in one piece, in standard deviations of the logits.
        """
        worst = 0.0
        for sequence in sequences:
            rows = self._logits[sequence.id]
            assert len(rows) >= len(sequence.output)
            want = alone(self.case.other, sequence.tokens)
            got = torch.stack([*rows.values()])
            worst = max(worst, change(want[[*rows]], got, want))
        return worst

    def _watched(self, step: Step) -> StepResult:
        poison_what_is_free(self.loop, self.case.decoder)
        places = [(span.sequence.id, span.end - 1) for span in step.spans if span.sample]
        with pytest.MonkeyPatch.context() as patch:
            logits: list[Tensor] = []
            forward = self.case.decoder.forward

            def recording(batch: Batch) -> Tensor:
                logits.append(forward(batch))
                return logits[-1]

            patch.setattr(self.case.decoder, "forward", recording)
            result = self._execute(step)
        for (sequence, place), row in zip(places, logits[0], strict=True):
            self._logits.setdefault(sequence, {})[place] = row
        assert all(sampled.error is None for sampled in result.sampled)
        return result


def poison_what_is_free(loop: EngineLoop, decoder: Decoder) -> None:
    """NaN in the pages that nobody holds: in the numbers, or in the scales of codes."""
    scheduler = loop.scheduler
    for layer in decoder._layers:
        if not isinstance(layer.mixer, Attention):
            continue
        apart = scheduler.windows is not None and layer.mixer.window_tokens
        pool = scheduler.windows.pool if apart and scheduler.windows else scheduler.pages
        free = [page for page in range(pool.size) if pool.owners(page) == 0]
        kv = layer.mixer.kv
        scales = (kv.key_scales, kv.value_scales)
        for part in scales if None not in scales else (kv.keys, kv.values):
            assert part is not None
            part[free] = torch.nan


def alone(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Logits of all ``tokens``, in one piece."""
    slot = 0 if decoder.is_recurrent else -1
    span = SpanInput(tokens, 0, range(decoder.n_pages), True, -1, slot)
    with torch.inference_mode():
        return decoder.forward(replace(Batch.of([span]), logits_rows=np.arange(len(tokens))))


def change(want: Tensor, got: Tensor, every: Tensor) -> float:
    """Largest difference in standard deviations of ``every`` logit."""
    return float((want - got).abs().max() / every.std())


def test_logits_are_transformers_within_the_types_bound(case: HybridCase, dtype: KvDtype) -> None:
    prompt = random_prompt(300, 8)
    with torch.inference_mode():
        want = case.module(torch.tensor([prompt])).logits[0]
    off = change(want, alone(case.other, prompt), want)
    assert off < FROM_TRANSFORMERS[dtype]
    if dtype != "fp32":  # it is this type that was measured
        assert off > FROM_TRANSFORMERS[dtype] / 100


def test_a_hit_continues_where_the_first_left_off(case: HybridCase, dtype: KvDtype) -> None:
    """Chunk by chunk, then from the cache, then from the middle of a page."""
    prompt = random_prompt(180, 21)
    traffic = Traffic(case, case.loop(step_tokens=50, max_running=1))
    first, second = (traffic.run([prompt], 4)[0] for _ in range(2))
    (longer,) = traffic.run([[*prompt[:179], 7, 8, 9]], 4)
    assert [s.cached_tokens for s in (first, second, longer)] == [0, 179, 179]
    assert traffic.worst([first, second, longer]) < OF_ONE_TYPE[dtype]


def test_forks_of_one_prefix(case: HybridCase, dtype: KvDtype) -> None:
    """Four at once from a place inside a page: codes and scales of it are copied."""
    prefix = random_prompt(150, 4)
    traffic = Traffic(case, case.loop(step_tokens=64, max_running=4))
    traffic.run([[*prefix, 1]], 1, [(150,)])
    forks = traffic.run([prefix + random_prompt(5 + i, 60 + i) for i in range(4)], 6)
    assert [sequence.cached_tokens for sequence in forks] == [150] * 4
    assert traffic.worst(forks) < OF_ONE_TYPE[dtype]


def test_preemption_and_eviction(case: HybridCase, dtype: KvDtype) -> None:
    """Three that grow beyond the pool together, then others, then the first again."""
    loop = case.loop(
        step_tokens=23,
        max_running=3,
        n_pages=20,
        n_slots=9,
        n_window_pages=least_pages(WINDOW, PAGE_TOKENS, 23) + 6,
    )
    traffic = Traffic(case, loop)
    mine, others = ([random_prompt(80 + i, 10 * k + i) for i in range(3)] for k in (1, 2))
    sequences = traffic.run(mine, 30)
    sequences += traffic.run(others, 3) + traffic.run(mine[::-1], 3)
    assert loop.scheduler.counters.preemptions > 0
    stats = loop.scheduler.cache.stats()
    assert 0 < stats.resident_tokens < sum(len(prompt) for prompt in mine + others)
    assert traffic.worst(sequences) < OF_ONE_TYPE[dtype]


def test_a_page_of_another_prompt_would_be_seen(case: HybridCase, dtype: KvDtype) -> None:
    """The bound has teeth in every type: one cached page with other codes exceeds it."""
    prompt, other = random_prompt(100, 1), random_prompt(100, 2)
    traffic = Traffic(case, case.loop(step_tokens=64, max_running=1))
    first, _ = traffic.run([prompt, other], 1)
    assert traffic.worst([first]) < OF_ONE_TYPE[dtype]
    cache = traffic.loop.scheduler.cache
    mine, others = (cache.match(p, b"", limit=99, now_s=0.0) for p in (prompt, other))
    case.decoder.copy_pages([others.pages[5]], [mine.pages[5]])
    if case.decoder.n_window_pages:
        assert mine.state is not None
        assert others.state is not None
        case.decoder.copy_window_pages(list(others.state), list(mine.state))
    (stale,) = traffic.run([prompt], 1)
    assert stale.cached_tokens == 99
    assert traffic.worst([stale]) > OF_ONE_TYPE[dtype]


PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
BYTES_PER_TOKEN = {"fp32": 512, "fp16": 256, "bf16": 256, "int8": 160, "fp8": 160}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers of 2 heads of 16 numbers, for keys and for values; a scale is 4 bytes."""
    path = tmp_path_factory.mktemp("library")
    write_checkpoint(path, "llama")
    write_tokenizer(path)
    return path


@pytest.mark.parametrize("name", DTYPES)
def test_through_the_library(folder: Path, name: KvDtype) -> None:
    text = "The keeper of the lighthouse climbed the stairs."
    with Engine(str(folder), kernels="ref", kv_dtype=name, threads=1, max_running=2) as engine:
        assert engine.info.kv_bytes_per_token == BYTES_PER_TOKEN[name]
        first, second = (engine.generate(text, PARAMS)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, len(text) - 1)
    assert len(first.token_ids) == len(second.token_ids) == 8


def test_the_library_refuses_what_there_is_not(folder: Path) -> None:
    with pytest.raises(UsageError, match="int4"):
        Engine(str(folder), kv_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="multi-token-prediction"):
        Engine(str(folder), kernels="ref", draft="mtp")
