"""Linear layer with 8-bit integer weights and 16- or 32-bit activations. It quantises nothing itself."""

from __future__ import annotations

import torch

from kernels.dispatch import use_triton
from kernels.padded_linear import padded_linear

# Channels widened at a time in the torch version.
_CHANNELS = 1024


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = x · (weight · scale)ᵀ + bias, accumulated in fp32; symmetric weights (no zero point).

    x      [n, K]  bf16, fp16 or fp32
    weight [N, K]  int8
    scale  fp32    one a channel ([N] or [N, 1]), or one a channel and group of K/g inputs ([N, g], 32 | K/g)
    bias   [N]     x's dtype
    out    [n, N]  written and returned; allocated if None

    A row does not depend on the others. Errors: ValueError if shapes do not fit.
    Source: compressed-tensors' pack of W8A16; Dettmers et al., LLM.int8() (2022) for channel scales.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    if weight.dtype != torch.int8:
        raise ValueError(f"weight must be int8, got {weight.dtype}")
    group_size(weight, scale)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if use_triton("int8_linear", x):
        from kernels import triton_linear as implementation

        return implementation.int8_linear(x, weight, scale, bias=bias, out=out)
    return int8_linear_torch(x, weight, scale, bias=bias, out=out)


def group_size(weight: torch.Tensor, scale: torch.Tensor) -> int:
    """Inputs that share a scale, for weight [N, K]. ValueError if `scale` does not fit."""
    outputs, inputs = weight.shape
    groups = 1 if scale.ndim == 1 else scale.shape[1]
    if scale.ndim > 2 or scale.shape[0] != outputs or inputs % groups or (groups > 1 and inputs // groups % 32):
        raise ValueError(f"scale {tuple(scale.shape)} is neither [N] nor [N, groups] for weight {tuple(weight.shape)}")
    return inputs // groups


def int8_linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """`int8_linear` in torch: the reference and the CPU path; widens a block of channels at a time."""
    size = group_size(weight, scale)
    for first in range(0, weight.shape[0], _CHANNELS):
        part = slice(first, min(first + _CHANNELS, weight.shape[0]))
        grouped = weight[part].float().unflatten(1, (-1, size)) * scale.reshape(weight.shape[0], -1)[part, :, None]
        out[:, part] = padded_linear(x, grouped.flatten(1).to(x.dtype), None if bias is None else bias[part])
    return out
