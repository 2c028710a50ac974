"""A plain torch forward of a Llama-style model: what one gets without an engine.

One prompt at a time, all layers' KV alive as any framework would keep it, scaled-dot-product attention, logits for the
last token alone. The yardstick of ``onepass bench serving``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from backends.prefill_only.models.loader import load
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.models.weights import ModelWeights

__all__ = ["PlainForward"]


class PlainForward:
    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        self._spec, self._weights = spec, weights
        self._cos, self._sin = (t.to(weights.embed.dtype) for t in spec.rope_tables(0, spec.max_position))

    @classmethod
    def of_builtin_model(cls) -> PlainForward:
        loaded = load("builtin", dtype="bfloat16", device="cpu")
        return cls(loaded.spec, loaded.weights)

    @torch.inference_mode()
    def next_token_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 ``[vocab]``."""
        spec, weights, n = self._spec, self._weights, len(token_ids)
        x = weights.embed[torch.tensor(token_ids)]
        cos, sin = self._cos[:n], self._sin[:n]
        kept = []
        for layer in weights.layers:
            assert layer.gate_up is not None and layer.down is not None
            qkv = layer.qkv(F.rms_norm(x, (spec.hidden_size,), layer.input_norm, spec.norm_eps))
            q, k, v = (
                t.view(n, -1, spec.head_dim).transpose(0, 1)
                for t in qkv.split([spec.q_size, spec.kv_size, spec.kv_size], dim=1)
            )
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            kept.append((k, v))
            a = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
            x = x + layer.o(a.transpose(0, 1).reshape(n, -1))
            gate, up = layer.gate_up(F.rms_norm(x, (spec.hidden_size,), layer.mlp_norm, spec.norm_eps)).chunk(2, dim=1)
            x = x + layer.down(F.silu(gate) * up)
        last = F.rms_norm(x[-1:], (spec.hidden_size,), weights.final_norm, spec.norm_eps)
        assert weights.lm_head is not None
        return weights.lm_head(last)[0].float()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
