"""Paged attention: every query block reads each page of its context once.

A work item is (span, key/value head, block of queries): a decoding sequence is one query times the
query heads that share the head; a prompt chunk is blocks of about BLOCK_ROWS rows. Scores of a page
are one matrix tile against the transposed keys; softmax runs online over the pages in order, so a
result depends neither on the batch nor on how a prompt was cut into chunks. Nor on what LLVM makes
of it, which differs with what was compiled before: sums have an order of their own.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.cpu.formats import FP8, LOADED_FP8, kind_of, times
from hullspeed.kernels.cpu.jit import kernel
from hullspeed.kernels.cpu.matmul import matmul
from hullspeed.kernels.cpu.simd import exp, total_of

BLOCK_ROWS = 48  # queries x heads of an item: scores, accumulators and a page stay in L2

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Codes = NDArray[Any]  # one of the formats' stand-ins


@kernel(parallel=True)
def attend_parallel(
    q: Floats, out: Floats, keys: Codes, values: Codes, key_scales: Floats, value_scales: Floats,
    positions: Ints, page_table: Ints, items: Ints, buckets: Ints, scale: np.float32, window: int,
    sinks: Floats,
) -> None:  # fmt: skip
    """One thread for each bucket of items; arguments as :func:`attend`."""
    for b in numba.prange(len(buckets) - 1):
        attend(
            q, out, keys, values, key_scales, value_scales, positions, page_table, items,
            buckets[b], buckets[b + 1], scale, window, sinks,
        )  # fmt: skip


@kernel()
def attend(
    q: Floats, out: Floats, keys: Codes, values: Codes, key_scales: Floats, value_scales: Floats,
    positions: Ints, page_table: Ints, items: Ints, first: int, last: int, scale: np.float32,
    window: int, sinks: Floats,
) -> None:  # fmt: skip
    """Items ``first .. last``, each a row (span, kv head, first token, tokens) of ``items``.

    ``q`` and ``out`` are ``[T, Q, D]``, ``keys`` ``[n_pages, G, D, P]``, ``values``
    ``[n_pages, G, P, D]`` in one of the formats; their scales ``[n_pages, G, P]``, or empty;
    ``window`` is how many keys a query sees, 0 for all; ``sinks`` are the heads' scores of a key
    without a value, or empty.
    """
    scaled = len(key_scales) > 0
    factor = LOADED_FP8 if kind_of(keys) == FP8 else np.float32(1)
    n_heads, dim = q.shape[1], q.shape[2]
    kv_heads, page_tokens = keys.shape[1], keys.shape[3]
    group = n_heads // kv_heads
    most = 0
    for i in range(first, last):
        most = max(most, items[i, 3])
    rows = most * group
    packed = np.empty((rows, dim), np.float32)
    mixed = np.empty((rows, dim), np.float32)
    scores = np.empty((rows, page_tokens), np.float32)
    highest = np.empty(rows, np.float32)
    total = np.empty(rows, np.float32)
    for i in range(first, last):
        span, head, token, n_tokens = items[i, 0], items[i, 1], items[i, 2], items[i, 3]
        _pack(q, token, n_tokens, head, group, scale, packed)
        rows = n_tokens * group
        mixed[:rows] = 0
        highest[:rows] = -np.inf
        total[:rows] = 0
        start, end = positions[token], positions[token] + n_tokens
        first_page = max(0, start - window + 1) // page_tokens if window else 0
        n_pages = (end + page_tokens - 1) // page_tokens
        for p in range(first_page, n_pages):
            page = page_table[span, p]
            begin = p * page_tokens
            depth = min(page_tokens, end - begin)
            k0 = (page * kv_heads + head) * dim * page_tokens
            matmul(rows, page_tokens, dim, packed, 0, keys, k0, scores, 0, 0, values, k0)
            if scaled:
                times(scores, rows, key_scales[page, head], factor)
            for row in range(rows):
                position = start + row // group
                low = max(0, position - window + 1 - begin) if window else 0
                high = min(page_tokens, position + 1 - begin)
                if low == 0 and high == page_tokens:
                    # The same call: with plain bounds LLVM vectorises it.
                    _online_softmax(scores, mixed, highest, total, row, 0, page_tokens)
                else:
                    _online_softmax(scores, mixed, highest, total, row, low, high)
            if scaled:
                times(scores, rows, value_scales[page, head], factor)
            follows = page_table[span, min(p + 1, n_pages - 1)]
            n0 = (follows * kv_heads + head) * dim * page_tokens
            matmul(rows, dim, depth, scores, 0, values, k0, mixed, 0, 1, keys, n0)
        for row in range(rows):
            if len(sinks):
                sink = sinks[head * group + row % group]
                # As weights are relative to the highest score; beyond e^88 nothing else counts.
                total[row] += exp(sink - highest[row])
            scale_out = np.float32(1.0) / total[row]
            target = out[token + row // group, head * group + row % group]
            for d in range(dim):
                target[d] = mixed[row, d] * scale_out


@kernel()
def _pack(
    q: Floats, token: int, n_tokens: int, head: int, group: int, scale: np.float32, packed: Floats
) -> None:
    """The item's queries, scaled, row by row."""
    for t in range(n_tokens):
        for r in range(group):
            source, target = q[token + t, head * group + r], packed[t * group + r]
            for d in range(q.shape[2]):
                target[d] = source[d] * scale


@kernel()
def _online_softmax(
    scores: Floats, mixed: Floats, highest: Floats, total: Floats, row: int, low: int, high: int
) -> None:
    """Turn scores ``low .. high`` of a row into weights, the others into zeros; rescale what was
    mixed so far if the maximum rose. Source: Milakov and Gimelshein, arXiv 1805.02867.
    """
    line = scores[row]
    if high <= low:
        line[:] = 0
        return
    top = _highest(line, low, high)
    if top > highest[row]:
        shrink = exp(highest[row] - top) if total[row] > 0 else np.float32(0)
        highest[row] = top
        total[row] *= shrink
        for d in range(mixed.shape[1]):
            mixed[row, d] *= shrink
    top = highest[row]
    for j in range(low, high):
        line[j] = exp(line[j] - top)
    for j in range(low):
        line[j] = 0
    for j in range(high, len(line)):
        line[j] = 0
    total[row] += total_of(line, len(line))


@kernel(math="finite")
def _highest(line: Floats, low: int, high: int) -> np.float32:
    top: np.float32 = line[low]
    for j in range(low, high):
        top = max(top, line[j])
    return top


@kernel()
def plan_tokens(
    span_starts: Ints, positions: Ints, page_table: Ints, page_tokens: int, slots: NDArray[np.int64]
) -> None:
    """``slots[t] = page * page_tokens + offset`` of each token."""
    for s in range(len(span_starts) - 1):
        for t in range(span_starts[s], span_starts[s + 1]):
            position = positions[t]
            page = np.int64(page_table[s, position // page_tokens])
            slots[t] = page * page_tokens + position % page_tokens


@kernel()
def plan_items(
    span_starts: Ints, positions: Ints, kv_heads: int, block_tokens: int, window: int,
    n_buckets: int,
) -> tuple[Ints, Ints]:  # fmt: skip
    """Cut a batch into items and share them out.

    Returns:
        items ``[n, 4]`` and buckets ``[n_buckets + 1]``: bucket b is items
        ``buckets[b] : buckets[b + 1]``; the buckets' costs differ by at most one item.
    """
    n_spans = len(span_starts) - 1
    n_items = 0
    for s in range(n_spans):
        length = span_starts[s + 1] - span_starts[s]
        n_items += (length + block_tokens - 1) // block_tokens * kv_heads
    found = np.empty((n_items, 4), np.int32)
    cost = np.empty(n_items, np.int64)
    i = 0
    for s in range(n_spans):
        begin, end = span_starts[s], span_starts[s + 1]
        for token in range(begin, end, block_tokens):
            n_tokens = min(block_tokens, end - token)
            seen = positions[token] + n_tokens
            if window:
                seen = min(seen, window + n_tokens)
            for head in range(kv_heads):
                found[i, 0], found[i, 1], found[i, 2], found[i, 3] = s, head, token, n_tokens
                # Reading a page costs about as much as eight rows of arithmetic on it.
                cost[i] = np.int64(seen) * (n_tokens + 8)
                i += 1
    return _share_out(found, cost, n_buckets)


@kernel()
def _share_out(found: Ints, cost: NDArray[np.int64], n_buckets: int) -> tuple[Ints, Ints]:
    """Each to the bucket with the least so far; from the end, where a chunk's dearest blocks are.

    Loops are spelled out: numpy's own sort and argmin take numba seconds to compile.
    """
    n_items = len(found)
    owner = np.zeros(n_items, np.int32)
    load = np.zeros(n_buckets, np.int64)
    buckets = np.zeros(n_buckets + 1, np.int32)
    for i in range(n_items - 1, -1, -1):
        least = 0
        for b in range(1, n_buckets):
            if load[b] < load[least]:
                least = b
        owner[i] = least
        load[least] += cost[i]
        buckets[least + 1] += 1
    for b in range(n_buckets):
        buckets[b + 1] += buckets[b]
    items = np.empty((n_items, 4), np.int32)
    for b in range(n_buckets):
        at = buckets[b]
        for i in range(n_items):
            if owner[i] == b:
                for field in range(4):
                    items[at, field] = found[i, field]
                at += 1
    return items, buckets
