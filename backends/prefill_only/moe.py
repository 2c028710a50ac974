"""The mixture-of-experts MLP: route, compute each expert's rows together, weigh, add up."""

from __future__ import annotations

import torch

from backends.prefill_only.models.spec import ModelSpec, MoeSpec
from backends.prefill_only.models.weights import LayerWeights
from kernels.gated_act import gated_act
from kernels.moe_grouped_gemm import combine, moe_grouped_gemm, sort_by_expert

__all__ = ["moe_mlp"]


def moe_mlp(spec: ModelSpec, weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """``[rows, hidden]`` to the same. Routing is in float32."""
    assert spec.moe is not None and weights.router is not None
    assert weights.experts_gate_up is not None and weights.experts_down is not None
    shares, chosen = _route(spec.moe, weights.router(x))
    pairs = sort_by_expert(chosen, spec.moe.num_experts)
    gate_up = moe_grouped_gemm(
        x, weights.experts_gate_up, pairs.offsets, row_ids=pairs.row_ids, bias=weights.experts_gate_up_bias
    )
    activated = gated_act(gate_up, kind=spec.moe.activation)
    # Each pair's share of its token, in the order in which the pairs lie.
    scale = torch.empty(shares.numel(), dtype=torch.float32, device=x.device)
    scale[pairs.places.flatten()] = shares.flatten()
    out = moe_grouped_gemm(
        activated, weights.experts_down, pairs.offsets, row_scale=scale, bias=weights.experts_down_bias
    )
    return combine(out, pairs.places)


def _route(moe: MoeSpec, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(shares float32 ``[rows, top_k]``, experts int64 ``[rows, top_k]``)."""
    shares, chosen = torch.topk(torch.softmax(logits.float(), dim=1), moe.top_k, dim=1)
    if moe.norm_topk:
        shares = shares / shares.sum(dim=1, keepdim=True)
    return shares, chosen
