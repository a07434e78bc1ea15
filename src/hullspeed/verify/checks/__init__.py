"""The checks, one file per theme; a code never changes its meaning."""

from hullspeed.verify.check import Check
from hullspeed.verify.checks import (
    cache,
    cancel,
    length,
    limits,
    load,
    logprobs,
    readiness,
    schema,
    seed,
    stop,
    stream,
    template,
    text,
    tools,
    usage,
)

CHECKS: tuple[Check, ...] = (
    readiness.generates,
    readiness.answers_in_content,
    stream.framing,
    usage.counts,
    stream.same_text,
    cache.cold_equals_cached,
    stop.never_emitted,
    length.exact,
    text.whole_characters,
    load.alone_equals_crowd,
    cancel.frees_capacity,
    limits.refuses_long_prompts,
    limits.refuses_bad_parameters,
    logprobs.consistent,
    seed.repeats,
    template.one_count,
    template.no_think_tags,
    tools.calls_are_whole,
    schema.enforced_or_refused,
)

__all__ = ["CHECKS"]
