"""The ops in float64, written from their docstrings. Attention's is in attention_cases.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.gated_act import SWIGLU_ALPHA, SWIGLU_LIMIT, Kind


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.double() + offset)


def gated_act(gate_up: torch.Tensor, kind: Kind) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, 1)
    if kind == "silu":
        return gate * torch.sigmoid(gate) * up
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


def rope_tables(positions: int, rot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), fp32 [positions, rot / 2]."""
    angles = torch.outer(torch.arange(positions), 10000.0 ** (-torch.arange(0, rot, 2) / rot))
    return angles.cos(), angles.sin()


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """As complex numbers: (a + ib) · e^{iφ}."""
    half = cos.shape[1]
    out = x.double().clone()
    first = torch.arange(0, 2 * half, 2) if interleaved else torch.arange(half)
    second = first + (1 if interleaved else half)
    angle = torch.complex(cos.double(), sin.double())[positions.long()][:, None]
    product = torch.complex(out[..., first], out[..., second]) * angle
    out[..., first], out[..., second] = product.real, product.imag
    return out


def logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale: float = 1.0,
    soft_cap: float = 0.0,
    bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """All of lm_head_readout's logits, [n, V]."""
    out = hidden.double() @ weight.double().T * scale
    if soft_cap:
        out = soft_cap * torch.tanh(out / soft_cap)
    if bias is not None:
        out = out + bias.double()
    return out if allowed is None else out.masked_fill(~allowed, float("-inf"))


def grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    row_ids: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = x.double() if row_ids is None else x.double()[row_ids]
    out = torch.empty(len(rows), weight.shape[1], dtype=torch.float64)
    for expert, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        out[first:last] = rows[first:last] @ weight[expert].double().T
        if bias is not None:
            out[first:last] += bias[expert].double()
    return out if row_scale is None else out * row_scale.double()[:, None]


def scaled_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """8-bit weights; `scale` broadcasts to them, or is a 128 × 128 block's."""
    return x.double() @ (weight.double() * scale.double()).T + bias.double()


def spread_blocks(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Scales of 128 × 128 blocks, one for each weight."""
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
