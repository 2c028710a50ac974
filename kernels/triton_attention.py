"""The Triton kernel of attention.py: one program a query tile and head, one pass over the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.configs import attention_config
from kernels.triton_lang import capability_of, dot, launch, rounded, tanh

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


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
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """`kernels.attention.attention`, arguments checked."""
    segments, heads, head_dim = q_pos.shape[0], q.shape[1], q.shape[2]
    page, kv_heads = k_pages.shape[1], k_pages.shape[2]
    config = attention_config(capability_of(q.device), q.dtype, head_dim)
    # A segment that starts in the middle of a tile touches one tile more than its length asks for.
    tiles = triton.cdiv(max_q + config.block_m - 1, config.block_m)
    if segments == 0 or max_q == 0:
        return out
    launch(
        _attention_kernel, (heads, tiles, segments), q.device,
        q, k_pages, v_pages, page_table, cu_q, q_pos, sinks, out, lse,
        scale, soft_cap, window, heads // kv_heads,
        q.stride(0), q.stride(1), k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        v_pages.stride(0), v_pages.stride(1), v_pages.stride(2), page_table.stride(0), out.stride(0), out.stride(1),
        lse.stride(0) if lse is not None else 0, lse.stride(1) if lse is not None else 0,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), PAGE=page,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, WINDOWED=window > 0, CAPPED=soft_cap > 0,
        HAS_SINKS=sinks is not None, HAS_LSE=lse is not None,
        # The query tile stays in registers, except where fp32's three products would need twice its size.
        CHUNK_D=64 if q.dtype == torch.float32 and head_dim > 128 else triton.next_power_of_2(head_dim),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["window", "group", "stride_t", "stride_ln", "stride_lh"],
    do_not_specialize_on_alignment=["page_table", "cu_q", "q_pos", "sinks", "lse"],
)
def _attention_kernel(
    q, k_pages, v_pages, page_table, cu_q, q_pos, sinks, out, lse,
    scale, soft_cap, window, group,
    stride_qn, stride_qh, stride_kp, stride_kn, stride_kh,
    stride_vp, stride_vn, stride_vh, stride_t, stride_on, stride_oh, stride_ln, stride_lh,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Online softmax of one query tile [BLOCK_M, D] of one head over key tiles [BLOCK_N, D].

    Both kinds of tile start at absolute positions that are multiples of their size. So a row always has the same place
    in its tile and meets the same key tiles in the same loops, whatever part of its segment is computed in this call.
    """
    head = tl.program_id(0)
    segment = tl.program_id(2)
    row_base = tl.load(cu_q + segment)
    rows = tl.load(cu_q + segment + 1) - row_base
    start = tl.load(q_pos + segment)
    end = start + rows
    # The last tiles have the most keys: they go first, so that the short ones fill the tail of the grid.
    tile = start // BLOCK_M + tl.num_programs(1) - 1 - tl.program_id(1)
    first = tile * BLOCK_M
    if rows == 0:
        return
    if first >= end:
        return
    positions = first + tl.arange(0, BLOCK_M)
    mine = (positions >= start) & (positions < end)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    row_ids = (row_base + positions - start).to(tl.int64)
    q_rows = q + row_ids * stride_qn + head * stride_qh
    if CHUNK_D == BLOCK_D:
        query = tl.load(q_rows[:, None] + dims[None, :], mask=mine[:, None] & in_head[None, :], other=0.0)
    else:
        query = q_rows

    kv_head = head // group
    k_base = k_pages + kv_head * stride_kh
    v_base = v_pages + kv_head * stride_vh
    table = page_table + segment.to(tl.int64) * stride_t
    to_log2 = scale * _LOG2E

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_SINKS:
        top = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * _LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        # Finite, so that a tile which a row masks wholly changes nothing in the row.
        top = tl.full([BLOCK_M], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

    # Keys from full_from up to full_to are seen by every row of the tile and need no mask.
    full_from = 0
    full_to = first // BLOCK_N * BLOCK_N
    keys_to = tl.minimum(first + BLOCK_M, end)
    if WINDOWED:
        keys_from = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
        full_from = tl.maximum(first + BLOCK_M - window + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        full_from = tl.minimum(full_from, full_to)
        for keys in range(keys_from, full_from, BLOCK_N):
            acc, top, total = _key_tile(
                acc, top, total, query, k_base, v_base, table, keys, positions, mine, dims, in_head, end, window,
                to_log2, scale, soft_cap, stride_kp, stride_kn, stride_vp, stride_vn,
                PAGE, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK_D, True, WINDOWED, CAPPED,
            )  # fmt: skip
    for keys in range(full_from, full_to, BLOCK_N):
        acc, top, total = _key_tile(
            acc, top, total, query, k_base, v_base, table, keys, positions, mine, dims, in_head, end, window,
            to_log2, scale, soft_cap, stride_kp, stride_kn, stride_vp, stride_vn,
            PAGE, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK_D, False, WINDOWED, CAPPED,
        )  # fmt: skip
    for keys in range(full_to, keys_to, BLOCK_N):
        acc, top, total = _key_tile(
            acc, top, total, query, k_base, v_base, table, keys, positions, mine, dims, in_head, end, window,
            to_log2, scale, soft_cap, stride_kp, stride_kn, stride_vp, stride_vn,
            PAGE, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK_D, True, WINDOWED, CAPPED,
        )  # fmt: skip

    # Rows that are not mine may have met no key.
    total = tl.where(mine, total, 1.0)
    result = acc / total[:, None]
    tl.store(
        out + row_ids[:, None] * stride_on + head * stride_oh + dims[None, :],
        rounded(result, out.dtype.element_ty), mask=mine[:, None] & in_head[None, :],
    )  # fmt: skip
    if HAS_LSE:
        tl.store(lse + row_ids * stride_ln + head * stride_lh, top * _LN2 + tl.log(total), mask=mine)


@triton.jit
def _key_tile(
    acc, top, total, query, k_base, v_base, table, keys, positions, mine, dims, in_head, end, window,
    to_log2, scale, soft_cap, stride_kp, stride_kn, stride_vp, stride_vn,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK_D: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over keys `keys` … `keys` + BLOCK_N − 1. Scores are in units of log2."""
    key_ids = keys + tl.arange(0, BLOCK_N)
    # What lies behind the last written key may be anything, NaN included.
    written = key_ids < end
    if PAGE >= BLOCK_N:
        page = tl.load(table + keys // PAGE).to(tl.int64)
        k_tile = k_base + page * stride_kp
        v_tile = v_base + page * stride_vp
        k_rows = (keys % PAGE + tl.arange(0, BLOCK_N)) * stride_kn
        v_rows = (keys % PAGE + tl.arange(0, BLOCK_N)) * stride_vn
    else:
        if MASKED:
            page = tl.load(table + key_ids // PAGE, mask=written, other=0).to(tl.int64)
        else:
            page = tl.load(table + key_ids // PAGE).to(tl.int64)
        k_tile = k_base
        v_tile = v_base
        k_rows = page * stride_kp + (key_ids % PAGE) * stride_kn
        v_rows = page * stride_vp + (key_ids % PAGE) * stride_vn
    v_ptrs = v_tile + (v_rows[:, None] + dims[None, :])
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if CHUNK_D == BLOCK_D:
        k_ptrs = k_tile + (k_rows[None, :] + dims[:, None])
        if MASKED:
            key = tl.load(k_ptrs, mask=written[None, :] & in_head[:, None], other=0.0)
        elif HEAD_DIM == BLOCK_D:
            key = tl.load(k_ptrs)
        else:
            key = tl.load(k_ptrs, mask=in_head[:, None], other=0.0)
        scores = dot(query, key, scores)
    else:
        for chunk in range(0, BLOCK_D, CHUNK_D):
            part = chunk + tl.arange(0, CHUNK_D)
            inside = part < HEAD_DIM
            q_part = tl.load(query[:, None] + part[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            k_part = tl.load(
                k_tile + (k_rows[None, :] + part[:, None]), mask=written[None, :] & inside[:, None], other=0.0
            )
            scores = dot(q_part, k_part, scores)
    if CAPPED:
        scores = tanh(scores * (scale / soft_cap)) * (soft_cap * _LOG2E)
    else:
        scores = scores * to_log2
    if MASKED:
        seen = key_ids[None, :] <= positions[:, None]
        if WINDOWED:
            seen = seen & (key_ids[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))

    new_top = tl.maximum(top, tl.max(scores, 1))
    rescale = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None])
    total = total * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    if MASKED:
        value = tl.load(v_ptrs, mask=written[:, None] & in_head[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_D:
        value = tl.load(v_ptrs)
    else:
        value = tl.load(v_ptrs, mask=in_head[None, :], other=0.0)
    acc = dot(rounded(weights, v_base.dtype.element_ty), value, acc)
    return acc, new_top, total
