"""Speculative decoding: a model's own prediction layer drafts tokens that one step verifies."""

from __future__ import annotations

from collections.abc import Sequence

from hullspeed.errors import UsageError
from hullspeed.perf.fitted import FittedCost, split
from hullspeed.perf.measured_tables import TableCost
from hullspeed.perf.work import Shape

MTP_ACCEPT = 3.2
"""Tokens a step of three drafted tokens yields: 3.2-3.3 in sgl-project/sglang
qwen3.8-27b-benchmarks.jsx (chat-like prompts; code accepts more, translations less)."""


class SpeculativeCost:
    """``cost`` with ``draft_tokens`` drafted and verified in each decode step, of which
    ``accept`` tokens (the sampled one included) are kept on average: a token's share of that step.

    Verification multiplies ``draft_tokens + 1`` rows a sequence and reads weights and KV once;
    each drafted token runs one layer of the model's own kind and its head.

    Raises:
        UsageError: if more tokens are accepted than a step can yield.
    """

    def __init__(self, cost: FittedCost | TableCost, draft_tokens: int, accept: float) -> None:
        if not 1 <= accept <= draft_tokens + 1:
            raise UsageError(
                "a step yields between 1 and drafted + 1 tokens",
                seen=accept,
                fix=f"at most {draft_tokens + 1} with {draft_tokens} drafted tokens",
            )
        self.cost = cost
        self.draft_tokens = draft_tokens
        self.accept = accept

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Seconds of one step, divided by the tokens it yields where it decodes."""
        return self.batch_seconds(*split(shapes))

    def batch_seconds(self, n_decode: int, context_tokens: int, chunks: Sequence[Shape]) -> float:
        """The same for ``n_decode`` sequences whose contexts sum to ``context_tokens``."""
        plain_s = self.cost.batch_seconds(n_decode, context_tokens, chunks)
        if not n_decode:
            return plain_s
        work, weights = self.cost.terms.work, self.cost.coefficients.terms
        bandwidth = self.cost.terms.gpu.bandwidth_bytes_per_s * self.cost.terms.tp
        rows = n_decode * (self.draft_tokens + 1)
        # More rows through the same weights, contexts read once.
        verify_s = self.cost.batch_seconds(rows, context_tokens, chunks)
        layer_bytes = work.body_bytes(n_decode) / work.n_layers + 2.0 * work.head_params
        draft_s = layer_bytes / bandwidth * weights["weights_s"]
        decoding_s = verify_s + self.draft_tokens * draft_s
        if not chunks:
            return decoding_s / self.accept
        alone_s = self.cost.batch_seconds(0, 0, chunks)
        return alone_s + max(decoding_s - alone_s, 0.0) / self.accept
