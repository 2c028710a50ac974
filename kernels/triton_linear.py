"""The Triton kernels of moe_grouped_gemm.py, fp8_linear.py and int8_linear.py."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.configs import matmul_config, quantised_matmul_config
from kernels.fp8_linear import BLOCK, scale_layout
from kernels.int8_linear import group_size
from kernels.triton_lang import capability_of, dot, launch, rounded


def moe_grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    row_ids: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kernels.moe_grouped_gemm.moe_grouped_gemm`, arguments checked."""
    experts, channels, size = weight.shape
    pairs = out.shape[0]
    config = matmul_config(capability_of(x.device), x.dtype)
    # The offsets stay on the device: at most one tile an expert is not full.
    row_tiles = triton.cdiv(pairs, config.block_m) + min(experts, pairs)
    launch(
        _grouped_kernel, (row_tiles, triton.cdiv(channels, config.block_n)), x.device,
        x, weight, offsets, row_ids, row_scale, bias, out, channels, size, experts,
        x.stride(0), weight.stride(0), weight.stride(1), 0 if bias is None else bias.stride(0), out.stride(0),
        BLOCK_E=triton.next_power_of_2(experts), HAS_IDS=row_ids is not None, HAS_SCALE=row_scale is not None,
        HAS_BIAS=bias is not None, EVEN_K=size % config.block_k == 0,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """`kernels.fp8_linear.fp8_linear`, arguments checked."""
    layout = scale_layout(weight, scale)
    group, channel_group = (BLOCK, BLOCK) if layout == "block" else (0, 1)
    strides = (0, 0) if layout == "tensor" else (scale.stride(0), scale.stride(1) if layout == "block" else 0)
    # sm_89 and later convert e4m3 in hardware.
    hardware = capability_of(x.device) >= 89
    return _quantised(
        x, weight.view(torch.uint8), scale, strides, group, channel_group, "fp8" if hardware else "fp8 bits", bias, out
    )  # fmt: skip


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """`kernels.int8_linear.int8_linear`, arguments checked."""
    group = group_size(weight, scale)
    if group == weight.shape[1]:
        return _quantised(x, weight, scale, (scale.stride(0), 0), 0, 1, "int8", bias, out)
    return _quantised(x, weight, scale, (scale.stride(0), scale.stride(1)), group, 1, "int8", bias, out)


def _quantised(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    scale_strides: tuple[int, int],
    group: int,
    channel_group: int,
    kind: str,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """`group` inputs and `channel_group` channels share a scale; group 0: all inputs do."""
    rows, size = x.shape
    channels = weight.shape[0]
    config = quantised_matmul_config(capability_of(x.device), x.dtype)
    block_k = math.gcd(config.block_k, group) if group else config.block_k
    launch(
        _quantised_kernel, (triton.cdiv(rows, config.block_m), triton.cdiv(channels, config.block_n)), x.device,
        x, weight, scale, bias, out, rows, channels, size, x.stride(0), weight.stride(0), *scale_strides, out.stride(0),
        KIND=kind, GROUP=group, CHANNEL_GROUP=channel_group, HAS_BIAS=bias is not None, EVEN_K=size % block_k == 0,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=block_k,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["experts"],
    do_not_specialize_on_alignment=["offsets", "row_ids", "row_scale", "bias"],
)
def _grouped_kernel(
    x, weight, offsets, row_ids, row_scale, bias, out, channels, size, experts,
    stride_x, stride_we, stride_wn, stride_b, stride_o,
    BLOCK_E: tl.constexpr, HAS_IDS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_M pairs of one expert, BLOCK_N channels]."""
    tile = tl.program_id(0)
    # Which expert the tile belongs to, and which of its tiles it is: a search in the running count of tiles.
    every = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets + every, mask=every < experts, other=0)
    ends = tl.load(offsets + every + 1, mask=every < experts, other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    through = tl.cumsum(tiles, 0)
    expert = tl.sum((through <= tile).to(tl.int32), 0)
    if expert >= experts:
        return
    before = tl.sum(tl.where(every == expert, through - tiles, 0), 0)
    start = tl.sum(tl.where(every == expert, starts, 0), 0)
    end = tl.sum(tl.where(every == expert, ends, 0), 0)

    pair = start + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_pairs = pair < end
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_channels = channel < channels
    if HAS_IDS:
        row = tl.load(row_ids + pair, mask=in_pairs, other=0).to(tl.int64)
    else:
        row = pair.to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = x + row[:, None] * stride_x + inner[None, :]
    b_ptrs = weight + expert.to(tl.int64) * stride_we + channel.to(tl.int64)[None, :] * stride_wn + inner[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, size, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs + k, mask=in_pairs[:, None], other=0.0)
            b = tl.load(b_ptrs + k, mask=in_channels[None, :], other=0.0)
        else:
            a = tl.load(a_ptrs + k, mask=in_pairs[:, None] & (inner < size - k)[None, :], other=0.0)
            b = tl.load(b_ptrs + k, mask=in_channels[None, :] & (inner < size - k)[:, None], other=0.0)
        acc = dot(a, b, acc)
    if HAS_BIAS:
        acc += tl.load(bias + expert * stride_b + channel, mask=in_channels, other=0.0).to(tl.float32)[None, :]
    if HAS_SCALE:
        acc = acc * tl.load(row_scale + pair, mask=in_pairs, other=0.0)[:, None]
    tl.store(
        out + pair.to(tl.int64)[:, None] * stride_o + channel[None, :], rounded(acc, out.dtype.element_ty),
        mask=in_pairs[:, None] & in_channels[None, :],
    )  # fmt: skip


@triton.jit
def _widened(stored, KIND: tl.constexpr, dtype: tl.constexpr):
    """Stored 8-bit weights as `dtype`, which holds them exactly."""
    if KIND == "int8":
        r = stored.to(tl.float32).to(dtype)
    elif KIND == "fp8":
        r = stored.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        # e4m3 has fp16's layout with a shorter exponent and mantissa: moved into place it is 2⁸ too small.
        bits = ((stored & 0x80).to(tl.int16) << 8) | ((stored & 0x7F).to(tl.int16) << 7)
        r = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    return r


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["scale", "bias"])
def _quantised_kernel(
    x, weight, scale, bias, out, rows, channels, size, stride_x, stride_w, stride_sn, stride_sk, stride_o,
    KIND: tl.constexpr, GROUP: tl.constexpr, CHANNEL_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile, transposed: [BLOCK_N channels, BLOCK_M rows], because a product takes its left operand from registers,
    where the widened weights are."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = row < rows
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_channels = channel < channels
    inner = tl.arange(0, BLOCK_K)
    w_ptrs = weight + channel.to(tl.int64)[:, None] * stride_w + inner[None, :]
    x_ptrs = x + row.to(tl.int64)[None, :] * stride_x + inner[:, None]
    scale_rows = scale + channel // CHANNEL_GROUP * stride_sn
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, size, BLOCK_K):
        if EVEN_K:
            stored = tl.load(w_ptrs + k, mask=in_channels[:, None], other=0)
            columns = tl.load(x_ptrs + k, mask=in_rows[None, :], other=0.0)
        else:
            stored = tl.load(w_ptrs + k, mask=in_channels[:, None] & (inner < size - k)[None, :], other=0)
            columns = tl.load(x_ptrs + k, mask=in_rows[None, :] & (inner < size - k)[:, None], other=0.0)
        wide = _widened(stored, KIND, x.dtype.element_ty)
        if GROUP > 0:
            part = dot(wide, columns, tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
            factor = tl.load(scale_rows + k // GROUP * stride_sk, mask=in_channels, other=0.0)
            acc += part * factor[:, None]
        else:
            acc = dot(wide, columns, acc)
    if GROUP == 0:
        acc = acc * tl.load(scale_rows, mask=in_channels, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + channel, mask=in_channels, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + row.to(tl.int64)[None, :] * stride_o + channel[:, None], rounded(acc, out.dtype.element_ty),
        mask=in_rows[None, :] & in_channels[:, None],
    )  # fmt: skip
