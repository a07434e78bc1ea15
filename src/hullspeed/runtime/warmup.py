"""warm_up: compile and touch what the first requests would otherwise wait for."""

from __future__ import annotations

from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.models.decoder import Decoder

# Kernels are compiled for types, not for sizes, but large batches go to their parallel forms:
# a page of tokens is enough for those.
_PROMPT_TOKENS = 64


def warm_up(decoder: Decoder) -> None:
    """Run a decode-like and a prompt-like batch on the first pages, which hold nothing yet."""
    prompt = [0] * min(_PROMPT_TOKENS, decoder.page_tokens, decoder.max_context_tokens)

    def span(tokens: list[int], i: int) -> SpanInput:
        windows = [i] if decoder.n_window_pages else []
        return SpanInput(tokens, 0, [i], sample=True, write_slot=i, window_pages=windows)

    decoder.forward(Batch.of([span([0], 0)]))
    decoder.forward(Batch.of([span(prompt, i) for i in range(min(2, decoder.n_pages))]))
