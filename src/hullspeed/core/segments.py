"""SegmentTree: a radix tree over tokens whose nodes own KV pages and, for some models, a state.

A node is a segment: the tokens after its parent's, the pages they lie in, and at most one end
state, from which a sequence can go on at exactly its end. A page that spans the border of two nodes
belongs to both; the deeper node's page holds the shallower one's tokens too, because a sequence
copies a page before it writes into a shared one::

    tokens   0 ............ 100 | 100 ................ 260        page_tokens = 64
    parent   pages 7 8           |                                7: 0-63   8: 64-127
    child                        | pages 8 9 12 13                8 is owned by both

Models without state ("dense") are hit at any token. Models with state are hit where a state is:
KV beyond the deepest state could never be used, so a leaf without a state does not exist. A state
is a few pieces of a pool of its own: the slot of a recurrent state, or the pages of windowed layers
that hold the last window before the node's end. Such pages serve every place whose last window
they hold, so these models are hit between states, too.

Eviction has three moves: cut a dense leaf's tail, drop a leaf, and free the state of an interior
node (which then melts into its child, if it has just one).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hullspeed.core.eviction import EvictionPolicy, EvictionQueue
from hullspeed.core.ghost import GhostIndex
from hullspeed.core.pages import PagePool, Pool
from hullspeed.core.prefix import CacheStats, EndState, Match
from hullspeed.core.request import Sequence
from hullspeed.errors import IntegrityError


class Node:
    """A segment ``[start, end)`` of some prefix."""

    __slots__ = (
        "children",
        "last_used_s",
        "locks",
        "pages",
        "parent",
        "start",
        "state",
        "superseded",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, start: int, tokens: list[int], pages: list[int], now_s: float
    ) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.pages = pages
        self.children: dict[int, Node] = {}
        self.state: EndState | None = None
        self.superseded = False
        self.locks = 0
        self.last_used_s = now_s

    @property
    def end(self) -> int:
        """One past the last token's position."""
        return self.start + len(self.tokens)

    def __repr__(self) -> str:
        return f"Node([{self.start}, {self.end}), pages={self.pages}, state={self.state})"


class SegmentTree:
    """Implements :class:`~hullspeed.core.prefix.PrefixCache` token by token.

    Args:
        pages: The pool whose pages the tree holds.
        states: The pool of end states; a pool of size 0 makes the tree dense.
        policy: What goes first.
        page_bytes: Bytes of a page over all layers.
        state_bytes: Bytes of a piece of ``states`` over all layers.
    """

    def __init__(
        self,
        pages: PagePool,
        states: Pool,
        policy: EvictionPolicy,
        *,
        page_bytes: int = 1,
        state_bytes: int = 0,
    ) -> None:
        self._pages = pages
        self._states = states
        self._stateful = states.size > 0
        # Freeing a state makes room for pages where both come out of the same bytes.
        self._shares_bytes = self._stateful and pages.budget is not None
        self._policy = policy
        self._page_bytes = page_bytes
        self._state_bytes = state_bytes
        self._roots: dict[bytes, Node] = {}
        self._ghosts = GhostIndex(pages.page_tokens) if self._stateful else None
        self._leaves: EvictionQueue[Node] = EvictionQueue(self._leaf_key)
        self._interior: EvictionQueue[Node] = EvictionQueue(self._interior_key)
        self._inserted = self._evicted = 0
        self.version = 0

    # -- looking up ----------------------------------------------------------------------------

    def match(self, tokens: list[int], salt: bytes, *, limit: int, now_s: float) -> Match:
        """The longest usable prefix; see :class:`PrefixCache`."""
        path, depth = self._walk(tokens, salt, limit)
        for node in path:
            node.last_used_s = max(node.last_used_s, now_s)
        match = Match(resident_tokens=depth)
        if self._stateful:
            depth, match.state = self._usable(path, depth, now_s)
            while path and path[-1].start >= depth:
                path.pop()
        if not path:
            return match
        path[-1].superseded = False
        match.n_tokens = depth
        match.pages = self._table(path, depth)
        match.shared_pages = depth // self._pages.page_tokens
        match.node = path[-1]
        return match

    def _usable(self, path: list[Node], depth: int, now_s: float) -> tuple[int, EndState | None]:
        """The deepest place on ``path`` up to ``depth`` from which a sequence can go on."""
        holders = [node for node in path if node.state is not None]
        if path and path[-1].state is None and self._states.reach_tokens:
            holders += self._next_below(path[-1], depth + self._states.reach_tokens)
        ends = [(node.end, node.state) for node in holders if node.state is not None]
        found = self._states.place(ends, depth)
        if found is None:
            return 0, None
        for node in holders:
            if found[1] and not set(found[1]).isdisjoint(node.state or ()):
                node.superseded, node.last_used_s = False, max(node.last_used_s, now_s)
        return found

    def _next_below(self, node: Node, limit: int) -> list[Node]:
        """The node below ``node`` whose end state comes first, if that is before ``limit``."""
        found: Node | None = None
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            if below.start >= limit:
                continue
            if below.state is None:
                stack += below.children.values()
            elif below.end < limit:
                found, limit = below, below.end
        return [] if found is None else [found]

    def junction(self, tokens: list[int], salt: bytes, *, limit: int, match: Match) -> int | None:
        """Where an earlier prompt parted from this one; see :class:`PrefixCache`."""
        if self._ghosts is None:
            return None
        # A resident fork is known to the token, one that is gone only to the page.
        place = max(match.resident_tokens, self._ghosts.see(tokens, salt, limit))
        return place if place > match.n_tokens else None

    def _walk(self, tokens: list[int], salt: bytes, limit: int) -> tuple[list[Node], int]:
        """Nodes below the root that share tokens with ``tokens[:limit]``, and how many tokens."""
        node = self._roots.get(salt)
        path: list[Node] = []
        depth = 0
        while node is not None and depth < limit:
            child = node.children.get(tokens[depth])
            if child is None:
                break
            common = _common(child.tokens, tokens, depth, limit)
            path.append(child)
            depth += common
            if common < len(child.tokens):
                break
            node = child
        return path, depth

    def _table(self, path: list[Node], depth: int) -> list[int]:
        table: list[int] = []
        for node in path:
            table[node.start // self._pages.page_tokens :] = node.pages
        return table[: self._pages.pages_for(depth)]

    def lock(self, node: Node) -> None:
        """Keep ``node`` and all above it."""
        node.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``."""
        if node.locks <= 0:
            raise IntegrityError(f"{node} unlocked more often than locked")
        node.locks -= 1
        if node.locks:
            return
        if self._stateful and node.state is None and node.parent is not None:
            # Hit between states: what lay below may have gone meanwhile.
            if not node.children:
                self._drop(node)
                return
            self._melt(node)
        self._offer(node)

    # -- inserting -----------------------------------------------------------------------------

    def insert(
        self, sequence: Sequence, n_tokens: int, *, now_s: float, state: EndState | None = None
    ) -> Node:
        """Remember the first ``n_tokens`` tokens; see :class:`PrefixCache`."""
        salt = sequence.request.salt
        root = self._roots.setdefault(salt, Node(None, 0, [], [], now_s))
        path, depth = self._walk(sequence.tokens, salt, n_tokens)
        node = path[-1] if path else root
        # A dense node is hit at any token, so it is divided only where contents part.
        parts = depth < n_tokens or self._stateful
        if depth < node.end and parts:
            node = self._split(node, depth)
        if depth < n_tokens:
            node = self._append(node, sequence, depth, n_tokens, now_s)
        for seen in (*path[:-1], node):
            seen.last_used_s = max(seen.last_used_s, now_s)
        self._attach_state(node, state)
        if self._stateful:
            self._supersede(sequence)
        self.version += 1
        self._offer(node)
        return node

    def _append(
        self, node: Node, sequence: Sequence, depth: int, n_tokens: int, now_s: float
    ) -> Node:
        first = depth // self._pages.page_tokens
        pages = sequence.pages[first : self._pages.pages_for(n_tokens)]
        tokens = sequence.tokens[depth:n_tokens]
        self._pages.share(pages)
        self._inserted += len(tokens)
        if not self._stateful and node.parent is not None and not node.children:
            # Grow the leaf in place; a page it shares with the new part is replaced by the
            # sequence's own, which holds the same tokens and more.
            keep = first - node.start // self._pages.page_tokens
            self._pages.release(node.pages[keep:])
            node.pages[keep:] = pages
            node.tokens += tokens
            return node
        child = Node(node, depth, tokens, pages, now_s)
        node.children[tokens[0]] = child
        self._offer(node)
        return child

    def _split(self, node: Node, at: int) -> Node:
        """Divide ``node`` at position ``at``; returns the new upper half. ``node`` stays the lower
        half, so whoever holds it keeps holding the same end.
        """
        parent = node.parent
        if parent is None:
            raise IntegrityError("the root cannot be split")
        page_tokens = self._pages.page_tokens
        cut = at - node.start
        base = node.start // page_tokens
        upper_pages = node.pages[: self._pages.pages_for(at) - base]
        lower_pages = node.pages[at // page_tokens - base :]
        if at % page_tokens:
            self._pages.share([lower_pages[0]])
        upper = Node(parent, node.start, node.tokens[:cut], upper_pages, node.last_used_s)
        parent.children[upper.tokens[0]] = upper
        node.parent, node.start = upper, at
        node.tokens, node.pages = node.tokens[cut:], lower_pages
        upper.children[node.tokens[0]] = node
        return upper

    def _supersede(self, sequence: Sequence) -> None:
        """The state that a conversation's turn started from is of little use once the turn's own
        end is saved: the next turn starts there. Unless others branch off at the place, or the
        request names it as worth a checkpoint, its state may go first.
        """
        start = sequence.node
        if (
            start is not None
            and start.end == sequence.cached_tokens
            and len(start.children) == 1
            and start.end not in sequence.request.checkpoints
        ):
            start.superseded = True

    def _attach_state(self, node: Node, state: EndState | None) -> None:
        if state is None:
            return
        if node.state is None and node.parent is not None:
            node.state = state
        else:
            self._states.release(state)

    def state_at(self, node: Node) -> EndState | None:
        """The state at ``node``."""
        return node.state

    # -- evicting ------------------------------------------------------------------------------

    def _leaf_key(self, node: Node) -> float | None:
        if node.children or node.locks or node.parent is None:
            return None
        n_bytes = len(node.pages) * self._page_bytes + self._held(node)
        return self._policy.key(node.start, len(node.tokens), n_bytes, node.last_used_s)

    def _interior_key(self, node: Node) -> float | None:
        if not node.children or node.locks or node.state is None:
            return None
        if node.superseded and len(node.children) == 1:
            return self._policy.key(node.end, 0, self._held(node), node.last_used_s)
        # Losing the state costs the tokens back to the state above.
        start = _state_above(node)
        return self._policy.key(start, node.end - start, self._held(node), node.last_used_s)

    def _held(self, node: Node) -> int:
        """Bytes of the node's state, those that it shares with others included."""
        return len(node.state) * self._state_bytes if node.state is not None else 0

    def _offer(self, node: Node) -> None:
        self._leaves.offer(node)
        if self._stateful:
            self._interior.offer(node)

    def evict(self, n_pages: int) -> int:
        """Free pages, least valuable first; see :class:`PrefixCache`."""
        before = self._pages.n_free
        while (freed := self._pages.n_free - before) < n_pages:
            if self._shares_bytes:
                if not self._evict_least():
                    break
                continue
            leaf = self._leaves.pop()
            if leaf is None:
                break
            if self._stateful:
                self._drop(leaf)
            else:
                self._cut(leaf, n_pages - freed)
        return self._pages.n_free - before

    def evict_states(self, n_pieces: int) -> int:
        """Free states, least valuable first; see :class:`PrefixCache`."""
        before = self._states.n_free
        while self._states.n_free - before < n_pieces and self._evict_least():
            pass
        return self._states.n_free - before

    def _evict_least(self) -> bool:
        """Drop the leaf or free the interior state that is worth least; False if there is none."""
        interior, leaf = self._interior.pop(), self._leaves.pop()
        if interior is None or (leaf is not None and self._goes_first(leaf, interior)):
            victim, other = leaf, interior
        else:
            victim, other = interior, leaf
        if other is not None:
            self._offer(other)
        if victim is None:
            return False
        if victim.children:
            self._free_state(victim)
            self._melt(victim)
        else:
            self._drop(victim)
        return True

    def _goes_first(self, leaf: Node, interior: Node) -> bool:
        leaf_key, interior_key = self._leaf_key(leaf), self._interior_key(interior)
        return interior_key is None or (leaf_key is not None and leaf_key < interior_key)

    def _cut(self, leaf: Node, n_pages: int) -> int:
        """Take whole pages off a dense leaf's tail until ``n_pages`` are free or it is gone."""
        freed = 0
        keep = len(leaf.pages)
        while keep and freed < n_pages:
            keep -= 1
            freed += self._pages.release([leaf.pages[keep]])
        end = (leaf.start // self._pages.page_tokens + keep) * self._pages.page_tokens
        left = max(0, end - leaf.start)
        self._evicted += len(leaf.tokens) - left
        if left:
            del leaf.tokens[left:], leaf.pages[keep:]
            self._offer(leaf)
            return freed
        freed += self._pages.release(leaf.pages[:keep])
        self._unlink(leaf)
        return freed

    def _drop(self, leaf: Node) -> int:
        """Remove a leaf, and the ancestors that are left without use."""
        freed = 0
        node: Node | None = leaf
        while node is not None and node.parent is not None:
            parent = node.parent
            freed += self._pages.release(node.pages)
            self._evicted += len(node.tokens)
            self._free_state(node)
            self._unlink(node)
            useless = not parent.children and parent.state is None and not parent.locks
            node = parent if useless else None
        return freed

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            raise IntegrityError("the root cannot be unlinked")
        # The first token may be cut already when pages went; look the child up by identity.
        key = next(key for key, child in parent.children.items() if child is node)
        del parent.children[key]
        node.parent = None
        if parent.parent is None and not parent.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}
        else:
            self._melt(parent)
            self._offer(parent)

    def _free_state(self, node: Node) -> None:
        if node.state is not None:
            self._states.release(node.state)
            node.state = None

    def _melt(self, node: Node) -> None:
        """Join an interior node that is neither a fork nor a checkpoint with its only child."""
        if len(node.children) != 1 or node.locks or node.state is not None:
            return
        parent = node.parent
        if parent is None:
            return
        (child,) = node.children.values()
        page_tokens = self._pages.page_tokens
        shared = node.end % page_tokens != 0
        if shared:
            self._pages.release([node.pages[-1]])
        child.tokens = node.tokens + child.tokens
        child.pages = (node.pages[:-1] if shared else node.pages) + child.pages
        child.start = node.start
        child.parent = parent
        parent.children[child.tokens[0]] = child
        node.parent = None
        node.children = {}

    def clear(self) -> None:
        """Forget everything that is not locked."""
        while True:
            leaf = self._leaves.pop()
            if leaf is None:
                return
            self._drop(leaf)

    # -- looking inside ------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node below the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def stats(self) -> CacheStats:
        """Counters and residency."""
        resident = states = 0
        for node in self.nodes():
            resident += len(node.tokens)
            states += node.state is not None
        return CacheStats(self._inserted, self._evicted, resident, states)

    def page_owners(self) -> Counter[int]:
        """References held, by page."""
        return Counter(page for node in self.nodes() for page in node.pages)

    def state_owners(self) -> Counter[int]:
        """References held, by piece of a state."""
        return Counter(piece for node in self.nodes() for piece in node.state or ())

    def check_integrity(self) -> None:
        """Positions join up, page counts fit, every leaf is of use, every candidate is queued."""
        for node in self.nodes():
            parent = node.parent
            if parent is None or not node.tokens:
                raise IntegrityError(f"{node} is detached or empty")
            if node.start != parent.end or parent.children.get(node.tokens[0]) is not node:
                raise IntegrityError(f"{node} does not continue {parent}")
            first = node.start // self._pages.page_tokens
            if len(node.pages) != self._pages.pages_for(node.end) - first:
                raise IntegrityError(f"{node} has the wrong number of pages")
            if self._stateful and not node.children and node.state is None and not node.locks:
                raise IntegrityError(f"{node} is a leaf that cannot be hit")
            queued = self._leaves if not node.children else self._interior
            key = self._leaf_key(node) if not node.children else self._interior_key(node)
            if key is not None and node not in queued:
                raise IntegrityError(f"{node} can be evicted but is not in the queue")


def _common(segment: list[int], tokens: list[int], offset: int, limit: int) -> int:
    """Length of the common prefix of ``segment`` and ``tokens[offset:limit]``.

    Comparing slices runs at memory speed, so a mismatch is found by halving.
    """
    length = min(len(segment), limit - offset)
    if tokens[offset : offset + length] == segment[:length]:
        return length
    low, high = 0, length  # equal below low, different somewhere below high
    while high - low > 1:
        middle = (low + high) // 2
        if tokens[offset + low : offset + middle] == segment[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _state_above(node: Node) -> int:
    above = node.parent
    while above is not None and above.state is None:
        above = above.parent
    return above.end if above is not None else 0
