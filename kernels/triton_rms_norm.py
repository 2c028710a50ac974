"""The Triton kernel of rms_norm.py: a program for a few rows, a row in registers from its load to its store."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_lang import launch, rounded

# Elements a program holds: enough loads in flight, and no row of a usual model is split.
_ELEMENTS = 4096


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None,
    offset: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kernels.rms_norm.rms_norm`, arguments checked."""
    size = x.shape[-1]
    parts = [_rows_and_heads(part) for part in (x, out, x if residual is None else residual)]
    (n, heads), strides = parts[0].shape[:2], [s for part in parts for s in part.stride()[:2]]
    block = triton.next_power_of_2(size)
    rows = max(1, _ELEMENTS // block)
    launch(
        _rms_norm_kernel, (triton.cdiv(n * heads, rows),), x.device,
        parts[0], parts[1], parts[2], weight, eps, offset, n * heads, heads, *strides,
        SIZE=size, BLOCK=block, ROWS=rows, HAS_RESIDUAL=residual is not None,
        IN_PLACE=residual is not None and out.data_ptr() == x.data_ptr(),
        num_warps=min(16, max(4, rows * block // 1024)),
    )  # fmt: skip
    return out


def _rows_and_heads(x: torch.Tensor) -> torch.Tensor:
    """x [..., H] as a view [n, heads, H]."""
    return x.view(-1, 1, x.shape[-1]) if x.ndim < 3 else x.flatten(0, -3)


@triton.jit(do_not_specialize=["count", "heads"])
def _rms_norm_kernel(
    x, out, residual, weight, eps, offset, count, heads,
    stride_xn, stride_xh, stride_on, stride_oh, stride_rn, stride_rh,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IN_PLACE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    mask = (row < count)[:, None] & (dims < SIZE)[None, :]
    n = (row // heads).to(tl.int64)[:, None]
    head = (row % heads)[:, None]
    x_ptrs = x + n * stride_xn + head * stride_xh + dims[None, :]
    wide = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + n * stride_rn + head * stride_rh + dims[None, :], mask=mask, other=0.0)
        total = rounded(wide + added.to(tl.float32), x.dtype.element_ty)
        # Where the result replaces the sum, two stores to one place could meet in either order.
        if not IN_PLACE:
            tl.store(x_ptrs, total, mask=mask)
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    factor = tl.load(weight + dims, mask=dims < SIZE, other=0.0).to(tl.float32) + offset
    result = wide * scale[:, None] * factor[None, :]
    tl.store(out + n * stride_on + head * stride_oh + dims[None, :], rounded(result, out.dtype.element_ty), mask=mask)
