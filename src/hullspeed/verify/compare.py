"""Are two greedy answers to one prompt the same?

On real hardware the same prompt may take another branch where two tokens are almost equally
likely, because sums are added in another order in another batch. That is allowed, and only that:
with log-probabilities the branch point shows whether it was a near tie. Without them a late
difference is a warning and an early one a fault.
"""

from __future__ import annotations

from typing import Any

from hullspeed.findings import Severity
from hullspeed.verify.completion import Completion, complete
from hullspeed.verify.endpoint import Api, Endpoint

NEAR_TIE_NATS = 0.15  # between the two likeliest tokens, at the branch point
_EARLY_SHARE = 0.25


LOGPROBS: dict[Api, dict[str, Any]] = {
    "completions": {"logprobs": 2},
    "chat": {"logprobs": True, "top_logprobs": 2},
}


async def logprobs_params(endpoint: Endpoint, api: Api) -> dict[str, Any]:
    """Parameters that ask for the two likeliest tokens of every position; none where refused."""
    request = endpoint.generation(api, "x", max_tokens=1, **LOGPROBS[api])
    probe = await complete(endpoint, request, may_refuse=True)
    return {} if probe.refused else LOGPROBS[api]


def difference(reference: Completion, other: Completion) -> tuple[str, Severity] | None:
    """How ``other`` differs from ``reference`` beyond what is allowed; None when it does not."""
    if other.text == reference.text:
        return None
    at = _branch(reference.text, other.text)
    where = (
        f"differs from character {at}: {_cut(reference.text, at)} against {_cut(other.text, at)}"
    )
    margin = _margin(reference, other)
    if margin is not None:
        if margin <= NEAR_TIE_NATS:
            return None
        return f"{where}; no near tie: {margin:.2f} nats apart", Severity.ERROR
    early = at < _EARLY_SHARE * max(len(reference.text), 1)
    return where, Severity.ERROR if early else Severity.WARNING


def _branch(left: str, right: str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _cut(text: str, at: int) -> str:
    return repr(text[max(at - 10, 0) : at + 20])


def _margin(reference: Completion, other: Completion) -> float | None:
    """Nats between the two likeliest tokens where the answers part; None when unknown."""
    if not reference.logprobs or not other.logprobs:
        return None
    for left, right in zip(reference.logprobs, other.logprobs, strict=False):
        if left.token != right.token:
            best = sorted(left.top.values(), reverse=True)[:2]
            return best[0] - best[1] if len(best) == 2 else None
    return None
