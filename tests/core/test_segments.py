from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.core.eviction import Density, EvictionPolicy, Lru
from hullspeed.core.hashchain import HashChain
from hullspeed.core.pages import PagePool, StatePool
from hullspeed.core.request import Request, Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.segments import SegmentTree
from hullspeed.errors import IntegrityError

PAGE = 4


def sequence_of(tokens: list[int], pages: PagePool, salt: bytes = b"") -> Sequence:
    request = Request(
        id=0, prompt=tuple(tokens), sampling=SamplingParams(), max_tokens=1, salt=salt
    )
    sequence = Sequence.of(request)
    sequence.pages = pages.take(pages.pages_for(len(tokens)))
    return sequence


def remember(
    tree: SegmentTree | HashChain,
    pages: PagePool,
    tokens: list[int],
    *,
    salt: bytes = b"",
    state_slot: int | None = None,
    now_s: float = 0.0,
) -> None:
    sequence = sequence_of(tokens, pages, salt)
    state = None if state_slot is None else (state_slot,)
    tree.insert(sequence, len(tokens), now_s=now_s, state=state)
    pages.release(sequence.pages)


def dense(n_pages: int = 64, policy: EvictionPolicy | None = None) -> tuple[SegmentTree, PagePool]:
    pages = PagePool(n_pages, PAGE)
    return SegmentTree(pages, StatePool(0), policy or Lru(), page_bytes=1), pages


def hit(tree: SegmentTree | HashChain, tokens: list[int], salt: bytes = b"") -> int:
    return tree.match(tokens, salt, limit=len(tokens), now_s=0.0).n_tokens


def test_dense_is_hit_at_any_token() -> None:
    tree, pages = dense()
    remember(tree, pages, list(range(10)))
    assert hit(tree, [0, 1, 2, 3, 4, 99]) == 5
    assert hit(tree, list(range(10))) == 10
    assert hit(tree, [99]) == 0


def test_match_gives_whole_pages_to_share_and_the_rest_to_copy() -> None:
    tree, pages = dense()
    remember(tree, pages, list(range(10)))
    match = tree.match(list(range(10)), b"", limit=7, now_s=0.0)
    assert (match.n_tokens, match.shared_pages, len(match.pages)) == (7, 1, 2)


def test_a_fork_inside_a_page_keeps_both_branches() -> None:
    tree, pages = dense()
    remember(tree, pages, [0, 1, 2, 3, 4, 5, 6])
    remember(tree, pages, [0, 1, 2, 3, 4, 9, 9])
    tree.check_integrity()
    assert hit(tree, [0, 1, 2, 3, 4, 5, 6]) == 7
    assert hit(tree, [0, 1, 2, 3, 4, 9, 9]) == 7
    first = tree.match([0, 1, 2, 3, 4, 5, 6], b"", limit=7, now_s=0.0).pages
    second = tree.match([0, 1, 2, 3, 4, 9, 9], b"", limit=7, now_s=0.0).pages
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_salts_do_not_meet() -> None:
    tree, pages = dense()
    remember(tree, pages, [1, 2, 3], salt=b"a")
    assert hit(tree, [1, 2, 3], b"b") == 0
    assert hit(tree, [1, 2, 3], b"a") == 3


def test_eviction_cuts_the_least_recently_used_tail_first() -> None:
    tree, pages = dense(8)
    remember(tree, pages, [1] * 16, now_s=1.0)
    remember(tree, pages, [2] * 16, now_s=2.0)
    assert pages.n_free == 0
    assert tree.evict(1) == 1
    tree.check_integrity()
    assert hit(tree, [1] * 16) == 12
    assert hit(tree, [2] * 16) == 16
    assert tree.evict(100) == 7
    assert pages.n_free == 8


def test_a_locked_leaf_is_not_evicted() -> None:
    tree, pages = dense(4)
    remember(tree, pages, [1] * 16)
    node = tree.match([1] * 16, b"", limit=16, now_s=0.0).node
    tree.lock(node)
    assert tree.evict(1) == 0
    tree.unlock(node)
    assert tree.evict(1) == 1
    with pytest.raises(IntegrityError, match="unlocked more often"):
        tree.unlock(node)


def test_density_keeps_what_is_dear_to_compute() -> None:
    # Deep tokens cost more FLOPs per byte: of two pages used alike, the shallow one goes first.
    tree, pages = dense(8, Density(lambda n, start: n * (1 + start)))
    remember(tree, pages, [1] * 4, now_s=0.0)
    remember(tree, pages, [2] * 16, now_s=0.0)
    tree.evict(1)
    assert hit(tree, [1] * 4) == 0
    assert hit(tree, [2] * 16) == 16


def stateful(n_pages: int = 64, n_slots: int = 16) -> tuple[SegmentTree, PagePool, StatePool]:
    pages, states = PagePool(n_pages, PAGE), StatePool(n_slots)
    return SegmentTree(pages, states, Lru(), page_bytes=1, state_bytes=3), pages, states


def test_a_model_with_state_is_hit_only_where_a_state_is() -> None:
    tree, pages, states = stateful()
    (slot,) = states.take(1)
    remember(tree, pages, [1, 2, 3, 4, 5], state_slot=slot)
    match = tree.match([1, 2, 3, 4, 5, 6], b"", limit=6, now_s=0.0)
    assert (match.n_tokens, match.state) == (5, (slot,))
    assert hit(tree, [1, 2, 3, 4]) == 0


def test_splitting_keeps_the_state_where_it_was() -> None:
    """E06: a node that is split must not lose its state."""
    tree, pages, states = stateful()
    deep, fork, other = states.take(3)
    remember(tree, pages, [1, 2, 3, 4, 5], state_slot=deep)
    remember(tree, pages, [1, 2], state_slot=fork)
    remember(tree, pages, [1, 2, 9], state_slot=other)
    tree.check_integrity()
    assert tree.match([1, 2, 3, 4, 5], b"", limit=5, now_s=0.0).state == (deep,)
    assert tree.match([1, 2, 7], b"", limit=3, now_s=0.0).state == (fork,)


def test_a_junction_is_the_place_where_prompts_parted() -> None:
    """E05: the shared part of two prompts is worth a checkpoint at its second sighting."""
    tree, pages, states = stateful()
    (slot,) = states.take(1)
    first, second = [1] * 8 + [2] * 8, [1] * 8 + [3] * 8
    match = tree.match(first, b"", limit=16, now_s=0.0)
    assert tree.junction(first, b"", limit=16, match=match) is None
    remember(tree, pages, first, state_slot=slot)
    match = tree.match(second, b"", limit=16, now_s=0.0)
    assert match.n_tokens == 0
    assert tree.junction(second, b"", limit=16, match=match) == 8


def test_freeing_states_melts_interiors_and_drops_leaves() -> None:
    tree, pages, states = stateful(n_slots=3)
    for end, slot in zip((4, 8, 12), states.take(3), strict=True):
        remember(tree, pages, [7] * end, state_slot=slot, now_s=float(end))
    assert tree.evict_states(1) == 1
    tree.check_integrity()
    assert hit(tree, [7] * 12) == 12
    assert hit(tree, [7] * 8) in (0, 4, 8)
    assert tree.evict_states(5) == 2
    assert tree.stats().resident_tokens == 0
    assert pages.n_free == pages.size


def test_a_second_state_for_the_same_place_is_given_back() -> None:
    tree, pages, states = stateful()
    first, second = states.take(2)
    remember(tree, pages, [1, 2, 3], state_slot=first)
    free = states.n_free
    remember(tree, pages, [1, 2, 3], state_slot=second)
    assert states.n_free == free + 1


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@given(inserted=st.lists(prompts, max_size=12), asked=prompts)
def test_dense_match_equals_the_longest_common_prefix(
    inserted: list[list[int]], asked: list[int]
) -> None:
    tree, pages = dense(512)
    for tokens in inserted:
        remember(tree, pages, tokens)
        tree.check_integrity()
        pages.check_integrity(tree.page_owners())
    assert hit(tree, asked) == max((common(asked, tokens) for tokens in inserted), default=0)


@given(inserted=st.lists(prompts, max_size=12), asked=prompts)
def test_hash_match_equals_the_longest_common_run_of_whole_pages(
    inserted: list[list[int]], asked: list[int]
) -> None:
    pages = PagePool(512, PAGE)
    chain = HashChain(pages, Lru())
    for tokens in inserted:
        remember(chain, pages, tokens)
        chain.check_integrity()
        pages.check_integrity(chain.page_owners())
    expected = max((common(asked, tokens) // PAGE * PAGE for tokens in inserted), default=0)
    assert hit(chain, asked) == expected


@given(inserted=st.lists(prompts, max_size=12), asked=prompts)
def test_stateful_match_equals_the_deepest_state_on_the_way(
    inserted: list[list[int]], asked: list[int]
) -> None:
    tree, pages, states = stateful(512, 16)
    for tokens in inserted:
        remember(tree, pages, tokens, state_slot=states.take(1)[0])
        tree.check_integrity()
        pages.check_integrity(tree.page_owners())
        states.check_integrity(tree.state_owners())
    on_the_way = (len(t) for t in inserted if asked[: len(t)] == t)
    assert hit(tree, asked) == max(on_the_way, default=0)


@settings(max_examples=200)
@given(
    inserted=st.lists(st.tuples(prompts, st.integers(0, 8)), max_size=16),
    with_state=st.booleans(),
)
def test_eviction_keeps_the_structure_whole(
    inserted: list[tuple[list[int], int]], with_state: bool
) -> None:
    pages, states = PagePool(64, PAGE), StatePool(8 if with_state else 0)
    tree = SegmentTree(pages, states, Lru())
    for now_s, (tokens, n_evict) in enumerate(inserted):
        if not with_state:
            remember(tree, pages, tokens, now_s=float(now_s))
        elif states.n_free or tree.evict_states(1):
            slot = states.take(1)[0]
            remember(tree, pages, tokens, now_s=float(now_s), state_slot=slot)
        tree.evict(n_evict)
        tree.check_integrity()
        pages.check_integrity(tree.page_owners())
        states.check_integrity(tree.state_owners())
    tree.clear()
    assert pages.n_free == pages.size
    assert states.n_free == states.size
