"""vLLM's KV cache planner, re-derived: layers into groups that share one pool of equal blocks.

Every group draws block ids from one pool, and a block is as large in every group. So a request
costs the sum over groups of its blocks there, and "tokens" of a hybrid model are not a pool of
tokens. Read in v1/core/kv_cache_utils.py (0.19 to 0.31), v1/core/kv_cache_planning.py (0.33),
v1/kv_cache_interface.py and platforms/interface.py::_align_hybrid_block_size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from hullspeed.errors import UnsupportedModelError, UsageError
from hullspeed.memory.layers import CacheLayer

DEFAULT_BLOCK_TOKENS = 16
GDN_PREFILL_TOKENS = 64
PAD_RATIO = 1.5  # below it, the smaller bucket is padded instead of the larger one split


class GroupKind(StrEnum):
    """How a group's blocks per request grow."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


class StateMode(StrEnum):
    """How many state blocks a request may hold: vLLM's ``mamba_cache_mode``."""

    NONE = "none"  # prefix caching off: the running state
    ALIGN = "align"  # prefix caching on: plus the last block boundary's
    ALL = "all"  # one at every block boundary


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table.

    Attributes:
        layers: Indices of its layers; fewer than the block is wide when padded.
        block_tokens: Tokens of one block in this group.
        page_bytes: Bytes of one block in one layer.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    block_tokens: int
    page_bytes: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The groups of a model and what one block costs on the widest rank.

    Attributes:
        padding_layers: Layers' worth of pages that hold nothing.
        state_mode: Of the state groups.
        draft_tokens: Each adds a full state block per state group.
        checkpoint_blocks: More state blocks per request for FlashInfer's GDN prefill (0 or 1).
        batched_tokens: ``max_num_batched_tokens``: a sliding group holds a window and a chunk.
    """

    groups: tuple[Group, ...]
    bytes_per_block: int
    padding_layers: int
    state_mode: StateMode
    draft_tokens: int
    checkpoint_blocks: int
    batched_tokens: int

    @property
    def block_tokens(self) -> int:
        """Tokens of an attention block (the smallest among groups that keep tokens)."""
        kept = [g.block_tokens for g in self.groups if g.kind is not GroupKind.STATE]
        return min(kept or [g.block_tokens for g in self.groups])

    @property
    def has_state(self) -> bool:
        """Whether any group holds recurrent state."""
        return any(g.kind is GroupKind.STATE for g in self.groups)

    def blocks_in(self, group: Group, context_tokens: int) -> int:
        """Blocks that one request of this length may hold in one group."""
        if group.kind is GroupKind.FULL:
            return -(-context_tokens // group.block_tokens)
        if group.kind is GroupKind.SLIDING:
            window = group.window_tokens or context_tokens
            # The window may start inside a block, hence one more.
            live = min(window - 1 + self.batched_tokens, context_tokens)
            return -(-live // group.block_tokens) + 1
        if self.state_mode is StateMode.ALL:
            return -(-context_tokens // group.block_tokens)
        base = 2 + self.checkpoint_blocks if self.state_mode is StateMode.ALIGN else 1
        return base + self.draft_tokens

    def blocks_per_request(self, context_tokens: int) -> int:
        """Blocks that one request of this length may hold, all groups."""
        return sum(self.blocks_in(group, context_tokens) for group in self.groups)


def aligned_block_tokens(
    state_bytes: int, token_bytes: int, *, base_tokens: int | None, gdn_prefill: bool
) -> int:
    """Tokens of an attention block whose page covers one state page.

    ``A * ceil(state / (A * token))`` with A = 16, a multiple of 64 under FlashInfer's GDN prefill,
    or a multiple of ``--block-size`` when given (logs: 816 asked, 1632 set).
    """
    align = DEFAULT_BLOCK_TOKENS if base_tokens is None else base_tokens
    if gdn_prefill:
        align = math.lcm(align, GDN_PREFILL_TOKENS)
    return align * -(-state_bytes // (align * token_bytes))


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers of one kind before grouping."""

    kind: GroupKind
    layers: tuple[int, ...]
    block_tokens: int
    page_bytes: int
    window_tokens: int | None


def _token_buckets(layers: Sequence[CacheLayer], block_tokens: int) -> list[_Bucket]:
    """Layers that keep tokens, bucketed by (page, window); pages made equal by longer blocks."""
    kept = [layer for layer in layers if layer.keeps_tokens]
    keys: dict[tuple[Fraction, int | None], list[int]] = {}
    for layer in kept:
        keys.setdefault((layer.token_bytes, layer.window_tokens), []).append(layer.index)
    pages = {key: int(key[0] * block_tokens) for key in keys}
    largest = max(pages.values())
    buckets = []
    for key, indices in keys.items():
        tokens = block_tokens
        if largest % pages[key] == 0:
            tokens *= largest // pages[key]
        kind = GroupKind.FULL if key[1] is None else GroupKind.SLIDING
        buckets.append(_Bucket(kind, tuple(indices), tokens, largest, key[1]))
    return buckets


def _uniform(layers: Sequence[CacheLayer]) -> bool:
    """One kind of growth only: vLLM puts all layers in one group, whatever their page."""
    windows = {layer.window_tokens for layer in layers}
    return len(windows) == 1 and not any(layer.state_bytes for layer in layers)


def _split(buckets: Sequence[_Bucket]) -> tuple[tuple[Group, ...], int, int]:
    """Buckets into groups of equal width; returns groups, width and padding layers."""
    counts = [len(bucket.layers) for bucket in buckets]
    width = max(counts) if max(counts) < min(counts) * PAD_RATIO else min(counts)
    groups: list[Group] = []
    padding = 0
    for bucket in buckets:
        n_groups = -(-len(bucket.layers) // width)
        padding += n_groups * width - len(bucket.layers)
        groups += [
            Group(
                bucket.kind,
                bucket.layers[i::n_groups],
                bucket.block_tokens,
                bucket.page_bytes,
                bucket.window_tokens,
            )
            for i in range(n_groups)
        ]
    return tuple(groups), width, padding


def plan_layout(
    layers: Sequence[CacheLayer],
    *,
    state_mode: StateMode,
    draft_tokens: int,
    batched_tokens: int,
    gdn_prefill: bool = False,
    block_tokens: int | None = None,
    stages: Sequence[range] = (),
) -> Layout:
    """The layout of a model on the ranks of one pipeline (``stages`` of layer indices).

    Raises:
        UnsupportedModelError: recurrent state without any attention layer to align to.
    """
    if block_tokens is not None and block_tokens % DEFAULT_BLOCK_TOKENS:
        raise UsageError("vLLM's block size is a multiple of 16", seen=block_tokens)
    state = [layer for layer in layers if layer.state_bytes]
    if _uniform(layers):
        groups, padding = _one_group(layers, block_tokens or DEFAULT_BLOCK_TOKENS), 0
        per_block = _stage_bytes(layers, groups[0].block_tokens, stages)
    else:
        tokens = block_tokens or DEFAULT_BLOCK_TOKENS
        if state:
            tokens = _hybrid_block(layers, state, block_tokens, gdn_prefill=gdn_prefill)
        buckets = _token_buckets(layers, tokens)
        if state:
            buckets.append(
                _Bucket(
                    GroupKind.STATE,
                    tuple(layer.index for layer in state),
                    tokens,
                    max(bucket.page_bytes for bucket in buckets),
                    None,
                )
            )
        groups, width, padding = _split(buckets)
        per_block = _widest(groups, width, stages)
    return Layout(
        groups=groups,
        bytes_per_block=per_block,
        padding_layers=padding,
        state_mode=state_mode,
        draft_tokens=draft_tokens,
        checkpoint_blocks=1 if state and gdn_prefill and state_mode is StateMode.ALIGN else 0,
        batched_tokens=batched_tokens,
    )


def _hybrid_block(
    layers: Sequence[CacheLayer],
    state: Sequence[CacheLayer],
    asked: int | None,
    *,
    gdn_prefill: bool,
) -> int:
    token_bytes = [layer.token_bytes for layer in layers if layer.keeps_tokens]
    if not token_bytes:
        raise UnsupportedModelError(
            "a model of recurrent layers only has no attention block to align to",
            fix="vLLM sizes it by sequences, which this planner does not model",
        )
    per_token = max(token_bytes)
    if per_token.denominator != 1:
        raise UsageError("packed KV formats are not aligned to state pages", seen=str(per_token))
    largest = max(layer.state_bytes for layer in state)
    return aligned_block_tokens(
        largest, per_token.numerator, base_tokens=asked, gdn_prefill=gdn_prefill
    )


def _one_group(layers: Sequence[CacheLayer], block_tokens: int) -> tuple[Group, ...]:
    window = layers[0].window_tokens
    kind = GroupKind.FULL if window is None else GroupKind.SLIDING
    page = max(int(layer.token_bytes * block_tokens) for layer in layers)
    return (Group(kind, tuple(layer.index for layer in layers), block_tokens, page, window),)


def _stage_bytes(layers: Sequence[CacheLayer], tokens: int, stages: Sequence[range]) -> int:
    """One group: bytes of a block are the sum of its layers' pages on the widest stage."""
    if not stages:
        return sum(math.ceil(layer.token_bytes * tokens) for layer in layers)
    last = stages[-1].stop
    return max(
        sum(
            math.ceil(layer.token_bytes * tokens)
            for layer in layers
            if layer.index in stage or (stage is stages[-1] and layer.index >= last)
        )
        for stage in stages
    )


def _widest(groups: Sequence[Group], width: int, stages: Sequence[range]) -> int:
    """Equal pages: bytes of a block are the widest group's layers on the widest stage."""
    page = max(group.page_bytes for group in groups)
    if not stages:
        return width * page
    last = stages[-1].stop
    return page * max(
        sum(i in stage or (stage is stages[-1] and i >= last) for i in group.layers)
        for stage in stages
        for group in groups
    )
