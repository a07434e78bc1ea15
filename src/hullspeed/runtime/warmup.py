"""warm_up: compile and touch what the first requests would otherwise wait for."""

from __future__ import annotations

from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.models.decoder import Decoder


def warm_up(decoder: Decoder, *, step_tokens: int, max_running: int) -> None:
    """Run a decode-like and a prompt-like batch on page 0, which holds nothing yet."""
    page = min(decoder.page_tokens, decoder.max_context_tokens)
    one = [SpanInput([0], 0, [0], sample=True)]
    # Two prompts on two pages where there are two, so that no kernel sees its first batch late.
    prompt = [0] * min(page, step_tokens)
    spans = [
        SpanInput(prompt, 0, [i], sample=True) for i in range(min(2, decoder.n_pages, max_running))
    ]
    decoder.forward(Batch.of(one))
    decoder.forward(Batch.of(spans))
