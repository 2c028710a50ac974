"""Causal attention of packed, ragged query segments over paged keys and values.

One public function, `attention`; the Triton kernel is in triton_attention.py. It does not write keys (kv_write.py) and
knows nothing of layers: a caller with several layers in one pool adds the layer's page offset to the table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.dispatch import use_native, use_triton

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_PAGE, MAX_PAGE = 16, 128

# Torch's CPU kernel picks its loops by shape. With queries padded to a multiple of 16 and keys to one of 512, and tiles
# that start at absolute multiples of 512, a row meets the same loop whatever else is computed.
_QUERY_PAD = 16
_TILE = 512


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    cu_q: torch.Tensor,
    q_pos: torch.Tensor,
    *,
    scale: float,
    max_q: int,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i, h] = Σ_j softmax_j(s_ij) · v[j, h // group], with s_ij = cap(scale · q[i, h] · k[j, h // group]).

    The sum runs over the keys j of the row's own segment with j ≤ pos and, if `window` > 0, j > pos − window; pos is
    the row's absolute position, q_pos[s] + (i − cu_q[s]). cap(x) = soft_cap · tanh(x / soft_cap) if `soft_cap` > 0.
    A sink adds exp(sinks[h]) to the softmax's denominator and nothing to the sum.

    q          [n, Hq, D]        bf16, fp16 or fp32; last stride 1, other strides free
    k_pages    [P, page, Hkv, D] same dtype; page a power of two from 16 to 128; Hkv divides Hq; last stride 1
    v_pages    [P, page, Hkv, D] as k_pages
    page_table [S, max_pages]    int32; key positions i·page … (i+1)·page − 1 of segment s lie in page page_table[s, i]
    cu_q       [S + 1]           int32; segment s owns rows cu_q[s] … cu_q[s+1] − 1 of q; may be empty
    q_pos      [S]               int32; absolute position of each segment's first query
    max_q                        rows in the longest segment (a GPU's grid is made without asking the device)
    sinks      [Hq]              any float dtype
    out        [n, Hq, D]        written and returned; allocated if None; last stride 1
    lse        [n, Hq]           fp32, written if given: log Σ_j exp(s_ij), the sink included

    Keys are taken in tiles that start at absolute multiples of the tile, in ascending order, so a row is bitwise the
    same alone, packed with others, or with any part of its prefix computed earlier.

    Errors: ValueError for a shape, dtype or page size outside the above. Page numbers are not checked.
    Source: Dao, FlashAttention-2 (2023), online softmax; Kwon et al., PagedAttention (2023), page table; sinks as in
    gpt-oss, soft cap as in Gemma 2.
    """
    _check(q, k_pages, v_pages, page_table, cu_q, q_pos)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    unsupported = None if q.shape[2] in HEAD_DIMS else f"head_dim {q.shape[2]}"
    if use_triton("attention", q, unsupported):
        from kernels import triton_attention as implementation

        return implementation.attention(
            q, k_pages, v_pages, page_table, cu_q, q_pos,
            scale=scale, max_q=max_q, window=window, soft_cap=soft_cap, sinks=sinks, out=out, lse=lse,
        )  # fmt: skip
    native = use_native("attention", q)
    if native is not None and native.supports_head_dim(q.shape[2]):
        result: torch.Tensor = native.attention(
            q, k_pages, v_pages, page_table, cu_q, q_pos,
            scale=scale, max_q=max_q, window=window, soft_cap=soft_cap, sinks=sinks, out=out, lse=lse,
        )  # fmt: skip
        return result
    return attention_torch(
        q, k_pages, v_pages, page_table, cu_q, q_pos,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, out=out, lse=lse,
    )  # fmt: skip


def _check(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    cu_q: torch.Tensor,
    q_pos: torch.Tensor,
) -> None:
    if q.ndim != 3 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(f"q must be [n, Hq, D] and k_pages, v_pages alike [P, page, Hkv, D], got {q.shape}, "
                         f"{k_pages.shape}, {v_pages.shape}")  # fmt: skip
    page, kv_heads, head_dim = k_pages.shape[1:]
    if head_dim != q.shape[2] or q.shape[1] % kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit {kv_heads} kv heads of {head_dim}")
    if not MIN_PAGE <= page <= MAX_PAGE or page & (page - 1):
        raise ValueError(f"page must be a power of two from {MIN_PAGE} to {MAX_PAGE}, got {page}")
    if q.dtype not in DTYPES or k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        raise ValueError(f"q, k_pages and v_pages must share bf16, fp16 or fp32, got {q.dtype}, {k_pages.dtype}")
    segments = q_pos.shape[0]
    if page_table.ndim != 2 or page_table.shape[0] != segments or cu_q.shape[0] != segments + 1:
        raise ValueError(f"page_table {tuple(page_table.shape)}, cu_q {tuple(cu_q.shape)} and q_pos "
                         f"{tuple(q_pos.shape)} do not describe the same segments")  # fmt: skip


def attention_torch(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    cu_q: torch.Tensor,
    q_pos: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention` in torch: the reference, and the path of a CPU without the C++ kernel. Any head_dim."""
    page = k_pages.shape[1]
    bounds, starts = cu_q.tolist(), q_pos.tolist()
    for segment, start in enumerate(starts):
        first, last = bounds[segment], bounds[segment + 1]
        if first == last:
            continue
        end = start + last - first
        lowest = max(0, start - window + 1) // _TILE * _TILE if window else 0
        pages = page_table[segment, lowest // page : -(-end // page)].long()
        k, v = (_gather(pool, pages, end - lowest) for pool in (k_pages, v_pages))  # [Hkv, keys, D], zero-padded
        # Query tiles end at absolute multiples of the key tile: no key tile is computed that all rows mask.
        tile_start = start
        while tile_start < end:
            tile_end = min(end, (tile_start // _TILE + 1) * _TILE)
            keys_from = max(lowest, (tile_start - window + 1) // _TILE * _TILE) if window else 0
            keys_to = -(-tile_end // _TILE) * _TILE
            rows = slice(first + tile_start - start, first + tile_end - start)
            keys = slice(keys_from - lowest, keys_to - lowest)
            mask = _mask(tile_start, tile_end, keys_from, keys_to, window, q.device)
            queries = F.pad(q[rows].transpose(0, 1), (0, 0, 0, -(tile_end - tile_start) % _QUERY_PAD))
            if soft_cap or sinks is not None or lse is not None:
                tile, tile_lse = _written_out(queries, k[:, keys], v[:, keys], mask, scale, soft_cap, sinks)
                if lse is not None:
                    lse[rows] = tile_lse[:, : tile_end - tile_start].T
            else:
                tile = F.scaled_dot_product_attention(
                    queries[None], k[None, :, keys], v[None, :, keys], attn_mask=mask, scale=scale,
                    enable_gqa=queries.shape[0] != k.shape[0],
                )[0]  # fmt: skip
            out[rows] = tile[:, : tile_end - tile_start].transpose(0, 1)
            tile_start = tile_end
    return out


def _gather(pool: torch.Tensor, pages: torch.Tensor, keys: int) -> torch.Tensor:
    rows = pool[pages].flatten(0, 1)[:keys]  # [keys, Hkv, D]
    return F.pad(rows.transpose(0, 1), (0, 0, 0, -keys % _TILE))


def _mask(start: int, end: int, keys_from: int, keys_to: int, window: int, device: torch.device) -> torch.Tensor:
    rows = end - start + -(end - start) % _QUERY_PAD
    # Padding rows repeat the last one: every row then has a key, and none is NaN.
    positions = torch.arange(start, start + rows, device=device).clamp_(max=end - 1)[:, None]
    keys = torch.arange(keys_from, keys_to, device=device)
    mask = keys <= positions
    return mask & (keys > positions - window) if window else mask


def _written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Online softmax over key tiles: what SDPA lacks. q [Hq, rows, D] -> out [Hq, rows, D], lse [Hq, rows]."""
    heads, rows, head_dim = q.shape
    kv_heads = k.shape[0]
    grouped = q.float().mul(scale).reshape(kv_heads, heads // kv_heads * rows, head_dim)
    total = torch.zeros(heads, rows, dtype=torch.float32, device=q.device)
    # A finite start: a tile that a row masks wholly then adds exactly nothing instead of NaN.
    top = torch.full_like(total, -1e30)
    if sinks is not None:
        top = sinks.float()[:, None].expand(heads, rows).clone()
        total.fill_(1.0)
    acc = torch.zeros(heads, rows, head_dim, dtype=torch.float32, device=q.device)
    for first in range(0, k.shape[1], _TILE):
        keys = slice(first, first + _TILE)
        scores = torch.bmm(grouped, k[:, keys].float().transpose(1, 2)).view(heads, rows, _TILE)
        if soft_cap:
            scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
        scores.masked_fill_(~mask[:, keys], float("-inf"))
        new_top = torch.maximum(top, scores.amax(-1))
        weights = torch.exp(scores - new_top[..., None])
        rescale = torch.exp(top - new_top)
        total = total * rescale + weights.sum(-1)
        values = torch.bmm(weights.view(kv_heads, -1, _TILE), v[:, keys].float())
        acc = acc * rescale[..., None] + values.view(heads, rows, head_dim)
        top = new_top
    return (acc / total[..., None]).to(q.dtype), top + total.log()
