"""Rules: a request's sampling parameters in the form that the sampler uses."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hullspeed.core.request import Sequence
from hullspeed.runtime.token_counts import TokenCounts

# Below this, logits / temperature loses the order of close logits; it is greedy in all but name.
_GREEDY_TEMPERATURE = 1e-5


@dataclass(slots=True)
class Rules:
    """How one request's tokens are chosen, and the counts that its penalties need.

    Attributes as in ``SamplingParams``; ``seed`` is 64 bits, drawn if the request gave none.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence: float
    frequency: float
    repetition: float
    min_tokens: int
    logprobs: int | None
    seed: int
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    end_ids: NDArray[np.int64]
    output: TokenCounts
    seen: TokenCounts
    prompt_tokens: int

    @classmethod
    def of(cls, sequence: Sequence, vocab: int) -> Rules:
        """The rules of ``sequence``'s request."""
        params = sequence.request.sampling
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends.update(sequence.request.eos_token_ids)
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        return cls(
            temperature=params.temperature,
            top_k=params.top_k if params.top_k < vocab else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            min_tokens=params.min_tokens,
            logprobs=params.logprobs,
            seed=seed,
            bias_ids=np.fromiter(params.logit_bias, np.int64),
            bias_values=np.fromiter(params.logit_bias.values(), np.float32),
            end_ids=np.asarray(sorted(t for t in ends if 0 <= t < vocab), np.int64),
            output=TokenCounts(),
            seen=TokenCounts(),
            prompt_tokens=sequence.prompt_tokens,
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature < _GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def counts_output(self) -> bool:
        """Whether a penalty goes by the output's tokens."""
        return self.presence != 0.0 or self.frequency != 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether any step of the request changes logits."""
        return (
            self.counts_output
            or self.repetition != 1.0
            or len(self.bias_ids) > 0
            or (self.min_tokens > 0 and len(self.end_ids) > 0)
        )

    def prepare(self, sequence: Sequence) -> bool:
        """Count the tokens that are new; whether anything changes in this step."""
        if self.counts_output:
            self.output.extend(sequence.tokens, self.prompt_tokens)
        if self.repetition != 1.0:
            self.seen.extend(sequence.tokens, 0)
        return (
            self.counts_output
            or self.repetition != 1.0
            or len(self.bias_ids) > 0
            or sequence.output_tokens < self.min_tokens
        )
