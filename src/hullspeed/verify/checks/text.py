"""Text: characters arrive whole, however many tokens they take."""

from __future__ import annotations

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import complete_all
from hullspeed.verify.endpoint import Endpoint

_PROMPTS = (
    "🦊🐙🦊🐙🦊🐙🦊🐙🦊🐙🦊🐙",
    "日本語日本語日本語日本語日本語",
    "Ünïcödé Ünïcödé Ünïcödé Ünïcödé Ünïcödé",
    "Привет, мир! Привет, мир! Привет, мир!",
)


@check(
    "V009",
    "multi-byte characters stream whole",
    why="a character that takes several tokens comes out as U+FFFD when each is decoded alone",
    fix="hold back incomplete UTF-8 in the incremental decoder",
)
async def whole_characters(endpoint: Endpoint) -> list[Fault]:
    """Patterns that a language model continues; no replacement character but at a cut end."""
    api = endpoint.api
    faults = []
    seen_multibyte = False
    requests = [
        endpoint.generation(api, prompt, max_tokens=24, stream=stream)
        for prompt in _PROMPTS
        for stream in (False, True)
    ]
    completions = await complete_all(endpoint, requests)
    for i, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        text = completion.text
        seen_multibyte |= not text.isascii()
        inside = text.rstrip("\ufffd") if completion.finish_reason == "length" else text
        if "\ufffd" in inside:
            how = "streamed" if i % 2 else "unstreamed"
            faults.append(Fault(f"U+FFFD in the {how} answer", request, {"text": text}))
    if not seen_multibyte:
        raise Skip("the model answered in ASCII only")
    return faults
