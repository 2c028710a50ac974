"""Linear layer with 8-bit float weights (e4m3) and 16- or 32-bit activations. It quantises nothing itself."""

from __future__ import annotations

import torch

from kernels.dispatch import use_triton
from kernels.padded_linear import padded_linear

BLOCK = 128


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = x · (weight · scale)ᵀ + bias, accumulated in fp32.

    x      [n, K]  bf16, fp16 or fp32
    weight [N, K]  float8_e4m3fn
    scale  fp32    one number ([] or [1]), one a channel ([N] or [N, 1]), or one a 128 × 128 block
                   ([⌈N/128⌉, ⌈K/128⌉]; K below 129 and N below 129 make that [1, 1])
    bias   [N]     x's dtype
    out    [n, N]  written and returned; allocated if None

    Activations keep their precision, so there is no activation scale and a row does not depend on the others.
    Errors: ValueError if shapes do not fit. Source: compressed-tensors' FP8 format; block scales of DeepSeek-V3 (2024).
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weight must be float8_e4m3fn, got {weight.dtype}")
    scale_layout(weight, scale)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if use_triton("fp8_linear", x):
        from kernels import triton_linear as implementation

        return implementation.fp8_linear(x, weight, scale, bias=bias, out=out)
    return fp8_linear_torch(x, weight, scale, bias=bias, out=out)


def scale_layout(weight: torch.Tensor, scale: torch.Tensor) -> str:
    """ "tensor", "channel" or "block": what `scale` is for `weight` [N, K]. ValueError if it is none of them."""
    outputs, inputs = weight.shape
    if scale.numel() == 1:
        return "tensor"
    if scale.shape in ((outputs,), (outputs, 1)):
        return "channel"
    if scale.shape == (-(-outputs // BLOCK), -(-inputs // BLOCK)):
        return "block"
    raise ValueError(
        f"scale {tuple(scale.shape)} fits neither tensor, channel nor block scales of {tuple(weight.shape)}"
    )


def fp8_linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """`fp8_linear` in torch: the reference and the CPU path; widens one block of 128 channels at a time."""
    layout = scale_layout(weight, scale)
    for first in range(0, weight.shape[0], _CHANNELS):
        part = slice(first, min(first + _CHANNELS, weight.shape[0]))
        wide = weight[part].float()
        if layout == "tensor":
            wide *= scale.reshape(())
        elif layout == "channel":
            wide *= scale.reshape(-1)[part, None]
        else:
            blocks = scale[first // BLOCK : -(-part.stop // BLOCK)]
            grid = blocks.repeat_interleave(BLOCK, 0)[: wide.shape[0]].repeat_interleave(BLOCK, 1)
            wide *= grid[:, : wide.shape[1]]
        out[:, part] = padded_linear(x, wide.to(x.dtype), None if bias is None else bias[part])
    return out


# Channels widened at a time: a multiple of BLOCK, large enough for the matrix product to run at speed.
_CHANNELS = 1024
