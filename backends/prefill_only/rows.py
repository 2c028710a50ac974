"""Turns a forest into the index tensors that kernels read, one record a chunk of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.prefill_only.forest import Forest, Segment

__all__ = ["ROW_ALIGN", "AttentionRows", "KvRows", "attention_rows", "kv_rows", "padded"]

# Row counts of every matrix product are multiples of this: a CPU's GEMM gives a row the same bits in any such count.
ROW_ALIGN = 16


def padded(rows: int) -> int:
    return -(-rows // ROW_ALIGN) * ROW_ALIGN


@dataclass(slots=True)
class KvRows:
    """Where the K and V of a run of rows go. Rows past the last real one are padding and are not written."""

    start: int
    count: int
    positions: torch.Tensor  # int32 [count]
    slots: torch.Tensor  # int64 [count], layer 0's; negative: padding
    pooled: torch.Tensor | None  # int64 [count], 1 where the slot moves with the layer; None: nowhere

    def slots_at(self, layer_slots: int) -> torch.Tensor:
        """``layer_slots``: a page's slots, times the layer."""
        if self.pooled is None or layer_slots == 0:
            return self.slots
        return torch.add(self.slots, self.pooled, alpha=layer_slots)


@dataclass(slots=True)
class AttentionRows:
    """Query segments of a run of rows and the pages that they attend to."""

    count: int
    positions: torch.Tensor  # int32 [count]
    page_table: torch.Tensor  # int32 [segments, pages], layer 0's
    pooled: torch.Tensor | None  # int32 [segments, pages], 1 where the page moves with the layer
    cu_q: torch.Tensor  # int32 [segments + 1]
    q_pos: torch.Tensor  # int32 [segments]
    max_q: int

    def table_at(self, layer: int) -> torch.Tensor:
        if self.pooled is None or layer == 0:
            return self.page_table
        return torch.add(self.page_table, self.pooled, alpha=layer)


def kv_rows(forest: Forest, page_tokens: int, chunk_rows: int, device: torch.device) -> list[KvRows]:
    """Cuts all rows of ``forest`` into chunks of ``chunk_rows`` (a multiple of ROW_ALIGN)."""
    n = forest.num_rows
    padding = padded(n) - n
    positions = torch.tensor(forest.positions + [0] * padding, dtype=torch.int32)
    pages = torch.tensor(forest.pages, dtype=torch.int64)
    slots = torch.full((n + padding,), -1, dtype=torch.int64)
    slots[:n] = pages * page_tokens + positions[:n] % page_tokens
    positions, slots = positions.to(device), slots.to(device)
    pooled = None
    if any(forest.pooled):
        pooled = torch.tensor(forest.pooled + [False] * padding, dtype=torch.int64).to(device)
    chunks = []
    for start in range(0, n, chunk_rows):
        stop = min(start + chunk_rows, n + padding)
        part = None if pooled is None else pooled[start:stop]
        chunks.append(KvRows(start, stop - start, positions[start:stop], slots[start:stop], part))
    return chunks


def attention_rows(
    segments: Sequence[Segment], rows: Sequence[tuple[int, int]], count: int, page_tokens: int, device: torch.device
) -> AttentionRows:
    """Queries at the row ranges ``rows`` (start, stop; ascending, disjoint), laid out one after another.

    ``count`` is the number of query rows with padding; padding belongs to no segment, its output is undefined.
    """
    positions: list[int] = []
    tables: list[list[int]] = []
    pooled: list[list[bool]] = []
    cu_q, q_pos, max_q = [0], [], 0
    at = 0
    for start, stop in rows:
        while segments[at].row_start + segments[at].num_rows <= start:
            at += 1
        here = at
        while start < stop:
            segment = segments[here]
            length = min(stop, segment.row_start + segment.num_rows) - start
            first = segment.pos_start + start - segment.row_start
            last_page = (first + length - 1) // page_tokens
            positions.extend(range(first, first + length))
            tables.append(segment.pages[: last_page + 1])
            pooled.append(segment.pooled[: last_page + 1])
            cu_q.append(cu_q[-1] + length)
            q_pos.append(first)
            max_q = max(max_q, length)
            start += length
            here += 1
    width = max(map(len, tables))
    table = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32).to(device)
    moves = None
    if any(any(p) for p in pooled):
        moves = torch.tensor([p + [False] * (width - len(p)) for p in pooled], dtype=torch.int32).to(device)
    positions.extend([0] * (count - len(positions)))
    return AttentionRows(
        count,
        torch.tensor(positions, dtype=torch.int32).to(device),
        table,
        moves,
        torch.tensor(cu_q, dtype=torch.int32).to(device),
        torch.tensor(q_pos, dtype=torch.int32).to(device),
        max_q,
    )
