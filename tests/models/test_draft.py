"""The draft head against transformers' own modules, put together as its authors do."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch

from hullspeed.arch.load import load_arch
from hullspeed.errors import EngineError, UnsupportedModelError
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.models.decoder import Decoder
from hullspeed.models.draft import DraftHead
from hullspeed.models.load import load_decoder
from hullspeed.models.support import skipped_parts
from hullspeed.sources.files import from_folder
from hullspeed.units import format_bytes
from support.families import VOCAB, write_family
from support.mtp import ReferenceMtp, write_with_mtp

N_PAGES, PAGE_TOKENS, N_SLOTS = 16, 32, 6
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 0.0}


class Case(NamedTuple):
    """Ours and the reference, from one checkpoint."""

    decoder: Decoder
    head: DraftHead
    module: Any
    mtp: ReferenceMtp

    def wanted(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden states of all positions but the last."""
        with torch.inference_mode():
            hidden = self.module.model(torch.tensor([tokens])).last_hidden_state[0]
            logits, out = self.mtp(torch.tensor(tokens[1:]), hidden[:-1])
        return logits, out


def load(folder: Path, kernels: Literal["cpu", "ref"], *, draft: bool = True) -> Decoder:
    files = from_folder(folder, source=str(folder))
    decoder = load_decoder(
        files.weights, load_arch(files), kernels=kernels, weight_dtype="fp32", draft=draft
    )
    decoder.allocate_kv(N_PAGES, PAGE_TOKENS)
    decoder.allocate_states(N_SLOTS)
    return decoder


CASES = [
    ("qwen3_5", "cpu", {}),
    ("qwen3_5", "ref", {"tie_word_embeddings": True}),
    ("qwen3_5_moe", "cpu", {}),
    ("qwen3_next", "cpu", {"per_expert": True}),
    ("qwen3_next", "ref", {}),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    family, kernels, changes = request.param
    folder = tmp_path_factory.mktemp(family)
    module, mtp = write_with_mtp(folder, family, **changes)
    decoder = load(folder, kernels)
    head = decoder.draft
    assert head is not None
    return Case(decoder, head, module, mtp)


def some_tokens(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def every_row(spans: list[SpanInput]) -> Batch:
    batch = Batch.of(spans)
    return replace(batch, logits_rows=np.arange(len(batch.tokens)))


def advance(case: Case, spans: list[tuple[list[int], int, int, list[int], int]]) -> Any:
    """Decoder and draft over ``(tokens, start, end, pages, slot)``: token ``end`` is known."""
    own, ahead = [], []
    for tokens, start, end, pages, slot in spans:
        read = slot if start else -1
        own.append(SpanInput(tokens[start:end], start, pages, True, read, slot))
        ahead.append(SpanInput(tokens[start + 1 : end + 1], start, pages, True))
    hidden = case.decoder.hidden(every_row(own))
    return case.head.forward(every_row(ahead), hidden)


@pytest.mark.parametrize("chunk", [1, 13, 90])
def test_drafts_are_those_of_the_reference(case: Case, chunk: int) -> None:
    tokens = some_tokens(41 if chunk == 1 else 91)
    n = len(tokens) - 1
    parts = [
        advance(case, [(tokens, i, min(i + chunk, n), [3, 0, 7], 0)]) for i in range(0, n, chunk)
    ]
    logits, hidden = case.wanted(tokens)
    torch.testing.assert_close(torch.cat([part.logits for part in parts]), logits, **CLOSE)
    torch.testing.assert_close(torch.cat([part.hidden for part in parts]), hidden, **CLOSE)


def test_a_mixed_batch(case: Case) -> None:
    """Sequences at different places in one batch, one of them a single token."""
    a, b, c = (some_tokens(n, seed=n) for n in (60, 35, 20))
    advance(case, [(a, 0, 40, [0, 1], 0), (b, 0, 33, [2, 3], 1)])
    found = advance(case, [(a, 40, 59, [0, 1], 0), (b, 33, 34, [2, 3], 1), (c, 0, 19, [4], 2)])
    wanted = torch.cat([case.wanted(a)[0][40:], case.wanted(b)[0][33:], case.wanted(c)[0]])
    torch.testing.assert_close(found.logits, wanted, **CLOSE)


def test_a_prefix_of_another_sequence(case: Case) -> None:
    """Pages shared or copied bring the draft's keys and values along, but for the last token's,
    which saw the other continuation.
    """
    prefix = some_tokens(50)
    first, second = prefix + some_tokens(20, 1), prefix + some_tokens(20, 2)
    advance(case, [(first, 0, 50, [0, 1], 0)])
    case.decoder.copy_pages([1], [5])
    case.decoder.copy_states([0], [1])
    advance(case, [(first, 50, 69, [0, 1, 8], 0)])
    found = advance(case, [(second, 50, 69, [0, 5, 9], 1)]).logits
    other = [*prefix[:50], first[50], *second[51:]]  # what the entry at 49 saw
    with torch.inference_mode():
        hidden = case.module.model(torch.tensor([second])).last_hidden_state[0]
        stale = torch.tensor(second[1:])
        stale[49] = other[50]
        wanted = case.mtp(stale, hidden[:-1])[0][50:]
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_drafts_of_drafts(case: Case) -> None:
    """The head fed with its own guess and hidden state, at the next position."""
    tokens = some_tokens(31)
    draft = advance(case, [(tokens, 0, 30, [0, 1], 0)])
    guess = int(draft.logits[-1].argmax())
    span = SpanInput([guess], 30, [0, 1], True)
    further = case.head.forward(Batch.of([span]), draft.hidden[-1:])
    with torch.inference_mode():
        hidden = case.module.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        _, out = case.mtp(torch.tensor(tokens[1:]), hidden)
        longer = torch.cat([hidden, out[-1:]])
        wanted, _ = case.mtp(torch.tensor([*tokens[1:], guess]), longer)
    torch.testing.assert_close(further.logits, wanted[-1:], **CLOSE)


def test_only_the_rows_asked_for(case: Case) -> None:
    tokens = some_tokens(21)
    hidden = case.decoder.hidden(Batch.of([SpanInput(tokens[:20], 0, [0], True, -1, 0)]))
    draft = case.head.forward(Batch.of([SpanInput(tokens[1:], 0, [0], True)]), hidden)
    assert draft.hidden.shape == (1, case.decoder.arch.hidden)
    torch.testing.assert_close(draft.logits, case.wanted(tokens)[0][-1:], **CLOSE)


def test_hidden_states_make_the_logits(case: Case) -> None:
    tokens = some_tokens(20)
    spans = [SpanInput(tokens, 0, [0], True, -1, 0)]
    logits = case.decoder.forward(every_row(spans))
    hidden = case.decoder.hidden(every_row(spans))
    torch.testing.assert_close(case.decoder.logits(hidden), logits, **CLOSE)


def test_what_cannot_be_drafted_is_refused(case: Case) -> None:
    span = SpanInput([1, 2], 0, [0], True)
    with pytest.raises(EngineError, match="hidden state of every token"):
        case.head.forward(Batch.of([span]), torch.zeros(1, case.decoder.arch.hidden))
    beyond = SpanInput([1], 0, [N_PAGES], True)
    with pytest.raises(EngineError, match="page"):
        case.head.forward(Batch.of([beyond]), torch.zeros(1, case.decoder.arch.hidden))


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "qwen3_moe")
    with pytest.raises(UnsupportedModelError, match="multi-token-prediction"):
        load(tmp_path, "ref")


def test_nothing_is_loaded_unless_asked_for(tmp_path: Path) -> None:
    _, mtp = write_with_mtp(tmp_path, "qwen3_5")
    decoder = load(tmp_path, "ref", draft=False)
    assert decoder.draft is None
    size = format_bytes(sum(4 * p.numel() for p in mtp.parameters()))
    n = len(list(mtp.parameters()))
    (said,) = skipped_parts(decoder.arch)
    assert said == f"{n} tensors of the multi-token-prediction layer ({size}; no drafts)"
    assert skipped_parts(decoder.arch, draft=True) == ()
