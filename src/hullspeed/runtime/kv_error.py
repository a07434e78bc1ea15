"""What a KV cache type costs in correctness: one model, one text, float32 pages against others.

Weights, tokens and steps are the same in every run; only how keys and values are kept differs. A
text is read in prompt chunks and its end token by token, with the probabilities of every position
compared; then the model continues it on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.memory.ours_room import page_size
from hullspeed.models.decoder import Decoder
from hullspeed.runtime.config import KvDtype

PAGE_TOKENS = 64
CHUNK_TOKENS = 256
_MOST_LOGITS = 2**28  # kept of the float32 run: 1 GiB
_LEAST_TOKENS = 8

Progress = Callable[[str], None]


class KvError(msgspec.Struct, frozen=True, kw_only=True):
    """How far a model with its KV cache in ``kv_dtype`` is from the same with float32.

    Attributes:
        kv_bytes_per_token: All layers, scales included.
        mean_kl_nats: Kullback-Leibler divergence of the next-token distributions, float32's against
            this one's, mean over all positions.
        max_kl_nats: Of the worst position.
        decode_kl_nats: Mean over the positions that were computed one by one.
        top1_agreement: Share of positions with the same likeliest token.
        perplexity: Of the text.
        max_logit_change: Largest difference of a logit.
        greedy_equal_tokens: How many tokens of the greedy continuation come before the first that
            differs.
    """

    kv_dtype: KvDtype
    kv_bytes_per_token: int
    mean_kl_nats: float
    max_kl_nats: float
    decode_kl_nats: float
    top1_agreement: float
    perplexity: float
    max_logit_change: float
    greedy_equal_tokens: int


class KvReport(msgspec.Struct, frozen=True, kw_only=True):
    """All types beside float32.

    Attributes:
        text_tokens: Of the text.
        decoded_tokens: How many of them, at its end, were computed one by one.
        greedy_tokens: Length of the greedy continuation.
        fp32_bytes_per_token: KV bytes of a token in float32.
        fp32_perplexity: Of the text with float32 pages.
    """

    model: str
    text_tokens: int
    decoded_tokens: int
    greedy_tokens: int
    fp32_bytes_per_token: int
    fp32_perplexity: float
    errors: tuple[KvError, ...]


def passage() -> str:
    """The text that is read unless another is given: prose, figures and code, 600 words."""
    return resources.files(__package__).joinpath("passage.txt").read_text(encoding="utf-8")


class _Run(NamedTuple):
    """Logits ``[T, vocab]`` of every position, and the greedy continuation."""

    logits: Tensor
    greedy: list[int]


def measure_kv_error(
    decoder: Decoder,
    tokens: Sequence[int],
    dtypes: Sequence[KvDtype],
    *,
    model: str = "",
    greedy_tokens: int = 64,
    progress: Progress = lambda _: None,
) -> KvReport:
    """Run ``tokens`` with pages of float32 and of each of ``dtypes``.

    A text beyond the model's context or 1 GiB of float32 logits is cut. Whatever pages and states
    the decoder had are dropped.

    Raises:
        UsageError: too few tokens, or a model without attention.
    """
    arch = decoder.arch
    most = min(decoder.max_context_tokens - greedy_tokens, _MOST_LOGITS // arch.vocab)
    tokens = list(tokens[: max(most, 0)])
    if len(tokens) < _LEAST_TOKENS:
        raise UsageError(
            f"the text must have at least {_LEAST_TOKENS} tokens within the model's context",
            seen=len(tokens),
            fix="give a longer text, or a model with a longer context",
        )
    if not page_size(arch, 1):
        raise UsageError("the model keeps no keys and values", seen=arch.family)
    n_decoded = min(128, len(tokens) // 4)
    progress(f"fp32: {len(tokens)} tokens, the last {n_decoded} one by one")
    wanted = _run(decoder, tokens, n_decoded, greedy_tokens, "fp32")
    errors = []
    for dtype in dtypes:
        progress(f"{dtype}: the same tokens")
        other = _run(decoder, tokens, n_decoded, greedy_tokens, dtype)
        errors.append(_compare(arch, dtype, tokens, n_decoded, wanted, other))
    decoder.allocate_kv(0, PAGE_TOKENS)
    return KvReport(
        model=model,
        text_tokens=len(tokens),
        decoded_tokens=n_decoded,
        greedy_tokens=greedy_tokens,
        fp32_bytes_per_token=page_size(arch, 1),
        fp32_perplexity=_perplexity(wanted.logits, tokens),
        errors=tuple(errors),
    )


def _run(
    decoder: Decoder, tokens: list[int], n_decoded: int, n_greedy: int, dtype: KvDtype
) -> _Run:
    """One pass over the text in chunks, then token by token, then as the model goes on."""
    total = len(tokens) + n_greedy
    decoder.allocate_kv(-(-total // PAGE_TOKENS), PAGE_TOKENS, dtype)
    decoder.allocate_states(1)
    prompt = len(tokens) - n_decoded
    starts = [*range(0, prompt, CHUNK_TOKENS), *range(prompt, len(tokens))]
    parts = [
        _forward(decoder, tokens[start:end], start)
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)
    ]
    greedy: list[int] = []
    row = parts[-1][-1]
    for position in range(len(tokens), total):
        greedy.append(int(row.argmax()))
        row = _forward(decoder, greedy[-1:], position)[-1]
    return _Run(torch.cat(parts), greedy)


def _forward(decoder: Decoder, tokens: list[int], start: int) -> Tensor:
    """Logits of all ``tokens``, ``[len(tokens), vocab]``."""
    pages = range(decoder.n_pages)
    slot = 0 if decoder.is_recurrent else -1
    span = SpanInput(tokens, start, pages, True, slot if start else -1, slot)
    return decoder.forward(replace(Batch.of([span]), logits_rows=np.arange(len(tokens))))


def _compare(
    arch: ModelArch, dtype: KvDtype, tokens: list[int], n_decoded: int, wanted: _Run, other: _Run
) -> KvError:
    pairs_of_rows = zip(torch.split(wanted.logits, 64), torch.split(other.logits, 64), strict=True)
    kl = torch.cat([_divergence(a, b) for a, b in pairs_of_rows])
    same = wanted.logits.argmax(-1) == other.logits.argmax(-1)
    pairs = zip(wanted.greedy, other.greedy, strict=True)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted.greedy))
    return KvError(
        kv_dtype=dtype,
        kv_bytes_per_token=page_size(arch, 1, dtype),
        mean_kl_nats=float(kl.mean()),
        max_kl_nats=float(kl.max()),
        decode_kl_nats=float(kl[len(kl) - n_decoded :].mean()),
        top1_agreement=float(same.double().mean()),
        perplexity=_perplexity(other.logits, tokens),
        max_logit_change=float((wanted.logits - other.logits).abs().max()),
        greedy_equal_tokens=equal,
    )


def _divergence(wanted: Tensor, other: Tensor) -> Tensor:
    """KL divergence in nats of rows ``[n, vocab]``: ``[n]``. A row that is not finite in ``other``
    is infinitely far off.
    """
    p, q = wanted.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).nan_to_num(nan=torch.inf).clamp_min(0)


def _perplexity(logits: Tensor, tokens: Sequence[int]) -> float:
    targets = torch.tensor(tokens[1:])
    return float(torch.nn.functional.cross_entropy(logits[:-1], targets).exp())
