from __future__ import annotations

from dataclasses import replace

import pytest

from hullspeed.arch.families.common import mtp
from hullspeed.arch.mixers import FullAttention, GatedDeltaNet, SlidingAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch, Rope
from hullspeed.errors import CapacityError, UsageError
from hullspeed.runtime.config import EngineConfig
from hullspeed.runtime.room import Room, page_count, page_size, plan_room

PAGE_BYTES = 1000
ATTENTION = FullAttention(q_heads=4, kv_heads=2, head_dim=32, rotary_dim=32)
DELTA = GatedDeltaNet(k_heads=2, v_heads=4, k_dim=16, v_dim=32, conv_kernel=4)
MLP = DenseMlp(intermediate=64)


def arch_of(*mixers: FullAttention | GatedDeltaNet) -> ModelArch:
    return ModelArch(
        family="qwen3_5",
        hidden=64,
        vocab=10,
        layers=tuple(Layer(mixer, MLP) for mixer in mixers),
        tied_embeddings=True,
        norm_eps=1e-6,
        rope=Rope(theta=1e4),
        max_context_tokens=640,
    )


def pages(available_bytes: int, **options: int) -> int:
    config = EngineConfig(model="m", max_running=4, **options)  # type: ignore[arg-type]
    given = config.kv_budget_bytes
    return page_count(config, 640, PAGE_BYTES, available_bytes // 2 if given is None else given)


def test_half_of_what_is_free_becomes_pages() -> None:
    assert pages(60_000) == 30


def test_never_more_than_all_contexts_need() -> None:
    assert pages(10**9) == 4 * 10


def test_a_budget_is_taken_as_it_is() -> None:
    assert pages(0, kv_budget_bytes=75_999) == 75


def test_less_than_one_context_is_refused() -> None:
    with pytest.raises(CapacityError, match="one context of 640 tokens"):
        pages(19_000)
    with pytest.raises(CapacityError, match="does not hold"):
        pages(10**9, kv_budget_bytes=9_999)


def test_a_layer_with_a_window_keeps_pages_too() -> None:
    window = SlidingAttention(q_heads=4, kv_heads=1, head_dim=64, rotary_dim=64, window_tokens=16)
    each = 2 * 64 * 16 * 4
    assert page_size(arch_of(ATTENTION), 16) == each
    assert page_size(arch_of(ATTENTION, window, DELTA), 16) == 2 * each


def test_a_draft_layer_keeps_pages_when_it_is_loaded() -> None:
    layer = Layer(ATTENTION, DenseMlp(intermediate=64))
    arch = replace(arch_of(ATTENTION, DELTA), extras=(mtp(64, (layer,)),))
    each = 2 * 64 * 16 * 4
    assert page_size(arch, 16) == each
    assert page_size(arch, 16, draft=True) == 2 * each
    rooms = [
        plan_room(EngineConfig(model="m", max_running=3, draft=draft), arch, 640, 10**9)
        for draft in ("none", "mtp")
    ]
    assert rooms[1].page_bytes == 2 * rooms[0].page_bytes


def hybrid_room(available_bytes: int, **options: object) -> Room:
    config = EngineConfig(model="m", max_running=3, **options)  # type: ignore[arg-type]
    return plan_room(config, arch_of(DELTA, ATTENTION), 640, available_bytes)


STATE_BYTES = 4 * (4 * 16 * 32 + (2 * 2 * 16 + 4 * 32) * 3)


def test_states_take_their_share_and_pages_the_rest() -> None:
    room = hybrid_room(0, kv_budget_bytes=10_000_000, state_share=0.25)
    assert room.state_bytes == STATE_BYTES
    assert room.n_state_slots == 2_500_000 // STATE_BYTES
    left = 10_000_000 - room.n_state_slots * STATE_BYTES
    assert room.n_pages == left // room.page_bytes


def test_running_sequences_have_their_states_first() -> None:
    room = hybrid_room(0, kv_budget_bytes=7 * STATE_BYTES + 10 * 64 * 512, state_share=0.01)
    assert (room.n_state_slots, room.n_pages) == (7, 10)


def test_no_more_states_than_conversations_use() -> None:
    assert hybrid_room(10**9).n_state_slots == 8 * 3


def test_too_little_for_the_running_states_is_refused() -> None:
    with pytest.raises(CapacityError, match="need 7 recurrent states"):
        hybrid_room(0, kv_budget_bytes=6 * STATE_BYTES)


@pytest.mark.parametrize(("store", "row"), [("bf16", 2 * 32), ("int8", 32 + 4)])
def test_cached_states_in_fewer_bits(store: str, row: int) -> None:
    """A slot for each running sequence, and the share's rest for stored ones."""
    room = hybrid_room(0, kv_budget_bytes=10_000_000, state_share=0.25, state_store=store)
    assert room.stored_bytes == 4 * 16 * row + 2 * (2 * 2 * 16 + 4 * 32) * 3
    assert room.n_state_slots == 3
    assert room.n_stored_slots == (2_500_000 - 3 * STATE_BYTES) // room.stored_bytes
    left = 10_000_000 - 3 * STATE_BYTES - room.n_stored_slots * room.stored_bytes
    assert room.n_pages == left // room.page_bytes


def test_models_without_state_have_no_slots() -> None:
    room = plan_room(EngineConfig(model="m"), arch_of(ATTENTION), 640, 10**9)
    assert (room.n_state_slots, room.state_bytes) == (0, 0)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_that_cannot_be(share: float) -> None:
    with pytest.raises(UsageError, match="state_share"):
        hybrid_room(10**9, state_share=share)
