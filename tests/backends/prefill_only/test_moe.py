"""A mixture of experts against one token and one expert at a time, and in company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.prefill_only.models.linear import Linear
from backends.prefill_only.models.spec import MoeSpec
from backends.prefill_only.models.weights import LayerWeights
from backends.prefill_only.moe import moe_mlp
from tests.backends.prefill_only.reference import reference_moe
from tests.backends.prefill_only.tiny import TINY, tiny_weights

EXPERTS, HIDDEN, INNER = 8, TINY.hidden_size, 48


def layer(dtype: torch.dtype, biases: bool) -> LayerWeights:
    found = tiny_weights(TINY, dtype).layers[0]
    torch.manual_seed(1)
    found.router = Linear((torch.randn(EXPERTS, HIDDEN) / HIDDEN**0.5).to(dtype))
    found.experts_gate_up = (2 * torch.randn(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5).to(dtype)
    found.experts_down = (torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5).to(dtype)
    if biases:
        found.experts_gate_up_bias = torch.randn(EXPERTS, 2 * INNER).to(dtype)
        found.experts_down_bias = torch.randn(EXPERTS, HIDDEN).to(dtype)
    return found


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize(("top_k", "norm_topk"), [(1, False), (2, True), (3, False)])
def test_against_one_expert_at_a_time(activation: str, top_k: int, norm_topk: bool) -> None:
    moe = MoeSpec(num_experts=EXPERTS, top_k=top_k, intermediate_size=INNER, norm_topk=norm_topk, activation=activation)  # type: ignore[arg-type]
    spec = replace(TINY, moe=moe)
    weights = layer(torch.float32, biases=activation == "clamped_swiglu")
    x = 3 * torch.randn(32, HIDDEN)
    torch.testing.assert_close(moe_mlp(spec, weights, x), reference_moe(spec, weights, x), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    spec = replace(TINY, moe=MoeSpec(num_experts=EXPERTS, top_k=2, intermediate_size=INNER))
    weights = layer(dtype, biases=False)
    x = torch.randn(160, HIDDEN).to(dtype)
    whole = moe_mlp(spec, weights, x)
    for first, rows in ((0, 16), (32, 48), (16, 144)):
        assert torch.equal(moe_mlp(spec, weights, x[first : first + rows]), whole[first : first + rows])
    shuffled = torch.randperm(160)
    assert torch.equal(moe_mlp(spec, weights, x[shuffled]), whole[shuffled])
