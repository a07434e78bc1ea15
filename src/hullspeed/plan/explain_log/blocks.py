"""Which block counts reproduce the printed numbers under one layout."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.memory.vllm_groups import Layout
from hullspeed.plan.explain_log.facts import Facts
from hullspeed.units import GIB


def block_range(facts: Facts, unit: int) -> range:
    """Block counts that the printed GiB (two decimals) allows."""
    if facts.kv_gib is None:
        return range(1, 1 << 31)
    low, high = ((facts.kv_gib + d) * GIB for d in (-0.0051, 0.0051))
    return range(max(0, int(low // unit)), int(high // unit) + 1)


def solve(facts: Facts, layout: Layout, line: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Block counts that reproduce the log, with what each reproduces."""
    allowed = block_range(facts, layout.bytes_per_block)
    matched = () if facts.kv_gib is None else ("GiB",)
    if facts.needed_gib is not None and facts.max_model_len:
        needed = layout.blocks_per_request(facts.max_model_len) * layout.bytes_per_block
        if f"{needed / GIB:.2f}" != f"{facts.needed_gib:.2f}":
            return
        matched = (*matched, "needed GiB")
        if facts.longest_tokens is not None:
            allowed_longest = [b for b in allowed if _longest(layout, b) == facts.longest_tokens]
            if not allowed_longest:
                return
            allowed = range(allowed_longest[0], allowed_longest[-1] + 1)
            matched = (*matched, "longest context")
        yield allowed[len(allowed) // 2], matched
        return
    length = facts.concurrency_tokens or facts.max_model_len
    for blocks in _counts(facts, layout, line, length):
        if blocks not in allowed:
            continue
        names = matched
        if facts.tokens is not None:
            names = (*names, "tokens")
        if facts.concurrency is not None and length:
            ratio = blocks / layout.blocks_per_request(length)
            if f"{ratio:.2f}" != f"{facts.concurrency:.2f}":
                continue
            names = (*names, "concurrency")
        yield blocks, names


def _longest(layout: Layout, blocks: int) -> int:
    """The engine's own estimate: the largest length whose blocks fit, by bisection."""
    if layout.blocks_per_request(1) > blocks:
        return 0
    low, high = 1, blocks * max(group.block_tokens for group in layout.groups)
    while low < high:
        middle = (low + high + 1) // 2
        if layout.blocks_per_request(middle) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _counts(facts: Facts, layout: Layout, line: str, length: int | None) -> Iterator[int]:
    if facts.blocks is not None:
        yield facts.blocks
        return
    if facts.tokens is None:
        return
    if line == "blocks_per_group":
        smallest = min(group.block_tokens for group in layout.groups)
        if facts.tokens % smallest:
            return
        groups = len(layout.groups)
        first = facts.tokens // smallest * groups
        yield from range(first, first + groups)
        return
    if not length:
        return
    per_request = layout.blocks_per_request(length)
    first = -(-facts.tokens * per_request // length)
    for blocks in (first - 1, first, first + 1):
        if blocks > 0 and int(blocks / per_request * length) == facts.tokens:
            yield blocks


def luck(facts: Facts, layout: Layout) -> float:
    """Chance that a wrong layout yields the printed token count with some integer block count."""
    length = facts.concurrency_tokens or facts.max_model_len
    if facts.tokens is None or not length:
        return 1.0
    step = max(1.0, length / layout.blocks_per_request(length))
    return min(1.0, 1 / step)
