"""One matrix product per expert over rows sorted by expert, for mixture-of-experts layers. Routing is the caller's."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.dispatch import use_triton
from kernels.padded_linear import padded_linear


class ExpertRows(NamedTuple):
    """Token–expert pairs in expert order, as `sort_by_expert` makes them."""

    row_ids: torch.Tensor  # [n·k] int64: the token of each pair
    offsets: torch.Tensor  # [E + 1] int32: pairs of expert e are offsets[e] … offsets[e+1] − 1
    places: torch.Tensor  # [n, k] int64: where in that order a token's pairs are


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertRows:
    """expert_ids [n, k] -> the pairs (token, choice) in expert order, tokens ascending within an expert."""
    flat = expert_ids.flatten().long()
    order = torch.argsort(flat, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    bounds = torch.arange(num_experts + 1, device=flat.device)
    offsets = torch.searchsorted(flat[order], bounds).int()
    return ExpertRows(order // expert_ids.shape[1], offsets, places.view(expert_ids.shape))


def combine(pairs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sums each token's k rows of pairs [n·k, N] in the order of its choices, in fp32 -> [n, N] in pairs' dtype."""
    total = pairs[places[:, 0]].float()
    for choice in range(1, places.shape[1]):
        total += pairs[places[:, choice]]
    return total.to(pairs.dtype)


def moe_grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    row_ids: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i] = row_scale[i] · (weight[e] · x[row_ids[i]] + bias[e]), for offsets[e] ≤ i < offsets[e + 1].

    x         [n, K]     bf16, fp16 or fp32
    weight    [E, N, K]  same dtype
    offsets   [E + 1]    int32, ascending from 0 to m
    row_ids   [m]        int64: rows of x to take; without it row i itself (m = n)
    row_scale [m]        fp32: the router's weight of each pair
    bias      [E, N]     same dtype
    out       [m, N]     written and returned; allocated if None

    A row does not depend on the others of its expert. Errors: ValueError if shapes do not fit.
    Source: Gale et al., MegaBlocks (2022); vLLM's fused_moe for the sorted order.
    """
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2] or offsets.shape[0] != weight.shape[0] + 1:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and offsets {tuple(offsets.shape)} differ")
    pairs = x.shape[0] if row_ids is None else row_ids.shape[0]
    if out is None:
        out = torch.empty(pairs, weight.shape[1], dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    if use_triton("moe_grouped_gemm", x):
        from kernels import triton_linear as implementation

        return implementation.moe_grouped_gemm(
            x, weight, offsets, row_ids=row_ids, row_scale=row_scale, bias=bias, out=out
        )
    return moe_grouped_gemm_torch(x, weight, offsets, row_ids=row_ids, row_scale=row_scale, bias=bias, out=out)


def moe_grouped_gemm_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    row_ids: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """`moe_grouped_gemm` in torch: the reference and the CPU path."""
    bounds = offsets.tolist()
    for expert in range(weight.shape[0]):
        part = slice(bounds[expert], bounds[expert + 1])
        if part.start == part.stop:
            continue
        rows = x[part] if row_ids is None else x[row_ids[part]]
        product = padded_linear(rows, weight[expert], None if bias is None else bias[expert])
        out[part] = product if row_scale is None else product.float() * row_scale[part, None]
    return out
