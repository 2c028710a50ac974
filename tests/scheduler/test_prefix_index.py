"""The index against its invariants, under random use by several passes at once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.prefix_index import Block, PrefixIndex


def path(name: str) -> list[bytes]:
    return [name[: i + 1].encode() for i in range(len(name))]


def keep(index: PrefixIndex, name: str, now: float = 0.0) -> int:
    """Computes a prompt as a pass does; how many of its blocks are readable afterwards."""
    hashes = path(name)
    cached = index.match(hashes, len(hashes))
    index.pin(hashes[:cached])
    granted = index.allocate(hashes, cached, now)
    index.commit([block for block, _ in granted])
    index.unpin(hashes[:cached])
    return index.match(hashes, len(hashes))


def test_a_second_identical_prompt_hits_while_pages_are_free() -> None:
    index = PrefixIndex(10)
    assert keep(index, "abcd") == 4
    assert index.match(path("abcd"), 4) == 4
    assert index.match(path("abxy"), 4) == 2
    assert index.match(path("abcd"), 3) == 3, "the limit holds"
    assert len(set(index.pages_of(path("abcd")))) == 4


def test_what_is_being_written_cannot_be_read_yet() -> None:
    index = PrefixIndex(4)
    granted = index.allocate(path("ab"), 0, 0.0)
    assert index.match(path("ab"), 2) == 0
    assert index.allocate(path("abc"), 0, 0.0) != granted, "a second pass gets no second page for the same block"
    index.commit([block for block, _ in granted])
    assert index.match(path("ab"), 2) == 2


def test_an_aborted_block_takes_what_hangs_below_it_along() -> None:
    index = PrefixIndex(4)
    index.allocate(path("a"), 0, 0.0)
    below = [block for block, _ in index.allocate(path("ab"), 0, 0.0)]
    assert below == [b"ab"]
    index.commit(below)
    index.abort([b"a"])
    assert index.match(path("ab"), 2) == 0
    assert index.stats()["prefix_blocks_free"] == 4


def test_a_block_written_before_its_parent_is_read_after_it() -> None:
    index = PrefixIndex(4)
    inserted: list[Block] = []
    index.on_inserted = inserted.extend
    index.allocate(path("a"), 0, 0.0)
    index.allocate(path("ab"), 0, 0.0)
    index.commit([b"ab"])
    assert inserted == []
    index.commit([b"a"])
    assert inserted == [b"a", b"ab"]


def test_leaves_go_first() -> None:
    index = PrefixIndex(3)
    keep(index, "abc")
    evicted: list[Block] = []
    index.on_evicted = evicted.extend
    keep(index, "x")
    assert evicted == [b"abc"]


def test_what_a_pass_reads_is_not_evicted() -> None:
    index = PrefixIndex(2)
    keep(index, "ab")
    index.pin(path("ab"))
    assert index.allocate(path("xy"), 0, 0.0) == []
    assert index.match(path("ab"), 2) == 2


def test_a_prompt_longer_than_the_pool_keeps_its_beginning() -> None:
    index = PrefixIndex(3)
    assert keep(index, "abcdefgh") == 3


def test_a_scan_of_one_off_prompts_does_not_flush_a_hot_prefix() -> None:
    index = PrefixIndex(40)
    for i in range(3):
        keep(index, f"hothothothot{i}")
    for i in range(300):
        keep(index, f"{chr(1000 + i)}23456789", float(i))
        if i % 5 == 4:
            assert keep(index, f"hothothothot{chr(2000 + i)}") >= 12, f"lost after {i} one-off prompts"


def test_a_hot_prefix_that_nobody_asks_for_any_more_gives_way() -> None:
    index = PrefixIndex(20)
    keep(index, "hothothothothothoth!")
    keep(index, "hothothothothothoth?")
    for i in range(20):
        keep(index, f"{chr(1000 + i)}23456789")
    kept = keep(index, "newcomer")
    assert kept == 8


def test_a_prefix_that_comes_back_soon_after_it_was_turned_away_is_kept() -> None:
    index = PrefixIndex(8)
    keep(index, "hothot12")
    keep(index, "hothot12")
    assert keep(index, "newnew") == 0, "all pages hold what came back"
    assert keep(index, "newnew") == 6, "and so did this one"


def test_waiting_jobs_keep_their_prefix() -> None:
    class Wanted:
        def wanted(self, block: Block) -> bool:
            return block == b"ab"

        def wanted_depth(self, hashes: object, start: int) -> int:
            return start

    index = PrefixIndex(4)
    index.demand = Wanted()
    keep(index, "ab")
    for i in range(50):
        keep(index, f"{chr(1000 + i)}23")
    assert index.match(path("ab"), 2) == 2


def test_an_empty_pool_keeps_nothing() -> None:
    index = PrefixIndex(0)
    assert keep(index, "abc") == 0
    assert index.stats()["prefix_hit_ratio"] == 0.0


class IndexMachine(RuleBasedStateMachine):
    """Passes begin, end, fail and overlap over a small alphabet of prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(7)
        self.readable: set[Block] = set()
        self.index.on_inserted = self._inserted
        self.index.on_evicted = self._evicted
        self.passes: list[tuple[list[Block], dict[Block, int]]] = []
        self.now = 0.0

    def _inserted(self, blocks: object) -> None:
        for block in blocks:  # type: ignore[attr-defined]
            assert block not in self.readable
            self.readable.add(block)

    def _evicted(self, blocks: object) -> None:
        for block in blocks:  # type: ignore[attr-defined]
            self.readable.remove(block)

    @rule(names=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=3))
    def begin(self, names: list[str]) -> None:
        self.now += 1.0
        pinned: list[Block] = []
        kept: dict[Block, int] = {}
        for name in names:
            hashes = path(name)
            cached = self.index.match(hashes, len(hashes))
            self.index.pin(hashes[:cached])
            pinned += hashes[:cached]
            granted = self.index.allocate(hashes, cached, self.now)
            assert all(block in hashes[cached:] for block, _ in granted)
            kept.update(granted)
        self.passes.append((pinned, kept))

    @precondition(lambda self: self.passes)
    @rule(which=st.integers(0, 10), dropped=st.integers(0, 3))
    def end(self, which: int, dropped: int) -> None:
        pinned, kept = self.passes.pop(which % len(self.passes))
        blocks = list(kept)
        cut = max(0, len(blocks) - dropped)
        self.index.commit(blocks[:cut])
        self.index.abort(blocks[cut:])
        self.index.unpin(pinned)

    @invariant()
    def pages_are_held_once(self) -> None:
        held = [page for _, kept in self.passes for page in kept.values()]
        held += self.index.pages_of(sorted(self.readable))  # type: ignore[type-var]
        assert len(held) == len(set(held)), "a page belongs to one block"
        assert len(held) <= self.index.num_pages
        if not self.passes:
            assert self.index.stats()["prefix_blocks_free"] == self.index.num_pages - len(held)

    @invariant()
    def readable_blocks_are_closed_under_prefixes(self) -> None:
        for block in self.readable:
            assert isinstance(block, bytes)
            assert len(block) == 1 or block[:-1] in self.readable

    @invariant()
    def matching_finds_the_longest_readable_prefix(self) -> None:
        for name in ("abcabc", "aaaaaa", "cabbac", "b"):
            hashes = path(name)
            expected = 0
            while expected < len(hashes) and hashes[expected] in self.readable:
                expected += 1
            assert self.index.match(hashes, len(hashes)) == expected

    @invariant()
    def pinned_blocks_stay(self) -> None:
        for pinned, _ in self.passes:
            assert all(block in self.readable for block in pinned)


IndexMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase


def test_unknown_pages_are_an_error() -> None:
    with pytest.raises(KeyError):
        PrefixIndex(1).pages_of([b"x"])
    with pytest.raises(ValueError, match="pages"):
        PrefixIndex(-1)
