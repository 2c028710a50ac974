"""The Triton kernels of lm_head_readout.py: matrix-product tiles that are reduced before they leave the registers.

A tile of logits [rows, columns] becomes, for each row, its maximum, its sum of exponentials and its count of logits
above the target's. Only a top-k needs more: then a slice of the vocabulary is written out as sortable 64-bit keys, and
the winners of one slice meet those of the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.configs import matmul_config
from kernels.lm_head_readout import WORKSPACE_BYTES, Readout, empty_readout
from kernels.triton_lang import capability_of, dot, launch, tanh

_COMBINED_ROWS, _COMBINED_TILES = 16, 128


def lm_head_readout(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    targets: torch.Tensor | None,
    top_k: int,
    bias: torch.Tensor | None,
    allowed: torch.Tensor | None,
    soft_cap: float,
    scale: float,
    named_ids: torch.Tensor | None,
) -> Readout:
    """`kernels.lm_head_readout.lm_head_readout`, arguments checked; at least one row."""
    (rows, size), vocab, device = hidden.shape, weight.shape[0], hidden.device
    result = empty_readout(rows, top_k, targets, named_ids, device)
    config = matmul_config(capability_of(device), hidden.dtype)
    if top_k:
        # A key takes twice the registers of the logit it is made from.
        config = config._replace(block_m=min(config.block_m, 64), block_n=min(config.block_n, 128))
    tiles = triton.cdiv(vocab, config.block_n)
    tops, sums = (torch.empty(tiles, rows, dtype=torch.float32, device=device) for _ in range(2))
    above = None if targets is None else torch.empty(tiles, rows, dtype=torch.int32, device=device)
    mask = None if allowed is None else allowed.view(torch.uint8)
    shared = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "EVEN_K": size % config.block_k == 0, "CAPPED": soft_cap > 0, "HAS_BIAS": bias is not None,
        "HAS_MASK": allowed is not None, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    row_tiles = triton.cdiv(rows, config.block_m)

    def pick(ids: torch.Tensor, out: torch.Tensor) -> None:
        launch(
            _picked_kernel, (row_tiles, ids.shape[1]), device,
            hidden, weight, bias, mask, ids, out, rows, vocab, size, scale, soft_cap,
            hidden.stride(0), weight.stride(0), ids.stride(0), ids.stride(1), out.stride(0), out.stride(1), **shared,
        )  # fmt: skip

    if targets is not None and result.target_logit is not None:
        pick(targets[:, None], result.target_logit[:, None])
    if named_ids is not None and result.named_logits is not None and named_ids.shape[1]:
        pick(named_ids, result.named_logits)

    slice_tiles = tiles
    if top_k:
        slice_tiles = min(tiles, max(1, WORKSPACE_BYTES // (8 * rows * config.block_n)))
    keys = torch.empty(rows, slice_tiles * config.block_n, dtype=torch.int64, device=device) if top_k else None
    best: torch.Tensor | None = None
    for first in range(0, tiles, slice_tiles):
        count = min(slice_tiles, tiles - first)
        launch(
            _tile_kernel, (row_tiles, count), device,
            hidden, weight, bias, mask, targets, result.target_logit, tops, sums, above, keys,
            rows, vocab, size, scale, soft_cap, first, hidden.stride(0), weight.stride(0),
            0 if targets is None else targets.stride(0), 0 if keys is None else keys.stride(0),
            HAS_TARGET=targets is not None, HAS_KEYS=keys is not None, **shared,
        )  # fmt: skip
        if keys is not None:
            here = keys[:, : min(count * config.block_n, vocab - first * config.block_n)]
            if best is not None:
                here = torch.cat([best, here], 1)
            best = torch.topk(here, min(top_k, here.shape[1]), dim=1).values
    launch(
        _combine_kernel, (triton.cdiv(rows, _COMBINED_ROWS),), device,
        tops, sums, above, result.lse, result.target_rank, rows, tiles,
        ROWS=_COMBINED_ROWS, TILES=_COMBINED_TILES, HAS_TARGET=targets is not None, num_warps=4,
    )  # fmt: skip
    if best is not None and result.top_values is not None and result.top_ids is not None:
        result.top_values.copy_(_values_of(best))
        result.top_ids.copy_(0xFFFFFFFF - (best & 0xFFFFFFFF))
    return result


def _values_of(keys: torch.Tensor) -> torch.Tensor:
    """The fp32 logits in keys of `_sortable`."""
    high = (keys >> 32).int()
    return (high ^ ((high >> 31) & 0x7FFFFFFF)).view(torch.float32)


@triton.jit
def _sortable(logits, ids):
    """fp32 logits and their ids as int64 whose order is that of (logit, −id)."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # −0 becomes 0
    high = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return (high << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def _logits(
    hidden, weight, bias, allowed, row, ids, in_rows, in_vocab, size, scale, soft_cap, stride_h, stride_w,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    CAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Logits [BLOCK_M, BLOCK_N] of rows `row` and vocabulary ids `ids`; −inf where an id is not in the vocabulary."""
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = hidden + row.to(tl.int64)[:, None] * stride_h + inner[None, :]
    b_ptrs = weight + ids.to(tl.int64)[None, :] * stride_w + inner[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, size, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs + k, mask=in_rows[:, None], other=0.0)
            b = tl.load(b_ptrs + k, mask=in_vocab[None, :], other=0.0)
        else:
            a = tl.load(a_ptrs + k, mask=in_rows[:, None] & (inner < size - k)[None, :], other=0.0)
            b = tl.load(b_ptrs + k, mask=in_vocab[None, :] & (inner < size - k)[:, None], other=0.0)
        acc = dot(a, b, acc)
    logits = acc * scale
    if CAPPED:
        logits = tanh(logits / soft_cap) * soft_cap
    if HAS_BIAS:
        logits += tl.load(bias + ids, mask=in_vocab, other=0.0)[None, :]
    if HAS_MASK:
        in_vocab = in_vocab & (tl.load(allowed + ids, mask=in_vocab, other=0) != 0)
    return tl.where(in_vocab[None, :], logits, float("-inf"))


@triton.jit(
    do_not_specialize=["rows", "vocab", "stride_in", "stride_im", "stride_on", "stride_om"],
    do_not_specialize_on_alignment=["ids", "out", "allowed", "bias"],
)
def _picked_kernel(
    hidden, weight, bias, allowed, ids, out, rows, vocab, size, scale, soft_cap,
    stride_h, stride_w, stride_in, stride_im, stride_on, stride_om,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    CAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """out[i, j] = logit of row i and token ids[i, j].

    Computed as the diagonal of a tile like any other, so that a token's logit has the same bits here as there: the
    count of logits above a target's is then exact.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    asking = tl.program_id(0) * BLOCK_M + column
    asks = (column < BLOCK_M) & (asking < rows)
    which = tl.program_id(1)
    asked = tl.load(ids + asking.to(tl.int64) * stride_in + which * stride_im, mask=asks, other=-1)
    in_vocab = (asked >= 0) & (asked < vocab)
    logits = _logits(
        hidden, weight, bias, allowed, row, asked, row < rows, in_vocab, size, scale, soft_cap, stride_h, stride_w,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, CAPPED, HAS_BIAS, HAS_MASK,
    )  # fmt: skip
    own = tl.arange(0, BLOCK_M)[:, None] == column[None, :]
    picked = tl.sum(tl.where(own, logits, 0.0), 1)
    tl.store(out + row.to(tl.int64) * stride_on + which * stride_om, picked, mask=row < rows)


@triton.jit(
    do_not_specialize=["rows", "vocab", "first_tile", "stride_t", "stride_keys"],
    do_not_specialize_on_alignment=["targets", "target_logit", "tops", "sums", "above", "keys", "allowed", "bias"],
)
def _tile_kernel(
    hidden, weight, bias, allowed, targets, target_logit, tops, sums, above, keys,
    rows, vocab, size, scale, soft_cap, first_tile, stride_h, stride_w, stride_t, stride_keys,
    HAS_TARGET: tl.constexpr, HAS_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    CAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Reduces tile `first_tile` + program 1 of the vocabulary. tops, sums, above are [tiles, rows]."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = row < rows
    tile = first_tile + tl.program_id(1)
    ids = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_vocab = ids < vocab
    logits = _logits(
        hidden, weight, bias, allowed, row, ids, in_rows, in_vocab, size, scale, soft_cap, stride_h, stride_w,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, CAPPED, HAS_BIAS, HAS_MASK,
    )  # fmt: skip
    where = tile.to(tl.int64) * rows + row
    top = tl.max(logits, 1)
    # All of a row may be −inf here; its differences must not be NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + where, top, mask=in_rows)
    tl.store(sums + where, tl.sum(tl.exp(logits - base[:, None]), 1), mask=in_rows)
    if HAS_TARGET:
        target = tl.load(targets + row.to(tl.int64) * stride_t, mask=in_rows, other=0)
        mark = tl.load(target_logit + row, mask=in_rows, other=0.0)
        greater = (logits > mark[:, None]) & (ids[None, :] != target[:, None])
        tl.store(above + where, tl.sum(greater.to(tl.int32), 1), mask=in_rows)
    if HAS_KEYS:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(
            keys + row.to(tl.int64)[:, None] * stride_keys + column[None, :], _sortable(logits, ids[None, :]),
            mask=in_rows[:, None] & in_vocab[None, :],
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["rows", "tiles"], do_not_specialize_on_alignment=["tops", "sums", "above", "lse", "rank"]
)
def _combine_kernel(
    tops, sums, above, lse, rank, rows, tiles,
    ROWS: tl.constexpr, TILES: tl.constexpr, HAS_TARGET: tl.constexpr,
):  # fmt: skip
    """lse and rank of ROWS rows from all tiles, in one order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    count = tl.zeros([ROWS], tl.int32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        mask = (tile < tiles)[:, None] & (row < rows)[None, :]
        where = tile.to(tl.int64)[:, None] * rows + row[None, :]
        tile_top = tl.load(tops + where, mask=mask, other=float("-inf"))
        tile_sum = tl.load(sums + where, mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(tile_top, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tile_sum * tl.exp(tile_top - base[None, :]), 0)
        top = new_top
        if HAS_TARGET:
            count += tl.sum(tl.load(above + where, mask=mask, other=0), 0)
    tl.store(lse + row, top + tl.log(total), mask=row < rows)
    if HAS_TARGET:
        tl.store(rank + row, (count + 1).to(tl.int64), mask=row < rows)
