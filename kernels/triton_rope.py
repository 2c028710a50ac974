"""The Triton kernels of rope.py and kv_write.py: a program for one row and a few of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_lang import launch, rounded

# Pairs of a head times heads a program turns.
_PAIRS = 1024


def rope_(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """`kernels.rope.rope_`, arguments checked."""
    rows, heads, _ = x.shape
    half = cos.shape[1]
    block = triton.next_power_of_2(half)
    at_once = min(triton.next_power_of_2(heads), max(1, _PAIRS // block))
    launch(
        _rope_kernel, (rows, triton.cdiv(heads, at_once)), x.device,
        x, cos, sin, positions, heads, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), positions.stride(0),
        HALF=half, BLOCK=block, HEADS=at_once, INTERLEAVED=interleaved, num_warps=4,
    )  # fmt: skip
    return x


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """`kernels.kv_write.kv_write`, arguments checked."""
    rows, heads, head_dim = k.shape
    half = 0 if cos is None else cos.shape[1]
    block = triton.next_power_of_2(head_dim)
    at_once = min(triton.next_power_of_2(heads), max(1, 2 * _PAIRS // block))
    launch(
        _kv_write_kernel, (rows, triton.cdiv(heads, at_once)), k.device,
        k, v, k_pages, v_pages, slots, cos, sin, positions, heads,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_pages.stride()[:3], *v_pages.stride()[:3],
        0 if cos is None else cos.stride(0), 0 if sin is None else sin.stride(0), slots.stride(0),
        0 if positions is None else positions.stride(0),
        HEAD_DIM=head_dim, HALF=half, BLOCK_D=block, BLOCK_HALF=triton.next_power_of_2(max(1, half)), HEADS=at_once,
        PAGE=k_pages.shape[1], INTERLEAVED=interleaved, num_warps=4,
    )  # fmt: skip


@triton.jit
def _turned(x_ptrs, first, second, mask, cos, sin):
    """Pairs (first, second) of the heads at x_ptrs, turned: a·cos − b·sin and b·cos + a·sin in fp32."""
    a = tl.load(x_ptrs + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptrs + second, mask=mask, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit(
    do_not_specialize=["heads", "stride_p"],
    do_not_specialize_on_alignment=["positions"],
)
def _rope_kernel(
    x, cos, sin, positions, heads, stride_xn, stride_xh, stride_c, stride_s, stride_p,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    position = tl.load(positions + row * stride_p).to(tl.int64)
    row_cos = tl.load(cos + position * stride_c + pair, mask=pair < HALF, other=0.0)
    row_sin = tl.load(sin + position * stride_s + pair, mask=pair < HALF, other=0.0)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + HALF
    mask = (head < heads)[:, None] & (pair < HALF)[None, :]
    x_ptrs = x + row * stride_xn + head[:, None] * stride_xh
    a, b = _turned(x_ptrs, first[None, :], second[None, :], mask, row_cos[None, :], row_sin[None, :])
    tl.store(x_ptrs + first[None, :], rounded(a, x.dtype.element_ty), mask=mask)
    tl.store(x_ptrs + second[None, :], rounded(b, x.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["heads", "stride_slot", "stride_p"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def _kv_write_kernel(
    k, v, k_pages, v_pages, slots, cos, sin, positions, heads,
    stride_kn, stride_kh, stride_vn, stride_vh,
    stride_kpp, stride_kpn, stride_kph, stride_vpp, stride_vpn, stride_vph,
    stride_c, stride_s, stride_slot, stride_p,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * stride_slot).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE
    in_page = slot % PAGE
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    in_heads = (head < heads)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    k_from = k + row * stride_kn + head[:, None] * stride_kh
    v_from = v + row * stride_vn + head[:, None] * stride_vh
    k_to = k_pages + page * stride_kpp + in_page * stride_kpn + head[:, None] * stride_kph
    v_to = v_pages + page * stride_vpp + in_page * stride_vpn + head[:, None] * stride_vph

    whole = in_heads & (dims < HEAD_DIM)
    tl.store(v_to + dims, tl.load(v_from + dims, mask=whole, other=0.0), mask=whole)
    kept = whole & (dims >= 2 * HALF)
    if HALF * 2 < HEAD_DIM:
        tl.store(k_to + dims, tl.load(k_from + dims, mask=kept, other=0.0), mask=kept)
    if HALF > 0:
        pair = tl.arange(0, BLOCK_HALF)
        position = tl.load(positions + row * stride_p).to(tl.int64)
        row_cos = tl.load(cos + position * stride_c + pair, mask=pair < HALF, other=0.0)
        row_sin = tl.load(sin + position * stride_s + pair, mask=pair < HALF, other=0.0)
        if INTERLEAVED:
            first = 2 * pair
            second = 2 * pair + 1
        else:
            first = pair
            second = pair + HALF
        mask = in_heads & (pair < HALF)[None, :]
        a, b = _turned(k_from, first[None, :], second[None, :], mask, row_cos[None, :], row_sin[None, :])
        tl.store(k_to + first[None, :], rounded(a, k_pages.dtype.element_ty), mask=mask)
        tl.store(k_to + second[None, :], rounded(b, k_pages.dtype.element_ty), mask=mask)
