"""Rotary position embedding in place. Frequencies and their scaling are the caller's: it passes cos and sin tables."""

from __future__ import annotations

import torch

from kernels.dispatch import use_native, use_triton


def rope_(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotates pairs (a, b) of x by the row's angle: a' = a·cos − b·sin, b' = b·cos + a·sin, in fp32, in place.

    The first rot = 2·cos.shape[1] dims turn, the rest stay. Pairs are (i, i + rot/2), or (2i, 2i + 1) if `interleaved`.

    x         [n, heads, D]     bf16, fp16 or fp32; last stride 1, rows may be strided; returned
    cos, sin  [max_pos, rot/2]  fp32
    positions [n]               int32 or int64, each below max_pos (not checked)

    Errors: ValueError if shapes do not fit. Source: Su et al., RoFormer (2021); half style as in GPT-NeoX and Llama.
    """
    _check(x, cos, sin, positions)
    if x.numel() == 0:
        return x
    if use_triton("rope", x):
        from kernels import triton_rope as implementation

        return implementation.rope_(x, cos, sin, positions, interleaved=interleaved)
    native = use_native("rope_", x)
    if native is not None:
        native.rope_(x, cos, sin, positions, interleaved=interleaved)
        return x
    return rope_torch_(x, cos, sin, positions, interleaved=interleaved)


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
    if x.ndim != 3 or positions.shape != x.shape[:1]:
        raise ValueError(f"x must be [n, heads, D] and positions [n], got {tuple(x.shape)}, {tuple(positions.shape)}")
    if cos.shape != sin.shape or cos.dtype != torch.float32 or 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(f"cos and sin must be fp32 [max_pos, rot/2] with rot ≤ {x.shape[2]}, got {tuple(cos.shape)}")


def rope_torch_(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """`rope_` in torch: the reference and the plain CPU path."""
    half = cos.shape[1]
    rows_cos, rows_sin = cos[positions.long(), None], sin[positions.long(), None]  # [n, 1, rot/2]
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
    wide_a, wide_b = a.float(), b.float()
    turned_a = wide_a * rows_cos - wide_b * rows_sin
    turned_b = wide_b * rows_cos + wide_a * rows_sin
    a.copy_(turned_a)
    b.copy_(turned_b)
    return x
