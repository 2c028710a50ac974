"""The Triton kernel of gated_act.py: elementwise, a program for a piece of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gated_act import SWIGLU_ALPHA, SWIGLU_LIMIT, Kind
from kernels.triton_lang import launch, rounded, tanh

_BLOCK = 1024
_ALPHA = tl.constexpr(SWIGLU_ALPHA)
_LIMIT = tl.constexpr(SWIGLU_LIMIT)


def gated_act(gate_up: torch.Tensor, *, kind: Kind, out: torch.Tensor) -> torch.Tensor:
    """`kernels.gated_act.gated_act`, arguments checked."""
    rows, width = out.shape
    launch(
        _gated_act_kernel, (rows, triton.cdiv(width, _BLOCK)), out.device,
        gate_up, out, width, gate_up.stride(0), out.stride(0), KIND=kind, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _gated_act_kernel(gate_up, out, width, stride_g, stride_o, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * stride_g + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_g + width + column, mask=mask, other=0.0).to(tl.float32)
    if KIND == "silu":
        activated = gate * tl.sigmoid(gate)
    elif KIND == "clamped_swiglu":
        gate = tl.minimum(gate, _LIMIT)
        activated = gate * tl.sigmoid(gate * _ALPHA)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT) + 1.0
    elif KIND == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        activated = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    tl.store(out + row * stride_o + column, rounded(activated * up, out.dtype.element_ty), mask=mask)
