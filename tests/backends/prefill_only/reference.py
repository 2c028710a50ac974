"""A plain forward pass of a ModelSpec with its ModelWeights: one sequence, every layer, full score matrices, float32.

The yardstick for the engine's decoder, itself held against transformers. Written to be read, not to be fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from backends.prefill_only.models.linear import LinearBase
from backends.prefill_only.models.spec import LayerSpec, ModelSpec, RopeSpec
from backends.prefill_only.models.weights import LayerWeights, ModelWeights

__all__ = ["reference_hidden", "reference_logits", "reference_logprobs", "reference_moe"]


@torch.inference_mode()
def reference_logprobs(spec: ModelSpec, weights: ModelWeights, token_ids: Sequence[int]) -> torch.Tensor:
    """Natural-log probabilities of the next token after each position, ``[tokens, vocab]`` fp32."""
    return torch.log_softmax(reference_logits(spec, weights, token_ids), dim=-1)


@torch.inference_mode()
def reference_logits(spec: ModelSpec, weights: ModelWeights, token_ids: Sequence[int]) -> torch.Tensor:
    """``[tokens, vocab]``, or ``[tokens, labels]`` of a classification model, fp32."""
    hidden = reference_hidden(spec, weights, token_ids)
    head = weights.lm_head if weights.score is None else weights.score
    assert head is not None
    logits = head(hidden.to(head.dtype)).float() * spec.logit_scale
    return _soft_cap(logits, spec.final_soft_cap) if weights.score is None else logits


@torch.inference_mode()
def reference_hidden(spec: ModelSpec, weights: ModelWeights, token_ids: Sequence[int]) -> torch.Tensor:
    """Hidden rows after the final norm, ``[tokens, hidden]`` fp32."""
    ids = torch.tensor(token_ids, device=weights.embed.device)
    hidden = weights.embed[ids].float() * spec.embed_scale
    ropes = [tuple(t.to(ids.device) for t in spec.rope_tables(i, len(token_ids))) for i in range(len(spec.ropes))]
    for layer, parameters in zip(spec.layers, weights.layers, strict=True):
        normed = _norm(spec, hidden, parameters.input_norm)
        branch = _attention(spec, layer, parameters, normed, ropes)
        if parameters.post_attn_norm is not None:
            branch = _norm(spec, branch, parameters.post_attn_norm)
        hidden = hidden + branch
        normed = _norm(spec, hidden, parameters.mlp_norm)
        branch = reference_moe(spec, parameters, normed) if layer.moe else _mlp(spec, parameters, normed)
        if parameters.post_mlp_norm is not None:
            branch = _norm(spec, branch, parameters.post_mlp_norm)
        hidden = hidden + branch
    return _norm(spec, hidden, weights.final_norm)


def reference_moe(spec: ModelSpec, parameters: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """``[tokens, hidden] -> [tokens, hidden]`` fp32, one token and one expert at a time."""
    assert spec.moe is not None and parameters.router is not None
    assert parameters.experts_gate_up is not None and parameters.experts_down is not None
    share, chosen = _linear(parameters.router, x).softmax(-1).topk(spec.moe.top_k)
    if spec.moe.norm_topk:
        share = share / share.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for rank in range(spec.moe.top_k):
            expert = int(chosen[token, rank])
            gate_up = parameters.experts_gate_up[expert].float() @ x[token]
            if parameters.experts_gate_up_bias is not None:
                gate_up = gate_up + parameters.experts_gate_up_bias[expert].float()
            gate, up = gate_up.chunk(2)
            if spec.moe.activation == "clamped_swiglu":
                gate = gate.clamp(max=7.0)
                activated = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)
            else:
                activated = F.silu(gate) * up
            down = parameters.experts_down[expert].float() @ activated
            if parameters.experts_down_bias is not None:
                down = down + parameters.experts_down_bias[expert].float()
            out[token] += share[token, rank] * down
    return out


def _mlp(spec: ModelSpec, parameters: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    assert parameters.gate_up is not None and parameters.down is not None
    gate, up = _linear(parameters.gate_up, x).chunk(2, dim=-1)
    match spec.activation:
        case "silu":
            activated = F.silu(gate) * up
        case "gelu_tanh":
            activated = F.gelu(gate, approximate="tanh") * up
        case "gelu":
            activated = F.gelu(gate) * up
    return _linear(parameters.down, activated)


def _attention(
    spec: ModelSpec,
    layer: LayerSpec,
    parameters: LayerWeights,
    x: torch.Tensor,
    ropes: Sequence[tuple[torch.Tensor, ...]],
) -> torch.Tensor:
    tokens = x.shape[0]
    q, k, v = _linear(parameters.qkv, x).split([spec.q_size, spec.kv_size, spec.kv_size], dim=-1)
    q = q.view(tokens, spec.num_heads, spec.head_dim)
    k = k.view(tokens, spec.num_kv_heads, spec.head_dim)
    v = v.view(tokens, spec.num_kv_heads, spec.head_dim)
    if parameters.q_norm is not None and parameters.k_norm is not None:
        q, k = _norm(spec, q, parameters.q_norm), _norm(spec, k, parameters.k_norm)
    if layer.rope >= 0:
        cos, sin = ropes[layer.rope]
        q, k = (_rotate(t, cos, sin, spec.ropes[layer.rope]) for t in (q, k))
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.attn_scale
    scores = _soft_cap(scores, spec.attn_soft_cap)
    position = torch.arange(tokens, device=x.device)
    distance = position[:, None] - position[None, :]
    hidden_keys = distance < 0
    if layer.window:
        hidden_keys = hidden_keys | (distance >= layer.window)
    scores = scores.masked_fill(hidden_keys, float("-inf"))
    if parameters.sinks is not None:
        sinks = parameters.sinks.float().view(-1, 1, 1).expand(-1, tokens, 1)
        weight = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weight = scores.softmax(-1)
    return _linear(parameters.o, torch.einsum("hqk,khd->qhd", weight, v).reshape(tokens, -1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    turned, kept = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, kept], dim=-1)


def _norm(spec: ModelSpec, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.norm_eps) * (weight.float() + spec.norm_offset)


def _soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(x / cap) * cap if cap else x


def _linear(layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
    return layer(x.to(layer.dtype)).float()
