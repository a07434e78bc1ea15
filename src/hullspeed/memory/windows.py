"""Windows: how many pages layers with a sliding window need, and their share of a pool.

Such a layer looks ``window_tokens`` back, the present token included. Computing ``n`` tokens it
touches ``window_tokens - 1 + n`` positions in a row; a run of ``m`` positions lies in at most
``ceil((m - 1) / page_tokens) + 1`` pages.
"""

from __future__ import annotations

from typing import NamedTuple

from hullspeed.arch.mixers import SlidingAttention
from hullspeed.arch.model import ModelArch
from hullspeed.memory.layers import keeps_state

STATE_SHARE = 0.4  # of a pool, for the ends that prefixes are continued from
STATES_PER_RUNNING = 8  # unless a budget is given: what one conversation's checkpoints may take


def held_pages(window_tokens: int, page_tokens: int, n_tokens: int = 1) -> int:
    """Most pages that a sequence holds while it computes ``n_tokens`` tokens."""
    return -(-(window_tokens + n_tokens - 2) // page_tokens) + 1


def least_pages(window_tokens: int, page_tokens: int, step_tokens: int) -> int:
    """Pages with which one sequence always gets on: its own, and those of the saved place that it
    started from, which may not be evicted meanwhile.
    """
    held = held_pages(window_tokens, page_tokens, step_tokens)
    return held + held_pages(window_tokens, page_tokens)


def largest_window(arch: ModelArch) -> int:
    """Tokens that the layers with a window see, the most; 0 where no layer has one, or where others
    have recurrent state: such a model is continued from that alone.
    """
    if keeps_state(arch):
        return 0
    mixers = (layer.mixer for layer in arch.layers)
    return max((m.window_tokens for m in mixers if isinstance(m, SlidingAttention)), default=0)


def window_fits(
    window_tokens: int, *, page_tokens: int, step_tokens: int, context_tokens: int
) -> bool:
    """Whether a sequence of ``context_tokens`` holds less of a window than of the context: only
    then are pages of windows kept apart.
    """
    if not window_tokens:
        return False
    held = held_pages(window_tokens, page_tokens, min(step_tokens, context_tokens))
    return held < -(-context_tokens // page_tokens)


class PageSplit(NamedTuple):
    """Pages of the layers that see everything, and of those with a window."""

    n_pages: int
    n_window_pages: int


def least_split(
    window_tokens: int, page_tokens: int, step_tokens: int, context_tokens: int
) -> PageSplit:
    """With which one whole context always gets on."""
    return PageSplit(
        -(-context_tokens // page_tokens),
        least_pages(window_tokens, page_tokens, min(step_tokens, context_tokens)),
    )


def split_pages(
    pool_bytes: int,
    *,
    page_bytes: int,
    window_page_bytes: int,
    window_tokens: int,
    page_tokens: int,
    step_tokens: int,
    context_tokens: int,
    max_running: int,
    share: float = STATE_SHARE,
    given: bool = False,
) -> PageSplit:
    """Share ``pool_bytes`` out: first one whole context, then up to ``share`` for windows (as many
    pages as eight ends of prefixes for each running sequence, unless the pool's size was given),
    then pages of the others, at most what ``max_running`` contexts fill unless given.

    Where no layer sees everything (``page_bytes`` 0), pages are only numbers, and windows get all.
    """
    context_pages, least = least_split(window_tokens, page_tokens, step_tokens, context_tokens)
    most = max(least, STATES_PER_RUNNING * max_running * held_pages(window_tokens, page_tokens))
    beside = pool_bytes - context_pages * page_bytes
    wanted = min(beside, int(pool_bytes * share)) if page_bytes else pool_bytes
    n_windows = max(least, wanted // window_page_bytes)
    n_windows = n_windows if given else min(n_windows, most)
    if not page_bytes:
        return PageSplit(STATES_PER_RUNNING * max_running * context_pages, n_windows)
    n_pages = max(0, pool_bytes - n_windows * window_page_bytes) // page_bytes
    return PageSplit(n_pages if given else min(n_pages, max_running * context_pages), n_windows)
