"""Greedy output is transformers' own, however the work is cut, batched, cached or interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.arch.load import load_arch
from hullspeed.models.load import load_decoder, open_weights
from hullspeed.sources.files import ModelFiles
from hullspeed.text.tokenizer import Tokenizer

from .tiny import (
    CLEAR_MARGIN,
    N_OUTPUT,
    N_PAGES,
    PAGE_TOKENS,
    VOCAB,
    Case,
    Greedy,
    greedy,
    run,
    tiny_case,
)

WHOLE = 10_000
CHUNKS = [1, 7, 64, WHOLE]
LENGTHS = [150, 1, 16, 17, 63, 100]


def random_prompt(n_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (n_tokens,), generator=generator).tolist()


class Oracle:
    """Prompts with a clear greedy output, and that output."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.prompts: list[list[int]] = []
        self.outputs: list[list[int]] = []
        for length in LENGTHS:
            prompt, output = next(
                (prompt, result)
                for seed in range(100)
                for prompt in [random_prompt(length, 1000 * length + seed)]
                for result in [greedy(case.module, prompt)]
                if result.margin > CLEAR_MARGIN
            )
            self.prompts.append(prompt)
            self.outputs.append(output.tokens)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    torch.set_num_threads(1)
    return Oracle(tiny_case(tmp_path_factory.mktemp(request.param), request.param))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("cache", ["segment", "hash", "none"])
def test_alone_cold_then_cached(oracle: Oracle, chunk: int, cache: str) -> None:
    loop = oracle.case.loop(step_tokens=chunk, max_running=1, cache=cache)
    prompt, want = oracle.prompts[0], oracle.outputs[0]
    assert run(loop, [prompt]) == [want]
    before = loop.scheduler.counters.cached_tokens
    assert run(loop, [prompt]) == [want]
    assert (loop.scheduler.counters.cached_tokens > before) == (cache != "none")


@pytest.mark.parametrize("chunk", [7, 64, WHOLE])
@pytest.mark.parametrize("cache", ["segment", "hash"])
def test_a_mixed_batch_cold_then_cached(oracle: Oracle, chunk: int, cache: str) -> None:
    loop = oracle.case.loop(step_tokens=chunk, max_running=6, cache=cache)
    assert run(loop, oracle.prompts) == oracle.outputs
    assert run(loop, oracle.prompts[::-1]) == oracle.outputs[::-1]


def test_a_mixed_batch_one_token_a_step(oracle: Oracle) -> None:
    loop = oracle.case.loop(step_tokens=1, max_running=6)  # a budget of its six sequences
    assert run(loop, oracle.prompts) == oracle.outputs


@pytest.mark.parametrize("chunk", [7, WHOLE])
@pytest.mark.parametrize("beyond", [0, 5])
def test_cached_at_every_page_boundary_and_inside(oracle: Oracle, chunk: int, beyond: int) -> None:
    prompt, want = oracle.prompts[0], oracle.outputs[0]
    for boundary in range(PAGE_TOKENS, len(prompt) - beyond, PAGE_TOKENS):
        cut = boundary + beyond
        loop = oracle.case.loop(step_tokens=chunk, max_running=2)
        other = [*prompt[:cut], (prompt[cut] + 1) % VOCAB]
        run(loop, [other], n_output=3)
        before = loop.scheduler.counters.cached_tokens
        assert run(loop, [prompt]) == [want]
        assert loop.scheduler.counters.cached_tokens - before == cut


@pytest.mark.parametrize("chunk", [7, 64, WHOLE])
@pytest.mark.parametrize("cache", ["segment", "none"])
def test_preempted(oracle: Oracle, chunk: int, cache: str) -> None:
    # Two prompts of 150 and 100 tokens grow by 64: 14 + 11 pages; there are 20.
    loop = oracle.case.loop(step_tokens=chunk, max_running=4, n_pages=20, cache=cache)
    which = [0, 5, 4, 3]
    got = run(loop, [oracle.prompts[i] for i in which])
    assert loop.scheduler.counters.preemptions > 0
    assert got == [oracle.outputs[i] for i in which]


def test_plain_torch_kernels_say_the_same(tmp_path: Path) -> None:
    case = tiny_case(tmp_path, "qwen3", kernels="ref")
    prompt = random_prompt(40, 1)
    want = greedy(case.module, prompt)
    assert want.margin > CLEAR_MARGIN
    assert run(case.loop(step_tokens=WHOLE, max_running=1), [prompt]) == [want.tokens]


# -- cached = uncached -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    return tiny_case(tmp_path_factory.mktemp("llama"), "llama")


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_prompts_that_share_prefixes_get_what_they_get_without_a_cache(
    llama: Case, data: st.DataObject
) -> None:
    """Random trees of prompts, small pools, any cache: evictions and preemptions included."""
    roots = [random_prompt(60, seed) for seed in range(3)]
    branch = st.tuples(st.sampled_from(roots), st.integers(0, 60), st.integers(1, 40))
    prompts = [
        root[:keep] + random_prompt(own, 10_000 + 50 * keep + own)
        for root, keep, own in data.draw(st.lists(branch, min_size=2, max_size=6))
    ]
    cache = data.draw(st.sampled_from(["segment", "hash"]))
    loop = llama.loop(
        step_tokens=data.draw(st.sampled_from([5, 32, WHOLE])),
        max_running=data.draw(st.integers(1, 4)),
        n_pages=data.draw(st.integers(8, 40)),
        cache=cache,
    )
    plain = llama.loop(step_tokens=WHOLE, max_running=1, cache="none")
    for prompt, got in zip(prompts, run(loop, prompts, 8), strict=True):
        want = run(plain, [prompt], 8)[0]
        assert got == want or _is_close_call(llama, prompt, got, want)


def _is_close_call(case: Case, prompt: list[int], got: list[int], want: list[int]) -> bool:
    """Whether the outputs part where transformers finds the two tokens equally likely."""
    at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    with torch.inference_mode():
        logits = case.module(torch.tensor([prompt + want[:at]])).logits[0, -1]
    return bool((logits[got[at]] - logits[want[at]]).abs() < CLEAR_MARGIN)


# -- the real model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_files: ModelFiles) -> Case:
    """SmolLM2 with float32 weights, and transformers' module of the very same numbers."""
    import transformers as hf

    torch.set_num_threads(1)  # threads wait for each other on a busy machine
    arch = load_arch(smollm2_files)
    weights = open_weights(smollm2_files.weights, arch)
    config = hf.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    module: Any
    with torch.device("meta"):
        module = hf.LlamaForCausalLM(config)
    state = {name: weights.tensor(name) for name in weights.shapes()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    module = module.to_empty(device="cpu").eval()
    module.load_state_dict(state)
    # Built on "meta", the rotary frequencies are the one thing that no checkpoint holds.
    module.model.rotary_emb = type(module.model.rotary_emb)(config)
    decoder = load_decoder(
        smollm2_files.weights, arch, weight_dtype="fp32", threads=1, max_context_tokens=1024
    )
    decoder.allocate_kv(N_PAGES, 64)
    return Case(decoder, module, page_tokens=64)


TEXT = """The lighthouse keeper climbed the spiral stairs every evening, carrying a lantern and a
small notebook in which he wrote down the names of the ships that passed, the direction of the wind
and whether the gulls had come back to the northern cliff. On the last day of October he"""


@pytest.fixture(scope="module")
def smollm2_text(smollm2: Case, smollm2_tokenizer: Tokenizer) -> tuple[list[int], Greedy]:
    prompt = smollm2_tokenizer.encode(TEXT)
    return prompt, greedy(smollm2.module, prompt)


def test_smollm2_alone_cold_then_cached_in_chunks(
    smollm2: Case, smollm2_text: tuple[list[int], Greedy]
) -> None:
    prompt, want = smollm2_text
    assert want.margin > CLEAR_MARGIN
    assert len(want.tokens) == N_OUTPUT
    loop = smollm2.loop(step_tokens=17, max_running=1)
    assert run(loop, [prompt]) == [want.tokens]
    assert run(loop, [prompt]) == [want.tokens]
    assert loop.scheduler.counters.cached_tokens == len(prompt) - 1


def test_smollm2_in_a_batch(
    smollm2: Case, smollm2_text: tuple[list[int], Greedy], smollm2_tokenizer: Tokenizer
) -> None:
    prompt, want = smollm2_text
    others = [smollm2_tokenizer.encode(text) for text in ("Once", "def add(a, b):", TEXT[:150])]
    loop = smollm2.loop(step_tokens=64, max_running=4)
    assert run(loop, [*others, prompt])[-1] == want.tokens
