"""Which prefix block lies in which pool page: a tree of blocks, its pages, and what may be evicted.

A block's hash names the whole prefix up to its end, so the blocks of a prompt are a path from a root. A block is
*readable* when it was computed and its parent is readable; hence the readable blocks of a path are always its first
ones, and how many there are is found by bisection. A block with children is never evicted before them, nor one that is
pinned or being written.

The index moves no KV: it hands out page numbers, and the engine says when they hold what they should.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.keep_policy import Block, Demand, KeepPolicy, NoDemand, Worth

__all__ = ["Block", "PrefixIndex"]

_WANTED_MET = 64  # wanted candidates that one search for a victim looks past

Listener = Callable[[Sequence[Block]], None]


@dataclass(slots=True, eq=False)
class _Node:
    block: Block
    page: int
    parent: _Node | None
    children: dict[_Node, None] = field(default_factory=dict)
    pins: int = 0
    used: int = 0  # policy clock of the last use
    used_s: float = 0.0
    returning: bool = False
    written: bool = False
    readable: bool = False
    doomed: bool = False  # an ancestor is gone: to be freed when its writer is done


class PrefixIndex:
    """A pool of ``num_pages`` pages. Not thread-safe: the caller holds its own lock.

    ``on_inserted`` and ``on_evicted`` are called at the end of an operation with the blocks that became readable or
    stopped being so; they may call ``match``.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"a pool of {num_pages} pages")
        self.num_pages = num_pages
        self.demand: Demand = NoDemand()
        self.on_inserted: Listener = _ignore
        self.on_evicted: Listener = _ignore
        self._policy = KeepPolicy(num_pages)
        self._nodes: dict[Block, _Node] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        # Candidates for eviction, least recently used first; an entry is valid while the node still looks like it.
        self._once: list[tuple[int, int, _Node]] = []
        self._returning: list[tuple[int, int, _Node]] = []
        self._pushes = 0
        self._now = 0.0
        self._hits = self._misses = self._evictions = self._rejections = 0
        self._idle_s = 0.0  # summed over evictions

    # --- looking up --------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[Block], limit: int, at_least: int = 0) -> int:
        """How many of the first ``limit`` blocks are readable, given that ``at_least`` are."""
        nodes = self._nodes
        low, high = at_least, min(limit, len(hashes))
        middle = low + 1  # the ends first: mostly nothing more is cached, or everything
        while low < high:
            node = nodes.get(hashes[middle - 1])
            if node is not None and node.readable:
                low = middle
                middle = high if middle == at_least + 1 else (low + high + 1) // 2
            else:
                high = middle - 1
                middle = (low + high + 1) // 2
        return low

    def pages_of(self, hashes: Sequence[Block]) -> list[int]:
        """Pages of readable blocks. Raises KeyError for one that is not in the pool."""
        return [self._nodes[block].page for block in hashes]

    # --- reading -----------------------------------------------------------------------------------------------------

    def pin(self, hashes: Iterable[Block]) -> None:
        """Keeps readable blocks from eviction until as many ``unpin``; counts as a use. Raises KeyError."""
        clock, now = self._policy.clock, self._now
        for block in hashes:
            node = self._nodes[block]
            node.pins += 1
            node.used, node.used_s, node.returning = clock, now, True
            self._hits += 1

    def unpin(self, hashes: Iterable[Block]) -> None:
        for block in hashes:
            node = self._nodes[block]
            node.pins -= 1
            self._offer(node)

    # --- writing -----------------------------------------------------------------------------------------------------

    def allocate(self, hashes: Sequence[Block], start: int, now: float) -> list[tuple[Block, int]]:
        """Pages for the blocks from ``start`` on that a pass will compute, parents first, as far as they are worth it.

        The caller holds pins on ``hashes[:start]``. Blocks that another job is already writing are passed over. Every
        page handed out is settled by one ``commit`` or ``abort`` of its block. ``now`` in s dates the use.
        """
        policy, nodes = self._policy, self._nodes
        self._now = max(self._now, now)
        granted: list[tuple[Block, int]] = []
        evicted: list[Block] = []
        parent = nodes.get(hashes[start - 1]) if start else None
        wanted_to = self.demand.wanted_depth(hashes, start) if not self._free else start
        blocked = start > 0 and (parent is None or parent.doomed)
        for i in range(start, len(hashes)):
            block = hashes[i]
            node = nodes.get(block)
            if node is not None:  # somebody writes it: two that want it make it a returning one
                node.returning, node.used = True, policy.clock
                self._offer(node)
                blocked = blocked or node.doomed
                parent = node
                continue
            policy.clock += 1
            self._misses += 1
            worth = policy.newcomer(block)
            page = None if blocked else self._page_for(Worth.WANTED if i < wanted_to else worth, parent, evicted)
            if page is None:
                blocked = True
                self._rejections += 1
                policy.dropped(block)
                continue
            policy.kept(block)
            node = _Node(block, page, parent, used=policy.clock, used_s=self._now, returning=worth > Worth.SEEN_ONCE)
            nodes[block] = node
            if parent is not None:
                parent.children[node] = None
            granted.append((block, page))
            parent = node
        if evicted:
            self.on_evicted(evicted)
        return granted

    def commit(self, hashes: Iterable[Block]) -> None:
        """These blocks' pages hold their KV now. Raises KeyError for one that was not handed out."""
        inserted: list[Block] = []
        for block in hashes:
            node = self._nodes[block]
            node.written = True
            if node.doomed:
                self._free_node(node)
            elif node.parent is None or node.parent.readable:
                self._make_readable(node, inserted)
        if inserted:
            self.on_inserted(inserted)

    def abort(self, hashes: Iterable[Block]) -> None:
        """These blocks were not computed: their pages are free again, and what hangs below them is lost."""
        for block in hashes:
            node = self._nodes[block]
            below = list(node.children)
            self._free_node(node)
            while below:
                child = below.pop()
                below.extend(child.children)
                child.doomed = True
                if child.written:
                    self._free_node(child)

    # --- telling -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        asked = self._hits + self._misses
        return {
            "prefix_blocks": float(self.num_pages),
            "prefix_blocks_used": float(self.num_pages - len(self._free)),
            "prefix_blocks_free": float(len(self._free)),
            "prefix_block_hits": float(self._hits),
            "prefix_block_misses": float(self._misses),
            "prefix_hit_ratio": self._hits / asked if asked else 0.0,
            "prefix_block_evictions": float(self._evictions),
            "prefix_blocks_not_kept": float(self._rejections),
            "prefix_evicted_idle_seconds": self._idle_s / self._evictions if self._evictions else 0.0,
        }

    # --- inside ------------------------------------------------------------------------------------------------------

    def _make_readable(self, node: _Node, inserted: list[Block]) -> None:
        below = [node]
        while below:
            node = below.pop()
            node.readable = True
            inserted.append(node.block)
            self._offer(node)
            below.extend(child for child in node.children if child.written and not child.readable)

    def _page_for(self, worth: Worth, parent: _Node | None, evicted: list[Block]) -> int | None:
        if self._free:
            return self._free.pop()
        if parent is not None:  # about to have a child
            parent.pins += 1
        victim = self._victim(self._once, returning=False)
        if victim is None:
            victim = self._victim(self._returning, returning=True)
            if victim is not None and worth < Worth.RETURNING and not self._policy.stale(victim.used):
                self._offer(victim)
                victim = None
        if victim is not None:
            self._evictions += 1
            self._idle_s += self._now - victim.used_s
            evicted.append(victim.block)
            self._policy.dropped(victim.block)
            self._free_node(victim)
        if parent is not None:
            parent.pins -= 1
            self._offer(parent)
        return self._free.pop() if victim is not None else None

    def _victim(self, heap: list[tuple[int, int, _Node]], *, returning: bool) -> _Node | None:
        """The least recently used evictable node of one class, taken off its heap. Being waited for counts as use."""
        wanted: list[_Node] = []
        found = None
        while heap and found is None and len(wanted) < _WANTED_MET:
            used, _, node = heapq.heappop(heap)
            if node.used != used or node.returning != returning or not self._evictable(node):
                continue  # whatever changed it offered it anew
            if self.demand.wanted(node.block):
                wanted.append(node)
            else:
                found = node
        for node in wanted:
            node.used, node.used_s = self._policy.clock, self._now
            self._offer(node)
        return found

    def _evictable(self, node: _Node) -> bool:
        return node.readable and not node.children and node.pins == 0

    def _offer(self, node: _Node) -> None:
        """Puts ``node`` among the candidates if it may be evicted."""
        if not self._evictable(node):
            return
        heap = self._returning if node.returning else self._once
        if len(heap) > 2 * self.num_pages + 64:  # most entries no longer hold
            live = {n: (n.used, k, n) for u, k, n in heap if n.used == u and self._evictable(n)}
            heap[:] = [entry for entry in live.values() if entry[2].returning == node.returning]
            heapq.heapify(heap)
        self._pushes += 1
        heapq.heappush(heap, (node.used, self._pushes, node))

    def _free_node(self, node: _Node) -> None:
        del self._nodes[node.block]
        node.readable = False
        self._free.append(node.page)
        parent = node.parent
        if parent is not None:
            del parent.children[node]
            self._offer(parent)


def _ignore(blocks: Sequence[Block]) -> None: ...
