"""Room: how many pages and recurrent states the embedded engine makes of a budget of bytes.

The engine itself, its sizing and its twin all ask here, so that they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from hullspeed.arch.mixers import GatedDeltaNet, Mixer
from hullspeed.arch.model import ModelArch
from hullspeed.errors import CapacityError, UnsupportedModelError, UsageError
from hullspeed.memory.windows import (
    STATE_SHARE,
    STATES_PER_RUNNING,
    held_pages,
    largest_window,
    least_split,
    split_pages,
    window_fits,
)
from hullspeed.units import format_bytes

STATE_STORES = ("fp32", "bf16", "int8")
_KV_FORMATS = {
    "fp32": "fp32", "fp16": "fp16", "bf16": "bf16",
    "int8": "int8_per_token_head", "fp8": "fp8_per_token_head",
}  # fmt: skip


def kv_format(kv_dtype: str | None) -> str:
    """The number format of the engine's ``kv_dtype`` (fp32 unless given), as sizes know it: int8
    and fp8 have a scale for each token and head.

    Raises:
        UsageError: for a type that the engine does not have.
    """
    name = "fp32" if kv_dtype in (None, "auto") else str(kv_dtype)
    if name not in _KV_FORMATS:
        raise UsageError(
            "the embedded engine has no such KV cache type",
            seen=name,
            fix=f"use one of {', '.join(_KV_FORMATS)}",
        )
    return _KV_FORMATS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRules:
    """What decides how a budget is shared out; the names are those of ``EngineConfig``.

    Attributes:
        given: Whether the budget was asked for: all of it is used then. Else no more than
            ``max_running`` sequences and their conversations can use.
        windows_apart: Whether layers with a window may have pages of their own.
        draft: Whether the multi-token-prediction layer has pages too.
    """

    page_tokens: int
    max_running: int
    step_tokens: int
    kv_dtype: str = "fp32"
    state_store: str = "fp32"
    state_share: float = STATE_SHARE
    given: bool = False
    windows_apart: bool = True
    draft: bool = False

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: naming the rule.
        """
        if not 0 < self.state_share < 1:
            raise UsageError("state_share must lie between 0 and 1", seen=self.state_share)
        if self.state_store not in STATE_STORES:
            raise UsageError(
                "the embedded engine keeps cached states in no such type",
                seen=self.state_store,
                fix=f"use one of {', '.join(STATE_STORES)}",
            )


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

    @property
    def end_bytes(self) -> int:
        """Of a state that the cache keeps; 0 for models without."""
        return self.stored_bytes or self.state_bytes


class Sizes(NamedTuple):
    """Bytes of a model's pages and states, over all layers.

    Attributes:
        page: Of a page of every layer that keeps tokens.
        full_page, window_page: Of those without a window and with one.
        state: Of a running state: all of it in float32.
        stored: Of one that the cache keeps.
        window_tokens: The largest window; 0 where none may have pages of its own.
    """

    page: int
    full_page: int
    window_page: int
    state: int
    stored: int
    window_tokens: int


def sizes_of(arch: ModelArch, rules: RoomRules) -> Sizes:
    """Sizes of ``arch`` under ``rules``.

    Raises:
        UsageError: a rule that cannot be, or a draft layer that the model does not have.
        UnsupportedModelError: no layer keeps anything, or states that cannot be kept in fewer bits.
    """
    rules.check()
    full, window = (
        page_size(arch, rules.page_tokens, rules.kv_dtype, draft=rules.draft, windowed=windowed)
        for windowed in (False, True)
    )
    state = arch.state_bytes("fp32", "fp32")
    if not full + window + state:
        raise UnsupportedModelError("no layer keeps keys, values or state", seen=arch.family)
    apart = state and rules.state_store != "fp32"
    return Sizes(
        page=full + window,
        full_page=full,
        window_page=window,
        state=state,
        stored=stored_size(arch, rules.state_store) if apart else 0,
        # Hashes of pages find whole pages of every layer, or nothing.
        window_tokens=largest_window(arch) if rules.windows_apart else 0,
    )


def plan_room(arch: ModelArch, rules: RoomRules, context_tokens: int, budget_bytes: int) -> Room:
    """Share ``budget_bytes`` out among pages and states.

    Raises:
        UsageError: a rule that cannot be.
        CapacityError: the budget does not hold the running states and one context.
    """
    return share_out(sizes_of(arch, rules), rules, context_tokens, budget_bytes)


def share_out(sizes: Sizes, rules: RoomRules, context_tokens: int, budget_bytes: int) -> Room:
    """:func:`plan_room` of a model whose sizes are known."""
    step_tokens = max(rules.step_tokens, rules.max_running)
    if window_fits(
        sizes.window_tokens,
        page_tokens=rules.page_tokens,
        step_tokens=step_tokens,
        context_tokens=context_tokens,
    ):
        return _window_room(sizes, rules, context_tokens, budget_bytes, step_tokens)
    n_slots = n_stored = 0
    if sizes.stored:
        n_slots, n_stored = _split_slots(sizes, rules, budget_bytes)
    elif sizes.state:
        n_slots = _state_slots(sizes, rules, budget_bytes)
    left = budget_bytes - n_slots * sizes.state - n_stored * sizes.stored
    n_pages = page_count(rules, context_tokens, sizes.page, left)
    return Room(n_pages, sizes.page, n_slots, sizes.state, n_stored, sizes.stored)


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

    Raises:
        UsageError: for a KV type that the engine does not have, or a draft layer that the model
            does not have.
    """
    extra = list(chain.from_iterable(e.layers for e in arch.extras)) if draft else []
    if draft and not extra:
        raise UsageError(
            "drafts need a multi-token-prediction layer, and this model has none", seen=arch.family
        )
    mixers = [layer.mixer for layer in (*arch.layers, *extra)]
    if windowed is not None:
        mixers = [m for m in mixers if _has_window(m) == windowed]
    return page_tokens * sum(mixer.kv_bytes(1, kv_format(kv_dtype)) for mixer in mixers)


def _has_window(mixer: Mixer) -> bool:
    return getattr(mixer, "window_tokens", None) is not None


def stored_size(arch: ModelArch, dtype: str) -> int:
    """Bytes of a cached state over all layers: bf16, or int8 with a float32 scale for each row;
    the convolution's inputs in bf16.

    Raises:
        UnsupportedModelError: for states of other layers than Gated DeltaNet.
    """
    total = 0
    for layer in arch.layers:
        mixer = layer.mixer
        if isinstance(mixer, GatedDeltaNet):
            rows = mixer.v_heads * mixer.k_dim
            each = mixer.v_dim + 4 if dtype == "int8" else 2 * mixer.v_dim
            total += rows * each + 2 * mixer.conv_dim * (mixer.conv_kernel - 1)
        elif mixer.state_bytes("fp32", "fp32"):
            raise UnsupportedModelError(
                "only states of Gated DeltaNet layers are kept in fewer bits",
                seen=mixer.kind,
                fix="keep them in fp32",
            )
    return total


def page_count(rules: RoomRules, context_tokens: int, page_bytes: int, budget_bytes: int) -> int:
    """Pages that ``budget_bytes`` buy, at most ``max_running`` full contexts unless it was given.

    Raises:
        CapacityError: the budget does not hold one context.
    """
    context_pages = -(-context_tokens // rules.page_tokens)
    most = rules.max_running * context_pages
    if not page_bytes:  # nothing but states: pages are only numbers
        return most
    affordable = max(budget_bytes, 0) // page_bytes
    if affordable < context_pages:
        raise CapacityError(
            f"the KV cache does not hold one context of {context_tokens} tokens "
            f"({format_bytes(context_pages * page_bytes)})",
            seen=format_bytes(affordable * page_bytes),
            fix="raise kv_budget_bytes, or lower max_context_tokens",
        )
    return affordable if rules.given else min(affordable, most)


def window_pages(room: Room, page_tokens: int, n_tokens: int) -> int:
    """Pages of windows that a sequence of ``n_tokens`` tokens holds while it decodes."""
    return min(held_pages(room.window_tokens, page_tokens), -(-n_tokens // page_tokens))


def _window_room(
    sizes: Sizes, rules: RoomRules, context_tokens: int, budget_bytes: int, step_tokens: int
) -> Room:
    page_tokens, window = rules.page_tokens, sizes.window_tokens
    split = split_pages(
        budget_bytes,
        page_bytes=sizes.full_page,
        window_page_bytes=sizes.window_page,
        window_tokens=window,
        page_tokens=page_tokens,
        step_tokens=step_tokens,
        context_tokens=context_tokens,
        max_running=rules.max_running,
        share=rules.state_share,
        given=rules.given,
    )
    least = least_split(window, page_tokens, step_tokens, context_tokens)
    needed = least.n_pages * sizes.full_page + least.n_window_pages * sizes.window_page
    if needed > budget_bytes:
        raise CapacityError(
            f"the KV cache does not hold one context of {context_tokens} tokens "
            f"({format_bytes(needed)}, windows of {window} tokens included)",
            seen=format_bytes(max(budget_bytes, 0)),
            fix="raise kv_budget_bytes, or lower max_context_tokens",
        )
    return Room(
        split.n_pages,
        sizes.full_page,
        n_window_pages=split.n_window_pages,
        window_page_bytes=sizes.window_page,
        window_tokens=window,
    )


def _split_slots(sizes: Sizes, rules: RoomRules, budget_bytes: int) -> tuple[int, int]:
    """A slot for each running sequence; the rest of the share for stored states, one at least."""
    needed = rules.max_running
    _check_states(rules, needed, sizes.state, budget_bytes - sizes.stored)
    affordable = (int(budget_bytes * rules.state_share) - needed * sizes.state) // sizes.stored
    if not rules.given:
        affordable = min(affordable, STATES_PER_RUNNING * rules.max_running)
    return needed, max(1, affordable)


def _state_slots(sizes: Sizes, rules: RoomRules, budget_bytes: int) -> int:
    """Each running sequence reads one slot and may write another; the rest is for the cache."""
    needed = 2 * rules.max_running + 1
    _check_states(rules, needed, sizes.state, budget_bytes)
    affordable = int(budget_bytes * rules.state_share) // sizes.state
    if not rules.given:
        affordable = min(affordable, STATES_PER_RUNNING * rules.max_running)
    return max(needed, affordable)


def _check_states(rules: RoomRules, needed: int, state_bytes: int, budget_bytes: int) -> None:
    if needed * state_bytes > budget_bytes:
        raise CapacityError(
            f"{rules.max_running} running sequences need {needed} recurrent states of "
            f"{format_bytes(state_bytes)}",
            seen=format_bytes(max(budget_bytes, 0)),
            fix="lower max_running, or raise kv_budget_bytes",
        )
