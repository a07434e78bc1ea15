"""The decoder against transformers: any chunking, any mixture, any pages."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from hullspeed.errors import EngineError
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.load import load_kernels
from hullspeed.models.decoder import Decoder

VOCAB = 211
N_PAGES = 24
PAGE_TOKENS = 64
KERNELS: list[Literal["cpu", "ref"]] = ["ref", "cpu"]


@pytest.fixture(params=KERNELS)
def decoder(request: pytest.FixtureRequest, oracle: Any) -> Decoder:
    kernels = load_kernels(request.param, weight_dtype="fp32")
    decoder = Decoder(oracle.arch, oracle.weights, kernels)
    decoder.allocate_kv(N_PAGES, PAGE_TOKENS)
    return decoder


def some_tokens(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def every_row(spans: list[SpanInput]) -> Batch:
    """A batch that asks for all logits."""
    batch = Batch.of(spans)
    return replace(batch, logits_rows=np.arange(len(batch.tokens)))


def chunked(decoder: Decoder, tokens: list[int], pages: list[int], chunk: int) -> torch.Tensor:
    parts = []
    for start in range(0, len(tokens), chunk):
        span = SpanInput(tokens[start : start + chunk], start, pages, sample=True)
        parts.append(decoder.forward(every_row([span])))
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [1, 7, 64, 150])
def test_logits_are_those_of_transformers(decoder: Decoder, oracle: Any, chunk: int) -> None:
    tokens = some_tokens(70 if chunk == 1 else 150)  # beyond one page, beyond two
    logits = chunked(decoder, tokens, [5, 0, 17], chunk)
    torch.testing.assert_close(logits, oracle.logits(tokens), atol=1e-4, rtol=0)


def test_mixed_batches(decoder: Decoder, oracle: Any) -> None:
    """Decoding sequences and prompt chunks of any length in one step do not disturb each other."""
    rng = random.Random(3)
    sequences = [some_tokens(n, seed=n) for n in (3, 64, 65, 129, 200)]
    pages = list(range(N_PAGES))
    rng.shuffle(pages)
    tables = [[pages.pop() for _ in range(-(-len(s) // PAGE_TOKENS))] for s in sequences]
    done = [0] * len(sequences)
    got: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        chosen = [i for i, s in enumerate(sequences) if done[i] < len(s) and rng.random() < 0.8]
        if not chosen:
            continue
        spans = []
        for i in chosen:
            length = min(rng.choice([1, 1, 5, 33, 70, 140]), len(sequences[i]) - done[i])
            part = sequences[i][done[i] : done[i] + length]
            spans.append(SpanInput(part, done[i], tables[i], sample=True))
            done[i] += length
        logits = decoder.forward(every_row(spans))
        for i, rows in zip(
            chosen, torch.split(logits, [len(s.tokens) for s in spans]), strict=True
        ):
            got[i].append(rows)
    for sequence, parts in zip(sequences, got, strict=True):
        torch.testing.assert_close(torch.cat(parts), oracle.logits(sequence), atol=1e-4, rtol=0)


def test_only_the_wanted_rows(decoder: Decoder, oracle: Any) -> None:
    tokens = some_tokens(90)
    first = SpanInput(tokens[:80], 0, [1, 2], sample=False)
    second = SpanInput(tokens[:40], 0, [3], sample=True)
    third = SpanInput(tokens[:5], 0, [4], sample=True)
    logits = decoder.forward(Batch.of([first, second, third]))
    wanted = oracle.logits(tokens)[[39, 4]]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    none = decoder.forward(Batch.of([first]))
    assert none.shape == (0, VOCAB)
    rest = decoder.forward(Batch.of([SpanInput(tokens[80:], 80, [1, 2], sample=True)]))
    torch.testing.assert_close(rest, oracle.logits(tokens)[-1:], atol=1e-4, rtol=0)


def test_copied_pages_continue_like_the_original(decoder: Decoder, oracle: Any) -> None:
    """Copy on write: two sequences share 70 tokens, then part."""
    tokens, other = some_tokens(100), some_tokens(30, seed=9)
    decoder.forward(Batch.of([SpanInput(tokens[:70], 0, [0, 1], sample=True)]))
    decoder.copy_pages([1], [9])
    both = Batch.of(
        [
            SpanInput(tokens[70:], 70, [0, 1], sample=True),
            SpanInput(other, 70, [0, 9], sample=True),
        ]
    )
    wanted = torch.stack([oracle.logits(tokens)[-1], oracle.logits(tokens[:70] + other)[-1]])
    torch.testing.assert_close(decoder.forward(both), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "span",
    [
        SpanInput([VOCAB], 0, [0], sample=True),
        SpanInput([-1], 0, [0], sample=True),
        SpanInput([1], 0, [N_PAGES], sample=True),
        SpanInput([1], 64, [0], sample=True),
        SpanInput([1], -1, [0], sample=True),
        SpanInput([1], 512, list(range(9)), sample=True),
        SpanInput([], 0, [0], sample=False),
    ],
)
def test_a_batch_out_of_bounds_is_refused(decoder: Decoder, span: SpanInput) -> None:
    with pytest.raises(EngineError, match="batch"):
        decoder.forward(Batch.of([span]))


def test_pages_that_are_not_there_are_not_copied(decoder: Decoder) -> None:
    for sources, targets in (([0], [N_PAGES]), ([-1], [0]), ([0, 1], [2])):
        with pytest.raises(EngineError, match="copy pages"):
            decoder.copy_pages(sources, targets)
