"""Cache: an answer may come sooner from the prefix cache, not differently."""

from __future__ import annotations

import secrets

from hullspeed.verify.check import Fault, check
from hullspeed.verify.compare import difference, logprobs_params
from hullspeed.verify.completion import complete
from hullspeed.verify.endpoint import Endpoint

_LINE = "The ledger of berth {n} lists rope, tar, lamp oil and {n} barrels of salted fish. "


@check(
    "V006",
    "a greedy answer is the same cold, cached and repeated",
    why="a prefix cache that restores the wrong state (hybrid models with speculation above all) "
    "answers differently from the second request on",
    fix="repeat with prefix caching off; then with speculative decoding off",
)
async def cold_equals_cached(endpoint: Endpoint) -> list[Fault]:
    """New prompts of several lengths, each asked three times; then again from a longer one."""
    api = endpoint.api
    extra = await logprobs_params(endpoint, api)
    faults = []
    for lines in (1, 6, 20):
        nonce = secrets.token_hex(8)
        prompt = f"Log {nonce}. " + "".join(_LINE.format(n=n) for n in range(3, 3 + lines))
        request = endpoint.generation(api, prompt, max_tokens=24, **extra)
        cold = await complete(endpoint, request)
        longer = endpoint.generation(api, prompt + cold.text + " And then", max_tokens=4)
        for name, before in (("cached", None), ("third", None), ("extended", longer)):
            if before is not None:
                await complete(endpoint, before)
            again = await complete(endpoint, request)
            found = difference(cold, again)
            if found:
                seen = {
                    "cold": cold.text,
                    name: again.text,
                    "cached_tokens": [cold.cached_tokens, again.cached_tokens],
                    "prompt_tokens": cold.prompt_tokens,
                }
                what = f"the {name} answer {found[0]}"
                faults.append(Fault(what, request, seen, found[1]))
    return faults
