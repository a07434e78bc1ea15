from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hullspeed.arch.families.common import mtp
from hullspeed.arch.mixers import FullAttention, GatedDeltaNet, Mamba2, SlidingAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch, Rope
from hullspeed.errors import CapacityError, UnsupportedModelError, UsageError
from hullspeed.memory.allocators import plan_memory
from hullspeed.memory.budget import EngineSettings, GpuMemory, WeightBytes
from hullspeed.memory.ours import HullspeedAllocator
from hullspeed.memory.ours_pool import RoomPool
from hullspeed.memory.ours_room import Room, page_count, page_size
from hullspeed.memory.windows import least_pages
from hullspeed.runtime.config import EngineConfig
from hullspeed.runtime.room import plan_room, rules_of

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
    budget = available_bytes // 2 if given is None else given
    return page_count(rules_of(config), 640, PAGE_BYTES, budget)


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


WINDOW = SlidingAttention(q_heads=4, kv_heads=1, head_dim=64, rotary_dim=64, window_tokens=16)


def test_a_page_of_layers_with_and_without_a_window() -> None:
    each = 2 * 64 * 16 * 4
    assert page_size(arch_of(ATTENTION), 16) == each
    assert page_size(arch_of(ATTENTION, WINDOW, DELTA), 16) == 2 * each
    arch = arch_of(ATTENTION, WINDOW, WINDOW)
    assert page_size(arch, 16, windowed=False) == each
    assert page_size(arch, 16, windowed=True) == 2 * each


OURS = {"max_running": 3, "page_tokens": 16, "step_tokens": 64}
SETTINGS = EngineSettings(
    engine="hullspeed", max_num_seqs=3, max_model_len=640, block_tokens=16,
    max_num_batched_tokens=64,
)  # fmt: skip
MACHINE = GpuMemory(name="", total_bytes=10**10)


def sized(arch: ModelArch, available_bytes: int, **changes: Any) -> RoomPool:
    """As ``plan`` and ``simulate`` size the engine."""
    settings = replace(SETTINGS, **changes)
    budget = settings.kv_cache_bytes or available_bytes // 2
    return HullspeedAllocator().pool(arch, MACHINE, settings, budget)


@pytest.mark.parametrize(
    "mixers",
    [
        (ATTENTION,),
        (ATTENTION, WINDOW, WINDOW, WINDOW),
        (WINDOW, WINDOW),
        (ATTENTION, DELTA, DELTA),
        (ATTENTION, DELTA, WINDOW),
    ],
)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"kv_budget_bytes": 4_000_000}, {"kv_cache_bytes": 4_000_000}),
        ({"state_store": "int8"}, {"state_dtype": "int8"}),
        (
            {"state_store": "bf16", "state_share": 0.25},
            {"state_dtype": "bf16", "state_share": 0.25},
        ),
        ({"kv_dtype": "int8", "state_share": 0.7}, {"kv_dtype": "int8", "state_share": 0.7}),
        ({"cache": "hash"}, {"cache": "hash"}),
    ],
)
def test_the_allocator_sizes_what_the_engine_takes(
    mixers: tuple[FullAttention, ...], ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Pages, slots of running and of cached states, pages of windows."""
    arch = arch_of(*mixers)
    for available_bytes in (3_000_000, 5_000_000, 8_000_000, 10**9):
        config = EngineConfig(model="m", **{**OURS, **ours})
        room = plan_room(config, arch, 640, available_bytes)
        pool = sized(arch, available_bytes, **theirs)
        assert pool.room == room
        assert pool.pool_bytes == room.total_bytes <= pool.budget_bytes
        assert pool.printed_tokens == room.n_pages * 16
        assert pool.max_context_tokens(1) >= 640
        assert pool.findings == ()


def test_the_stack_leaves_what_sequences_cannot_use() -> None:
    """And dividing the same budget again gives the same room."""
    arch = arch_of(ATTENTION, WINDOW, DELTA)
    weights = WeightBytes(decoder=10**6)
    plan = plan_memory(arch, MACHINE, SETTINGS, weights)
    assert isinstance(plan.pool, RoomPool)
    assert plan.pool.room is not None
    assert plan.stack.pool_bytes == plan.pool.room.total_bytes < plan.pool.budget_bytes
    assert plan.pool.room.n_pages == 3 * 40  # what three contexts fill
    assert plan.pool.room.n_state_slots == 8 * 3
    assert plan.low == plan.pool


def test_too_small_a_budget_is_a_finding_with_the_engines_words() -> None:
    arch = arch_of(DELTA, ATTENTION)
    pool = sized(arch, 0, kv_cache_bytes=6 * STATE_BYTES)
    assert (pool.room, pool.printed_tokens, pool.served_concurrency(16)) == (None, 0, 0)
    (finding,) = pool.findings
    assert (finding.code, "need 7 recurrent states" in finding.what) == ("MEM001", True)
    assert pool.max_num_seqs == 0  # nor is there room for one context
    roomy = sized(arch, 0, kv_cache_bytes=80 * STATE_BYTES)
    most = roomy.max_num_seqs
    assert most is not None
    for n, fits in ((most, True), (most + 1, False)):
        again = sized(arch, 0, kv_cache_bytes=80 * STATE_BYTES, max_num_seqs=n)
        assert (again.room is not None) is fits
    longest = roomy.max_context_tokens(2)
    for n_tokens, held in ((longest, 2), (longest + 16, 1)):
        again = sized(arch, 0, kv_cache_bytes=80 * STATE_BYTES, max_model_len=n_tokens)
        assert again.served_concurrency(n_tokens) == held


def test_states_of_other_layers_are_kept_in_fp32_only() -> None:
    mamba = Mamba2(heads=4, head_dim=16, state_dim=8, groups=1, conv_kernel=4)
    arch = replace(arch_of(ATTENTION), layers=(Layer(ATTENTION, MLP), Layer(mamba, MLP)))
    assert sized(arch, 10**8).room is not None
    with pytest.raises(UnsupportedModelError, match="Gated DeltaNet"):
        sized(arch, 10**8, state_dtype="int8")
    with pytest.raises(UsageError, match="keeps cached states"):
        sized(arch, 10**8, state_dtype="fp16")


def test_a_given_budget_is_used_up() -> None:
    arch = arch_of(ATTENTION, WINDOW, WINDOW, WINDOW)
    config = EngineConfig(model="m", kv_budget_bytes=4_000_000, **OURS)  # type: ignore[arg-type]
    room = plan_room(config, arch, 640, 0)
    assert room.n_window_pages == 1_600_000 // room.window_page_bytes
    assert 0 <= 4_000_000 - room.total_bytes < room.page_bytes


def test_windows_leave_room_for_one_whole_context() -> None:
    """40 pages of what sees everything, then what is left for windows, and not a byte less."""
    arch = arch_of(ATTENTION, WINDOW, WINDOW, WINDOW)
    least = least_pages(16, 16, 64)
    each = page_size(arch_of(ATTENTION), 16)
    needed = 40 * each + least * 3 * each
    for budget, fits in ((needed, True), (needed - 1, False)):
        config = EngineConfig(model="m", kv_budget_bytes=budget, **OURS)  # type: ignore[arg-type]
        if fits:
            assert plan_room(config, arch, 640, 0)[:1] == (40,)
        else:
            with pytest.raises(CapacityError, match="windows of 16 tokens included"):
                plan_room(config, arch, 640, 0)


@pytest.mark.parametrize(
    ("mixers", "options"),
    [
        ((ATTENTION, WINDOW, DELTA), {}),  # continued from its recurrent states
        ((ATTENTION, WINDOW), {"cache": "hash"}),
        ((ATTENTION, WINDOW), {"step_tokens": 640}),  # a step as long as the context
        ((ATTENTION, replace(WINDOW, window_tokens=640)), {}),
    ],
)
def test_windows_in_full(mixers: tuple[FullAttention, ...], options: dict[str, object]) -> None:
    config = EngineConfig(model="m", **{**OURS, **options})  # type: ignore[arg-type]
    room = plan_room(config, arch_of(*mixers), 640, 10**9)
    assert (room.n_window_pages, room.window_tokens) == (0, 0)
    assert room.page_bytes == page_size(arch_of(*mixers), 16)


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
