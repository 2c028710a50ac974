"""Lays the prompts of one pass out as rows, so that what they share is computed once.

Prompts that begin alike form a tree whose nodes are KV blocks; a pass is a forest of such trees behind their cached
prefixes. Walking it depth first gives the row order in which every row's ancestors come before it. That order is what
lets the decoder treat a layer as one left-to-right sweep over chunks of rows.

Pure bookkeeping: no tensors, no memory management beyond asking the caller for pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Forest", "ForestJob", "JobRows", "Segment", "build_forest"]


@dataclass(slots=True)
class ForestJob:
    """One prompt as the forest sees it."""

    token_ids: Sequence[int]
    block_hashes: Sequence[bytes | int]  # one for each whole block
    cached_pages: Sequence[int] = ()  # addresses in layer 0 of the pool pages that hold its first blocks


@dataclass(slots=True)
class Segment:
    """Rows ``row_start .. row_start + num_rows`` are consecutive positions of one prompt (or of several alike)."""

    row_start: int
    num_rows: int
    pos_start: int
    pages: list[int]  # page of block i of the prompt, from position 0 to the segment's last row
    pooled: list[bool]  # whether pages[i] is a pool page


@dataclass(slots=True)
class JobRows:
    """Where a job's uncached positions lie: runs of (first position, first row, length), by position."""

    runs: list[tuple[int, int, int]]
    cached_tokens: int  # read from the pool
    shared_tokens: int = 0  # computed in this pass on behalf of an earlier job

    @property
    def last_row(self) -> int:
        _, row, length = self.runs[-1]
        return row + length - 1


@dataclass(slots=True)
class Forest:
    token_ids: list[int]
    positions: list[int]
    pages: list[int]  # page of each row
    pooled: list[bool]  # whether that is a pool page
    segments: list[Segment]
    jobs: list[JobRows]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True, eq=False)
class _Node:
    tokens: Sequence[int]
    pos: int
    page: int
    pooled: bool
    children: dict[bytes | int, _Node] = field(default_factory=dict)
    tails: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    row: int = -1

    def heirs(self) -> list[_Node]:
        return [*self.children.values(), *self.tails.values()]


def build_forest(
    jobs: Sequence[ForestJob],
    block_tokens: int,
    kept_page: Callable[[bytes | int], int | None],
    scratch_page: Callable[[], int],
) -> Forest:
    """Rows for all ``jobs`` (each with at least one token that is not cached).

    ``kept_page(hash)`` gives the layer-0 address of the pool page in which a block is to be kept, or None;
    ``scratch_page()`` that of a page that lives as long as the pass. Prompts given twice cost their rows once.
    """
    roots: dict[tuple[int, ...] | bytes | int, _Node] = {}
    paths: list[list[_Node]] = []
    cached_of_root: dict[int, Sequence[int]] = {}
    for job in jobs:
        n = len(job.token_ids)
        cached = len(job.cached_pages)
        shareable = (n - 1) // block_tokens
        path: list[_Node] = []
        node: _Node | None = None
        for block in range(cached, shareable):
            key = job.block_hashes[block]
            siblings = roots if node is None else node.children
            child = siblings.get(key)
            if child is None:
                start = block * block_tokens
                child = _new_block(job.token_ids[start : start + block_tokens], start, key, kept_page, scratch_page)
                siblings[key] = child
                if node is None:
                    cached_of_root[id(child)] = job.cached_pages
            path.append(child)
            node = child
        start = shareable * block_tokens
        tail_tokens = tuple(job.token_ids[start:])
        if node is not None:
            tails: dict = node.tails
            tail_key: tuple = tail_tokens
        else:  # nothing but the tail is new: equal tails must also sit on equal cached prefixes
            tails = roots
            tail_key = (tail_tokens, tuple(job.cached_pages))
        tail = tails.get(tail_key)
        if tail is None:
            whole = len(tail_tokens) == block_tokens and shareable < len(job.block_hashes)
            if whole:
                tail = _new_block(tail_tokens, start, job.block_hashes[shareable], kept_page, scratch_page)
            else:
                tail = _Node(tail_tokens, start, scratch_page(), False)
            tails[tail_key] = tail
            if node is None:
                cached_of_root[id(tail)] = job.cached_pages
        path.append(tail)
        paths.append(path)
    return _lay_out(list(roots.values()), paths, cached_of_root, [len(j.cached_pages) * block_tokens for j in jobs])


def _new_block(
    tokens: Sequence[int],
    pos: int,
    key: bytes | int,
    kept_page: Callable[[bytes | int], int | None],
    scratch_page: Callable[[], int],
) -> _Node:
    page = kept_page(key)
    if page is None:
        return _Node(tokens, pos, scratch_page(), False)
    return _Node(tokens, pos, page, True)


def _lay_out(
    roots: list[_Node], paths: list[list[_Node]], cached_of_root: dict[int, Sequence[int]], cached_tokens: list[int]
) -> Forest:
    forest = Forest([], [], [], [], [], [])
    stack: list[tuple[_Node, list[int], list[bool]]] = []
    for root in reversed(roots):
        cached = list(cached_of_root[id(root)])
        stack.append((root, cached, [True] * len(cached)))
    while stack:
        node, pages, pooled = stack.pop()
        pages, pooled = list(pages), list(pooled)
        segment = Segment(forest.num_rows, 0, node.pos, pages, pooled)
        while True:
            node.row = forest.num_rows
            count = len(node.tokens)
            forest.token_ids.extend(node.tokens)
            forest.positions.extend(range(node.pos, node.pos + count))
            forest.pages.extend([node.page] * count)
            forest.pooled.extend([node.pooled] * count)
            pages.append(node.page)
            pooled.append(node.pooled)
            heirs = node.heirs()
            if len(heirs) != 1:
                break
            node = heirs[0]
        segment.num_rows = forest.num_rows - segment.row_start
        forest.segments.append(segment)
        for heir in reversed(heirs):
            stack.append((heir, pages, pooled))
    seen: set[int] = set()
    for path, cached_count in zip(paths, cached_tokens, strict=True):
        rows = JobRows([], cached_count)
        for node in path:
            count = len(node.tokens)
            if id(node) in seen:
                rows.shared_tokens += count
            seen.add(id(node))
            if rows.runs and rows.runs[-1][1] + rows.runs[-1][2] == node.row:
                pos, row, length = rows.runs[-1]
                rows.runs[-1] = (pos, row, length + count)
            else:
                rows.runs.append((node.pos, node.row, count))
        forest.jobs.append(rows)
    return forest
