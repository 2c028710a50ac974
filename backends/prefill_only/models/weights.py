"""A model's parameters, fused for the decoder. ``build`` fills them from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from backends.prefill_only.models.linear import Linear, LinearBase

__all__ = ["LayerWeights", "ModelWeights"]


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """One layer. A layer has either ``gate_up`` and ``down`` or the router and experts."""

    input_norm: torch.Tensor  # [hidden]
    qkv: LinearBase  # [(heads + 2 * kv_heads) * head_dim, hidden]: q, k, v
    o: LinearBase  # [hidden, heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: LinearBase | None = None  # [2 * intermediate, hidden]: gate, up
    down: LinearBase | None = None  # [hidden, intermediate]
    post_attn_norm: torch.Tensor | None = None  # [hidden]
    post_mlp_norm: torch.Tensor | None = None  # [hidden]
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None  # [head_dim]
    sinks: torch.Tensor | None = None  # [heads]
    router: LinearBase | None = None  # [experts, hidden]
    experts_gate_up: torch.Tensor | None = None  # [experts, 2 * intermediate, hidden]: gate, up
    experts_down: torch.Tensor | None = None  # [experts, hidden, intermediate]
    experts_gate_up_bias: torch.Tensor | None = None  # [experts, 2 * intermediate]
    experts_down_bias: torch.Tensor | None = None  # [experts, hidden]


@dataclass(slots=True, kw_only=True)
class ModelWeights:
    embed: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [hidden]
    lm_head: Linear | None  # [vocab, hidden]; shares ``embed`` if tied; None without a language-model head
    score: Linear | None = None  # [labels, hidden], classification alone

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, shared ones once."""
        seen: dict[int, int] = {}
        for part in self._parts():
            if isinstance(part, torch.Tensor):
                seen[part.data_ptr()] = part.nbytes
            elif isinstance(part, Linear):  # perhaps the embedding's own weight
                seen[part.weight.data_ptr()] = part.weight.nbytes
                if part.bias is not None:
                    seen[part.bias.data_ptr()] = part.bias.nbytes
            elif isinstance(part, LinearBase):
                seen[id(part)] = part.nbytes
        return sum(seen.values())

    def _parts(self) -> Iterator[object]:
        yield from (self.embed, self.final_norm, self.lm_head, self.score)
        for layer in self.layers:
            yield from (getattr(layer, f.name) for f in fields(layer))
