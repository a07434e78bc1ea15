"""Room: how many pages and recurrent states the engine keeps, from a budget of bytes."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from hullspeed.arch.mixers import FullAttention, GatedDeltaNet, SlidingAttention
from hullspeed.arch.model import ModelArch
from hullspeed.errors import CapacityError
from hullspeed.memory.ours import kv_format
from hullspeed.memory.windows import (
    STATES_PER_RUNNING,
    least_split,
    split_pages,
    window_apart,
)
from hullspeed.runtime.config import EngineConfig
from hullspeed.units import format_bytes


class Room(NamedTuple):
    """Memory of sequences, running and cached.

    Attributes:
        page_bytes: Bytes of a page over all layers that have it.
        state_bytes: Bytes of a running state over all layers; 0 for models without.
        n_stored_slots: Cached states kept in fewer bits, ``stored_bytes`` each; 0 where the cache
            shares the running states' slots.
        n_window_pages: Pages of the layers with a window, ``window_page_bytes`` each; 0 where they
            keep pages as the others do.
        window_tokens: What these layers see; 0 without pages of their own.
    """

    n_pages: int
    page_bytes: int
    n_state_slots: int = 0
    state_bytes: int = 0
    n_stored_slots: int = 0
    stored_bytes: int = 0
    n_window_pages: int = 0
    window_page_bytes: int = 0
    window_tokens: int = 0

    @property
    def total_bytes(self) -> int:
        """Of all of it."""
        pages = self.n_pages * self.page_bytes + self.n_window_pages * self.window_page_bytes
        return (
            pages + self.n_state_slots * self.state_bytes + self.n_stored_slots * self.stored_bytes
        )


def plan_room(
    config: EngineConfig, arch: ModelArch, context_tokens: int, available_bytes: int
) -> Room:
    """Share the budget out: ``config.kv_budget_bytes``, or half of ``available_bytes``, the memory
    that is free with the weights loaded.

    Raises:
        UsageError: a share that cannot be.
        CapacityError: the budget does not hold the running states and one context.
    """
    config.check()
    given = config.kv_budget_bytes
    budget = available_bytes // 2 if given is None else given
    # Hashes of pages find whole pages of every layer, or nothing.
    window = 0 if config.cache == "hash" else _window(config, arch, context_tokens)
    if window:
        return _window_room(config, arch, context_tokens, budget, window)
    page_bytes = page_size(arch, config.page_tokens, config.kv_dtype, draft=config.draft == "mtp")
    state_bytes = arch.state_bytes("fp32", "fp32")
    n_slots = n_stored = each = 0
    if state_bytes and config.state_store == "fp32":
        n_slots = _state_slots(config, state_bytes, budget)
    elif state_bytes:
        each = stored_size(arch, config.state_store)
        n_slots, n_stored = _split_slots(config, state_bytes, each, budget)
    budget -= n_slots * state_bytes + n_stored * each
    n_pages = page_count(config, context_tokens, page_bytes, budget)
    return Room(n_pages, page_bytes, n_slots, state_bytes, n_stored, each)


def page_size(
    arch: ModelArch,
    page_tokens: int,
    kv_dtype: str = "fp32",
    *,
    draft: bool = False,
    windowed: bool | None = None,
) -> int:
    """Bytes of a page over all layers, or over those with or without a window alone; with ``draft``
    the multi-token-prediction layer's too.
    """
    extra = chain.from_iterable(e.layers for e in arch.extras) if draft else ()
    mixers = [layer.mixer for layer in (*arch.layers, *extra)]
    wanted = [m for m in mixers if isinstance(m, FullAttention)]
    if windowed is not None:
        wanted = [m for m in wanted if isinstance(m, SlidingAttention) == windowed]
    return page_tokens * sum(mixer.kv_bytes(1, kv_format(kv_dtype)) for mixer in wanted)


def _window(config: EngineConfig, arch: ModelArch, context_tokens: int) -> int:
    return window_apart(
        arch,
        page_tokens=config.page_tokens,
        step_tokens=max(config.step_tokens, config.max_running),
        context_tokens=context_tokens,
    )


def _window_room(
    config: EngineConfig, arch: ModelArch, context_tokens: int, budget: int, window: int
) -> Room:
    page_tokens, step_tokens = config.page_tokens, max(config.step_tokens, config.max_running)
    page_bytes, window_bytes = (
        page_size(
            arch, page_tokens, config.kv_dtype, draft=config.draft == "mtp", windowed=windowed
        )
        for windowed in (False, True)
    )
    split = split_pages(
        budget,
        page_bytes=page_bytes,
        window_page_bytes=window_bytes,
        window_tokens=window,
        page_tokens=page_tokens,
        step_tokens=step_tokens,
        context_tokens=context_tokens,
        max_running=config.max_running,
        share=config.state_share,
        given=config.kv_budget_bytes is not None,
    )
    least = least_split(window, page_tokens, step_tokens, context_tokens)
    needed = least.n_pages * page_bytes + least.n_window_pages * window_bytes
    if needed > budget:
        raise CapacityError(
            f"the KV cache does not hold one context of {context_tokens} tokens "
            f"({format_bytes(needed)}, windows of {window} tokens included)",
            seen=format_bytes(max(budget, 0)),
            fix="raise kv_budget_bytes, or lower max_context_tokens",
        )
    return Room(
        split.n_pages,
        page_bytes,
        n_window_pages=split.n_window_pages,
        window_page_bytes=window_bytes,
        window_tokens=window,
    )


def stored_size(arch: ModelArch, dtype: str) -> int:
    """Bytes of a cached state over all layers: bf16, or int8 with a float32 scale for each row;
    the convolution's inputs in bf16.
    """
    total = 0
    for layer in arch.layers:
        mixer = layer.mixer
        if isinstance(mixer, GatedDeltaNet):
            rows = mixer.v_heads * mixer.k_dim
            each = mixer.v_dim + 4 if dtype == "int8" else 2 * mixer.v_dim
            total += rows * each + 2 * mixer.conv_dim * (mixer.conv_kernel - 1)
    return total


def page_count(config: EngineConfig, context_tokens: int, page_bytes: int, budget: int) -> int:
    """Pages that ``budget`` bytes buy, at most ``max_running`` full contexts unless it was given.

    Raises:
        CapacityError: the budget does not hold one context.
    """
    context_pages = -(-context_tokens // config.page_tokens)
    affordable = max(budget, 0) // page_bytes
    if affordable < context_pages:
        raise CapacityError(
            f"the KV cache does not hold one context of {context_tokens} tokens "
            f"({format_bytes(context_pages * page_bytes)})",
            seen=format_bytes(affordable * page_bytes),
            fix="raise kv_budget_bytes, or lower max_context_tokens",
        )
    if config.kv_budget_bytes is not None:
        return affordable
    return min(affordable, config.max_running * context_pages)


def _split_slots(
    config: EngineConfig, state_bytes: int, stored_bytes: int, budget: int
) -> tuple[int, int]:
    """A slot for each running sequence; the rest of the share for stored states, one at least."""
    needed = config.max_running
    _check_states(config, needed, state_bytes, budget - stored_bytes)
    affordable = (int(budget * config.state_share) - needed * state_bytes) // stored_bytes
    if config.kv_budget_bytes is None:
        affordable = min(affordable, STATES_PER_RUNNING * config.max_running)
    return needed, max(1, affordable)


def _check_states(config: EngineConfig, needed: int, state_bytes: int, budget: int) -> None:
    if needed * state_bytes > budget:
        raise CapacityError(
            f"{config.max_running} running sequences need {needed} recurrent states of "
            f"{format_bytes(state_bytes)}",
            seen=format_bytes(budget),
            fix="lower max_running, or raise kv_budget_bytes",
        )


def _state_slots(config: EngineConfig, state_bytes: int, budget: int) -> int:
    """Each running sequence reads one slot and may write another; the rest is for the cache."""
    needed = 2 * config.max_running + 1
    _check_states(config, needed, state_bytes, budget)
    affordable = int(budget * config.state_share) // state_bytes
    if config.kv_budget_bytes is None:
        affordable = min(affordable, STATES_PER_RUNNING * config.max_running)
    return max(needed, affordable)
