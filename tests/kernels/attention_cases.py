"""Inputs for attention and its answer in float64, written out row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Attention:
    """Arguments of `kernels.attention.attention` for some segments; pages lie scattered, what is not a key is NaN."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    cu_q: torch.Tensor
    q_pos: torch.Tensor
    max_q: int
    options: dict = field(default_factory=dict)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        parts = (self.q, self.k_pages, self.v_pages, self.page_table, self.cu_q, self.q_pos)
        return tuple(part.to(device) for part in parts)

    def outputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), filled with NaN."""
        nan = float("nan")
        out = torch.full(self.q.shape, nan, dtype=self.q.dtype, device=device)
        return out, torch.full(self.q.shape[:2], nan, device=device)


def make(
    segments: Sequence[tuple[int, int]],
    *,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
) -> Attention:
    """segments: (rows before, rows here) of each. The content of a position depends on segment and position alone."""
    shuffle = torch.Generator().manual_seed(seed)
    lengths = [before + here for before, here in segments]
    widths = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(widths) + 1, generator=shuffle).int()
    k_pages = torch.full((len(order), page, kv_heads, head_dim), float("nan"), dtype=dtype)
    v_pages = torch.full_like(k_pages, float("nan"))
    table = torch.full((len(segments), max(*widths, 1)), int(order[-1]), dtype=torch.int32)
    rows, taken = [], 0
    for index, (before, here) in enumerate(segments):
        content = torch.Generator().manual_seed(1000 * seed + index)
        length = before + here
        q, k, v = (
            torch.randn(4096, count, head_dim, generator=content)[:length].to(dtype)
            for count in (heads, kv_heads, kv_heads)
        )
        table[index, : widths[index]] = order[taken : taken + widths[index]]
        taken += widths[index]
        positions = torch.arange(length)
        where = (table[index].long()[positions // page], positions % page)
        k_pages[where], v_pages[where] = k, v
        rows.append(q[before:])
    counts = torch.tensor([0, *(here for _, here in segments)])
    options: dict = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap, "sinks": None}
    if sinks:
        options["sinks"] = torch.randn(heads, generator=shuffle)
    return Attention(
        q=torch.cat(rows), k_pages=k_pages, v_pages=v_pages, page_table=table, cu_q=counts.cumsum(0).int(),
        q_pos=torch.tensor([before for before, _ in segments]).int(), max_q=int(counts.max()), options=options,
    )  # fmt: skip


def expected(case: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64."""
    page, kv_heads = case.k_pages.shape[1:3]
    group = case.q.shape[1] // kv_heads
    scale, window, soft_cap, sinks = (case.options[name] for name in ("scale", "window", "soft_cap", "sinks"))
    out = torch.empty(case.q.shape, dtype=torch.float64)
    lse = torch.empty(case.q.shape[:2], dtype=torch.float64)
    for segment, start in enumerate(case.q_pos.tolist()):
        first, last = case.cu_q[segment : segment + 2].tolist()
        positions = torch.arange(start + last - first)
        where = (case.page_table[segment].long()[positions // page], positions % page)
        k, v = (p[where].double().repeat_interleave(group, 1) for p in (case.k_pages, case.v_pages))
        for row in range(first, last):
            at = start + row - first
            keys = slice(max(0, at - window + 1) if window else 0, at + 1)
            scores = torch.einsum("hd,khd->hk", case.q[row].double(), k[keys]) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            everything = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], 1)
            lse[row] = torch.logsumexp(everything, 1)
            out[row] = torch.einsum("hk,khd->hd", torch.exp(scores - lse[row][:, None]), v[keys])
    return out, lse
