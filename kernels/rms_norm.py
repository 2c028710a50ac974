"""Root-mean-square norm, with the residual addition before it. The Triton kernel is in triton_rms_norm.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.dispatch import use_native, use_triton


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = x / sqrt(mean(x²) + eps) · (weight + offset), over the last dimension, in fp32, rounded once at the end.

    x        [..., H]  bf16, fp16 or fp32; [n, heads, D] norms each head; last stride 1, rows may be strided
    weight   [H]       offset 1.0 is Gemma's convention
    residual as x      if given, x += residual first, in place and rounded to x's dtype; the norm sees the rounded sum
    out      as x      may be x itself; allocated if None

    Errors: ValueError if shapes do not fit. Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    if weight.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"rms_norm: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)} or the residual")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    if use_triton("rms_norm", x):
        from kernels import triton_rms_norm as implementation

        return implementation.rms_norm(x, weight, eps, residual=residual, offset=offset, out=out)
    native = use_native("rms_norm", x)
    if native is not None and weight.dtype == x.dtype:
        result: torch.Tensor = native.rms_norm(x, weight, eps, residual=residual, offset=offset, out=out)
        return result
    return rms_norm_torch(x, weight, eps, residual=residual, offset=offset, out=out)


def rms_norm_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    out: torch.Tensor,
) -> torch.Tensor:
    """`rms_norm` in torch: the reference and the plain CPU path."""
    if residual is not None:
        x.add_(residual)
    if offset == 0.0 and weight.dtype == x.dtype:
        return out.copy_(F.rms_norm(x, weight.shape, weight, eps))
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return out.copy_(wide * (weight.float() + offset))
