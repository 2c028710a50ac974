"""The layout of a pass: rows, sharing, page tables."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.prefill_only.block_hashes import block_hashes, salt_of
from backends.prefill_only.forest import Forest, ForestJob, build_forest

BLOCK = 4


class Pages:
    """Numbers scratch pages from 1000 on; keeps the blocks that it was told to."""

    def __init__(self, kept: dict[bytes | int, int] | None = None) -> None:
        self.kept = kept or {}
        self.taken = 0

    def scratch(self) -> int:
        self.taken += 1
        return 999 + self.taken


def forest_of(prompts: list[list[int]], cached: list[int] | None = None, pages: Pages | None = None) -> Forest:
    """``cached``: how many leading blocks of each prompt lie in pool pages; equal prefixes have equal pages."""
    pages = pages or Pages()
    numbers: dict[bytes, int] = {}
    jobs = []
    for prompt, blocks in zip(prompts, cached or [0] * len(prompts), strict=True):
        hashes = block_hashes(prompt, BLOCK, b"salt")
        jobs.append(ForestJob(prompt, hashes, [numbers.setdefault(h, len(numbers)) for h in hashes[:blocks]]))
    return build_forest(jobs, BLOCK, pages.kept.get, pages.scratch)


def prompt_of(forest: Forest, job: int, prompts: list[list[int]]) -> list[int]:
    """The job's uncached tokens as the forest's rows have them."""
    tokens = []
    for pos, row, length in forest.jobs[job].runs:
        assert forest.positions[row : row + length] == list(range(pos, pos + length))
        tokens += forest.token_ids[row : row + length]
    return prompts[job][: forest.jobs[job].cached_tokens] + tokens


def check(forest: Forest, prompts: list[list[int]]) -> None:
    for i, prompt in enumerate(prompts):
        assert prompt_of(forest, i, prompts) == prompt
        assert forest.positions[forest.jobs[i].last_row] == len(prompt) - 1
    written: dict[tuple[int, int], int] = {}
    covered = []
    for segment in forest.segments:
        covered += range(segment.row_start, segment.row_start + segment.num_rows)
        for i in range(segment.num_rows):
            row, pos = segment.row_start + i, segment.pos_start + i
            assert forest.positions[row] == pos
            page = segment.pages[pos // BLOCK]
            assert (page, segment.pooled[pos // BLOCK]) == (forest.pages[row], forest.pooled[row])
            assert written.setdefault((page, pos % BLOCK), row) == row  # nobody writes a slot twice
        # Every page before the segment was written by an earlier row of the same position, or is cached.
        for block in range(segment.pos_start // BLOCK):
            rows = [r for (page, _), r in written.items() if page == segment.pages[block]]
            assert all(r < segment.row_start and forest.positions[r] // BLOCK == block for r in rows)
    assert covered == list(range(forest.num_rows))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 33])
def test_one_prompt_is_one_segment(length: int) -> None:
    prompts = [list(range(length))]
    forest = forest_of(prompts)
    check(forest, prompts)
    assert len(forest.segments) == 1 and forest.num_rows == length


def test_a_common_prefix_is_computed_once() -> None:
    profile = list(range(100, 140))
    prompts = [[*profile, 1, 2, 3], [*profile, 4, 5], [*profile, 1, 2, 9, 9, 9]]
    forest = forest_of(prompts)
    check(forest, prompts)
    assert forest.num_rows == 40 + 3 + 2 + 5
    assert [j.shared_tokens for j in forest.jobs] == [0, 40, 40]


def test_equal_prompts_cost_their_rows_once() -> None:
    prompts = [list(range(11))] * 3 + [list(range(8))] * 2
    forest = forest_of(prompts)
    check(forest, prompts)
    # The last block of the shorter prompt is never read from another's: its last row is asked for on its own.
    assert forest.num_rows <= 11 + 4


def test_a_prompt_that_is_the_whole_beginning_of_another() -> None:
    for n in (3, 4, 5, 8, 12):
        prompts = [list(range(n)), list(range(30))]
        check(forest_of(prompts), prompts)


def test_cached_blocks_have_no_rows_and_lead_the_page_table() -> None:
    prompts = [list(range(22)), [*range(16), 7, 7]]
    forest = forest_of(prompts, [3, 4])
    check(forest, prompts)
    assert [j.cached_tokens for j in forest.jobs] == [12, 16]
    assert all(s.pooled[:3] == [True] * 3 for s in forest.segments)


def test_equal_tails_behind_different_cached_prefixes_stay_apart() -> None:
    prompts = [[1] * 4 + [9, 9], [2] * 4 + [9, 9]]
    forest = forest_of(prompts, [1, 1])
    check(forest, prompts)
    assert forest.num_rows == 4


def test_kept_blocks_are_written_to_their_pool_page() -> None:
    prompt = list(range(18))
    hashes = block_hashes(prompt, BLOCK, b"salt")
    forest = forest_of([prompt], pages=Pages({hashes[0]: 5, hashes[1]: 6}))
    check(forest, [prompt])
    assert forest.pages[:8] == [5] * 4 + [6] * 4 and forest.pooled[:8] == [True] * 8
    assert not any(forest.pooled[8:])


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_forests_hold_every_prompt(seed: int) -> None:
    rng = random.Random(seed)
    stems = [[rng.randrange(3) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
    prompts = []
    for _ in range(rng.randrange(1, 12)):
        stem = rng.choice(stems)
        prompts.append(stem[: rng.randrange(1, len(stem) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(9))])
    cached = [rng.randrange((len(p) - 1) // BLOCK + 1) for p in prompts]
    forest = forest_of(prompts, cached if rng.random() < 0.5 else None)
    check(forest, prompts)
    assert forest.num_rows <= sum(map(len, prompts))


def test_hashes_name_the_prefix_and_its_owner() -> None:
    a = block_hashes(list(range(12)), BLOCK, salt_of("m", "alice", ""))
    assert a[:2] == block_hashes([*range(8), 99, 99, 99, 99], BLOCK, salt_of("m", "alice", ""))[:2]
    assert a[2] != block_hashes([*range(8), 99, 99, 99, 99], BLOCK, salt_of("m", "alice", ""))[2]
    for other in (
        salt_of("m", "bob", ""),
        salt_of("m", "alice", "x"),
        salt_of("n", "alice", ""),
        salt_of("m", "", "alice"),
    ):
        assert set(a).isdisjoint(block_hashes(list(range(12)), BLOCK, other))
