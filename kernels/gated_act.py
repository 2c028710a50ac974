"""Gated activation of an MLP: act(gate) · up. The Triton kernel is in triton_gated_act.py."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from kernels.dispatch import use_native, use_triton

Kind = Literal["silu", "gelu_tanh", "gelu", "clamped_swiglu"]
KINDS: tuple[Kind, ...] = ("silu", "gelu_tanh", "gelu", "clamped_swiglu")

# gpt-oss: gate and up are clamped, the sigmoid is steeper, and up is shifted by one.
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


def gated_act(gate_up: torch.Tensor, *, kind: Kind = "silu", out: torch.Tensor | None = None) -> torch.Tensor:
    """out = act(gate) · up with gate = gate_up[:, :I], up = gate_up[:, I:], in fp32, rounded once.

    silu(g) = g·σ(g); gelu_tanh and gelu as in torch; "clamped_swiglu" is gpt-oss's min(g, 7)·σ(1.702·min(g, 7)) ·
    (clamp(up, ±7) + 1).

    gate_up [n, 2·I]  bf16, fp16 or fp32; last stride 1, rows may be strided
    out     [n, I]    written and returned; may be gate_up[:, :I] (in place); allocated if None

    Errors: ValueError for an unknown kind or an odd width. Source: Shazeer, GLU Variants Improve Transformer (2020).
    """
    if kind not in KINDS:
        raise ValueError(f"gated_act: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [n, 2·I], got {tuple(gate_up.shape)}")
    width = gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(gate_up.shape[0], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    if use_triton("gated_act", gate_up):
        from kernels import triton_gated_act as implementation

        return implementation.gated_act(gate_up, kind=kind, out=out)
    native = use_native("gated_act", gate_up)
    if native is not None and kind in native.GATED_KINDS:
        result: torch.Tensor = native.gated_act(gate_up, kind=kind, out=out)
        return result
    return gated_act_torch(gate_up, kind=kind, out=out)


def gated_act_torch(gate_up: torch.Tensor, *, kind: Kind = "silu", out: torch.Tensor) -> torch.Tensor:
    """`gated_act` in torch: the reference and the plain CPU path."""
    gate, up = gate_up.float().chunk(2, dim=1)
    if kind == "silu":
        activated = F.silu(gate)
    elif kind == "clamped_swiglu":
        gate = gate.clamp(max=SWIGLU_LIMIT)
        activated = gate * torch.sigmoid(gate * SWIGLU_ALPHA)
        up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    else:
        activated = F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
    return out.copy_(activated * up)
