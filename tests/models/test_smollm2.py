"""A real model on real text: our decoder against transformers with the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from hullspeed.arch.load import load_arch
from hullspeed.arch.model import ModelArch
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.cpu.int_tile import has_vnni
from hullspeed.models.decoder import Decoder
from hullspeed.models.load import load_decoder, open_weights
from hullspeed.sources.files import ModelFiles

# Public domain: the opening of "Moby-Dick" (1851).
TEXT = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in "
    "my purse, and nothing particular to interest me on shore, I thought I would sail about a "
    "little and see the watery part of the world. It is a way I have of driving off the spleen and "
    "regulating the circulation. Whenever I find myself growing grim about the mouth; whenever it "
    "is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before "
    "coffin warehouses, and bringing up the rear of every funeral I meet; I account it high time "
    "to get to sea as soon as I can."
)


@pytest.fixture(scope="module")
def arch(smollm2_files: ModelFiles) -> ModelArch:
    return load_arch(smollm2_files)


@pytest.fixture(scope="module")
def tokens(smollm2_files: ModelFiles) -> list[int]:
    """The text's tokens: the longest vocabulary entry first is close enough to the tokenizer."""
    reader = gguf.GGUFReader(smollm2_files.weights[0])
    field = reader.fields["tokenizer.ggml.tokens"]
    vocabulary = {bytes(field.parts[i]).decode(): n for n, i in enumerate(field.data)}
    text, found = TEXT.replace(" ", "Ġ"), []
    while text:
        length = next(n for n in range(len(text), 0, -1) if text[:n] in vocabulary)
        found.append(vocabulary[text[:length]])
        text = text[length:]
    return found


@pytest.fixture(scope="module")
def oracle_logits(smollm2_files: ModelFiles, arch: ModelArch, tokens: list[int]) -> torch.Tensor:
    """``[T, vocab]`` of transformers in fp32, its weights those that we read."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=arch.vocab,
        hidden_size=arch.hidden,
        intermediate_size=1536,
        num_hidden_layers=len(arch.layers),
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    weights = open_weights(smollm2_files.weights, arch)
    state = {name: weights.tensor(name) for name in weights.shapes()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def all_logits(decoder: Decoder, tokens: list[int], chunk: int) -> torch.Tensor:
    parts = []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        batch = Batch.of([SpanInput(part, start, [3, 1, 2], sample=True)])
        parts.append(decoder.forward(_every_row(batch)))
    return torch.cat(parts)


def _every_row(batch: Batch) -> Batch:
    return replace(batch, logits_rows=np.arange(len(batch.tokens)))


def make_decoder(files: ModelFiles, arch: ModelArch, **options: Any) -> Decoder:
    decoder = load_decoder(files.weights, arch, **options)
    decoder.allocate_kv(4)
    return decoder


def test_fp32_logits_are_those_of_transformers(
    smollm2_files: ModelFiles, arch: ModelArch, tokens: list[int], oracle_logits: torch.Tensor
) -> None:
    decoder = make_decoder(smollm2_files, arch, weight_dtype="fp32")
    for chunk in (64, len(tokens)):
        logits = all_logits(decoder, tokens, chunk)
        torch.testing.assert_close(logits, oracle_logits, atol=1e-4, rtol=0)


def test_fp16_weights_lose_nothing_that_matters(
    smollm2_files: ModelFiles, arch: ModelArch, tokens: list[int], oracle_logits: torch.Tensor
) -> None:
    decoder = make_decoder(smollm2_files, arch, weight_dtype="fp16")
    wanted = oracle_logits.log_softmax(-1)
    for chunk in (1, 50):
        got = all_logits(decoder, tokens, chunk).log_softmax(-1)
        divergence = (wanted.exp() * (wanted - got)).sum(-1)
        assert float(divergence.mean()) < 1e-4
        assert float((got.argmax(-1) == wanted.argmax(-1)).float().mean()) > 0.98


@pytest.mark.skipif(not has_vnni(), reason="needs AVX-512 VNNI")
def test_native_codes_are_the_checkpoint(
    smollm2_files: ModelFiles, arch: ModelArch, tokens: list[int], oracle_logits: torch.Tensor
) -> None:
    decoder = make_decoder(smollm2_files, arch, weight_dtype="native", threads=2)
    wanted = oracle_logits.log_softmax(-1)
    got = [all_logits(decoder, tokens, chunk) for chunk in (1, 7, len(tokens))]
    for logits in got:
        ours = logits.log_softmax(-1)
        divergence = (wanted.exp() * (wanted - ours)).sum(-1)
        assert float(divergence.mean()) < 1e-6
        assert torch.equal(ours.argmax(-1), wanted.argmax(-1))
