"""Every family against transformers, from the files that transformers writes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from hullspeed.arch.load import load_arch
from hullspeed.arch.tensors import Role
from hullspeed.errors import EngineError
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.models.decoder import Decoder
from hullspeed.models.load import load_decoder
from hullspeed.models.safetensors_weights import SafetensorsWeights
from hullspeed.models.support import skipped_parts
from hullspeed.sources.files import from_folder
from hullspeed.units import format_bytes
from support.families import FAMILIES, HYBRIDS, VOCAB, write_family

N_PAGES, PAGE_TOKENS, N_SLOTS = 24, 64, 20
KERNELS: list[Literal["cpu", "ref"]] = ["ref", "cpu"]


@dataclass(frozen=True)
class Model:
    """A decoder and transformers' module of the same file."""

    decoder: Decoder
    module: Any

    def wanted(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            result: torch.Tensor = self.module(torch.tensor([tokens])).logits[0]
        return result


@pytest.fixture(scope="module", params=[(f, k) for f in FAMILIES for k in KERNELS], ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    family, kernels = request.param
    folder = tmp_path_factory.mktemp(family)
    module = write_family(folder, family)
    return Model(load(folder, kernels), module)


def load(folder: Path, kernels: Literal["cpu", "ref"], weight_dtype: str = "fp32") -> Decoder:
    files = from_folder(folder, source=str(folder))
    decoder = load_decoder(
        files.weights, load_arch(files), kernels=kernels, weight_dtype=weight_dtype
    )
    decoder.allocate_kv(N_PAGES, PAGE_TOKENS)
    decoder.allocate_states(N_SLOTS)
    return decoder


def some_tokens(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def every_row(spans: list[SpanInput]) -> Batch:
    batch = Batch.of(spans)
    return replace(batch, logits_rows=np.arange(len(batch.tokens)))


class Walk:
    """One sequence on its way: its pages and the slot of its state."""

    def __init__(self, tokens: list[int], pages: list[int], slot: int) -> None:
        self.tokens, self.pages = tokens, pages
        self.done, self.slot, self.read = 0, slot, -1

    def span(self, length: int, slot: int | None = None) -> SpanInput:
        """The next ``length`` tokens; the state moves to ``slot``, if one is given."""
        begin, self.done = self.done, self.done + length
        read, self.slot = self.read, self.slot if slot is None else slot
        self.read = self.slot
        return SpanInput(self.tokens[begin : self.done], begin, self.pages, True, read, self.slot)


@pytest.mark.parametrize("chunk", [1, 7, 64, 150])
def test_logits_are_those_of_transformers(model: Model, chunk: int) -> None:
    tokens = some_tokens(70 if chunk == 1 else 150)  # beyond one page, a window, a chunk of 64
    walk = Walk(tokens, [5, 0, 17], 0)
    parts = []
    while walk.done < len(tokens):
        # Copy on write at every other step: the state wanders from slot to slot.
        slot = (walk.slot + walk.done % 2) % N_SLOTS
        span = walk.span(min(chunk, len(tokens) - walk.done), slot)
        parts.append(model.decoder.forward(every_row([span])))
    torch.testing.assert_close(torch.cat(parts), model.wanted(tokens), atol=1e-4, rtol=0)


def test_mixed_batches(model: Model) -> None:
    rng = random.Random(3)
    pages = list(range(N_PAGES))
    rng.shuffle(pages)
    walks = [
        Walk(tokens, [pages.pop() for _ in range(-(-len(tokens) // PAGE_TOKENS))], slot)
        for slot, tokens in enumerate(some_tokens(n, seed=n) for n in (3, 64, 65, 129, 200))
    ]
    got: list[list[torch.Tensor]] = [[] for _ in walks]
    while any(w.done < len(w.tokens) for w in walks):
        chosen = [i for i, w in enumerate(walks) if w.done < len(w.tokens) and rng.random() < 0.8]
        if not chosen:
            continue
        spans = []
        for i in chosen:
            left = len(walks[i].tokens) - walks[i].done
            spans.append(walks[i].span(min(rng.choice([1, 1, 5, 33, 70, 140]), left)))
        logits = model.decoder.forward(every_row(spans))
        lengths = [len(span.tokens) for span in spans]
        for i, rows in zip(chosen, torch.split(logits, lengths), strict=True):
            got[i].append(rows)
    for walk, parts in zip(walks, got, strict=True):
        wanted = model.wanted(walk.tokens)
        torch.testing.assert_close(torch.cat(parts), wanted, atol=1e-4, rtol=0)


def test_one_prefix_forks_into_many(model: Model) -> None:
    """All continue from the same pages and the same state, which nobody overwrites."""
    prefix = some_tokens(70)
    walk = Walk(prefix, [0, 1], 0)
    model.decoder.forward(every_row([walk.span(70)]))
    spans, wanted = [], []
    for i in range(6):
        own = some_tokens(9 + i, seed=i)
        model.decoder.copy_pages([1], [10 + i])
        spans.append(SpanInput(own, 70, [0, 10 + i], True, 0, 1 + i))
        wanted.append(model.wanted(prefix + own)[70:])
    got = model.decoder.forward(every_row(spans))
    torch.testing.assert_close(got, torch.cat(wanted), atol=1e-4, rtol=0)


def test_a_result_depends_neither_on_the_batch_nor_on_the_chunk(model: Model) -> None:
    """To the bit where kernels promise it; linears round differently by batch size."""
    tokens = some_tokens(90)
    whole = model.decoder.forward(every_row([Walk(tokens, [0, 1], 0).span(90)]))
    walk, other = Walk(tokens, [2, 3], 1), Walk(some_tokens(90, 5), [4, 5], 2)
    parts = []
    for n in (31, 1, 58):
        rows = model.decoder.forward(every_row([other.span(1), walk.span(n)]))
        parts.append(rows[1:])
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("hybrid")
    write_family(folder, "qwen3_5")
    return load(folder, "cpu")


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([SpanInput([1], 0, [0], True)], "state slot to write"),
        ([SpanInput([1], 0, [0], True, -1, N_SLOTS)], "state slot to write"),
        ([SpanInput([1], 0, [0], True, N_SLOTS, 0)], "state slot to read"),
        ([SpanInput([1], 0, [0], True, -2, 0)], "state slot to read"),
        ([SpanInput([1], 5, [0], True, -1, 0)], "without its state"),
        ([SpanInput([1], 0, [i], True, -1, 3) for i in (0, 1)], "two spans write"),
        (
            [SpanInput([1], 0, [0], True, -1, 3), SpanInput([1], 1, [1], True, 3, 4)],
            "another writes",
        ),
    ],
)
def test_slots_out_of_bounds_are_refused(
    hybrid: Decoder, spans: list[SpanInput], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        hybrid.forward(Batch.of(spans))


def test_copied_states_continue_like_the_original(hybrid: Decoder) -> None:
    tokens = some_tokens(40)
    hybrid.forward(Batch.of([SpanInput(tokens[:30], 0, [0], True, -1, 0)]))
    hybrid.copy_states([0, 7], [7, 9])
    hybrid.copy_pages([0, 0], [1, 2])
    both = hybrid.forward(
        Batch.of(
            [
                SpanInput(tokens[30:], 30, [1], True, 9, 9),
                SpanInput(tokens[30:], 30, [2], True, 0, 1),
            ]
        )
    )
    assert torch.equal(both[0], both[1])
    with pytest.raises(EngineError, match="copy states"):
        hybrid.copy_states([0], [N_SLOTS])


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_weights_stay_close(family: str, tmp_path: Path) -> None:
    """fp16 packs of experts, gates and projections: what users run."""
    module = write_family(tmp_path, family)
    decoder = load(tmp_path, "cpu", "fp16")
    tokens = some_tokens(60)
    got = decoder.forward(every_row([Walk(tokens, [0], 0).span(60)]))
    with torch.inference_mode():
        wanted = module(torch.tensor([tokens])).logits[0].log_softmax(-1)
    divergence = (wanted.exp() * (wanted - got.log_softmax(-1))).sum(-1).mean()
    assert divergence < 1e-4


def test_only_hybrids_are_recurrent(model: Model) -> None:
    assert model.decoder.is_recurrent == (model.decoder.arch.family in HYBRIDS)


def test_vision_weights_are_skipped_and_said_so(tmp_path: Path) -> None:
    import transformers

    hf: Any = transformers
    text = write_family(tmp_path / "text", "qwen3_5").config
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "in_channels": 3,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "out_hidden_size": 64, "num_position_embeddings": 16,
    }  # fmt: skip
    config = hf.Qwen3_5Config(
        text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False
    )
    module = hf.Qwen3_5ForConditionalGeneration(config).float().eval()
    module.save_pretrained(tmp_path / "both")
    decoder = load(tmp_path / "both", "cpu")
    (said,) = skipped_parts(decoder.arch)
    names = [name for name in module.state_dict() if ".visual." in name]
    size = sum(4 * module.state_dict()[name].numel() for name in names)
    assert said == f"{len(names)} vision tensors ({format_bytes(size)}; images are refused)"
    tokens = some_tokens(20)
    got = decoder.forward(every_row([Walk(tokens, [0], 0).span(20)]))
    with torch.inference_mode():
        wanted = module(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_an_expert_by_itself_is_its_share_of_all(tmp_path: Path) -> None:
    write_family(tmp_path, "gpt_oss")
    files = from_folder(tmp_path, source="x")
    arch = load_arch(files)
    weights = SafetensorsWeights(files.weights, arch)
    fused = [t for t in arch.tensors() if t.role is Role.EXPERT and len(t.shape) == 3]
    assert fused
    for spec in fused:
        whole = weights.tensor(spec.name)
        for i, wanted in enumerate(whole):
            assert torch.equal(weights.expert(spec.name, i), wanted)
