"""Fills a model's parameters from a checkpoint.

Walks a :class:`ModelSpec`, allocates each fused parameter once at its final size, dtype and place, and has the source
write every checkpoint tensor straight into its slice. Knows no file format (``source``) and no naming scheme
(``names``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from backends.prefill_only.models.linear import Linear, LinearBase
from backends.prefill_only.models.names import Names
from backends.prefill_only.models.source import CheckpointError, TensorSource
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.models.weights import LayerWeights, ModelWeights

__all__ = ["build"]


def build(
    spec: ModelSpec,
    names: Names,
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    body_prefix: str = "",
    head_prefix: str = "",
    progress: Callable[[float, str], None] | None = None,
) -> ModelWeights:
    """Allocates and fills all parameters. Raises ``CheckpointError`` for a missing or misshapen tensor."""
    gather = _Gather(spec, names, source, dtype, device)
    embed = gather.tensor(body_prefix + names.embed + ".weight", (spec.vocab_size, spec.hidden_size))
    layers = []
    for i in range(spec.num_layers):
        layers.append(gather.layer(i, body_prefix))
        if progress is not None:
            progress((i + 1) / (spec.num_layers + 1), f"loading weights, layer {i + 1} of {spec.num_layers}")
    lm_head: LinearBase | None = None
    if spec.head == "lm":
        if spec.tie_embeddings:
            lm_head = Linear(embed)
        else:
            lm_head = gather.linear([head_prefix + names.lm_head], [spec.vocab_size], spec.hidden_size)
    score = None
    if spec.head == "classification":
        score = gather.linear([head_prefix + names.score], [spec.num_labels], spec.hidden_size)
    final_norm = gather.tensor(body_prefix + names.final_norm + ".weight", (spec.hidden_size,))
    return ModelWeights(embed=embed, layers=layers, final_norm=final_norm, lm_head=lm_head, score=score)


class _Gather:
    """Reads named tensors into fused parameters."""

    def __init__(
        self, spec: ModelSpec, names: Names, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.names, self.source = spec, names, source
        self.dtype, self.device = dtype, device
        self.available = source.names()

    def layer(self, i: int, prefix: str) -> LayerWeights:
        spec, names = self.spec, self.names

        def named(template: str) -> str:
            return prefix + template.format(i=i)

        def norm(template: str, size: int = spec.hidden_size) -> torch.Tensor:
            return self.tensor(named(template) + ".weight", (size,))

        qkv_sizes = [spec.q_size, spec.kv_size, spec.kv_size]
        layer = LayerWeights(
            input_norm=norm(names.input_norm),
            qkv=self.linear(
                [named(n) for n in names.qkv],
                qkv_sizes if len(names.qkv) > 1 else [sum(qkv_sizes)],
                spec.hidden_size,
                interleaved_heads=(True, True, False) if names.qk_interleaved else (),
            ),
            o=self.linear([named(names.o)], [spec.hidden_size], spec.q_size),
            mlp_norm=norm(names.mlp_norm),
        )
        if spec.post_norms:
            layer.post_attn_norm = norm(names.post_attn_norm)
            layer.post_mlp_norm = norm(names.post_mlp_norm)
        if spec.qk_norm:
            layer.q_norm = norm(names.q_norm, spec.head_dim)
            layer.k_norm = norm(names.k_norm, spec.head_dim)
        sizes = [spec.intermediate_size] * len(names.gate_up)
        if len(sizes) == 1:
            sizes = [2 * spec.intermediate_size]
        layer.gate_up = self.linear([named(n) for n in names.gate_up], sizes, spec.hidden_size)
        layer.down = self.linear([named(names.down)], [spec.hidden_size], spec.intermediate_size)
        return layer

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._read(name, out)
        return out

    def linear(
        self,
        parts: Sequence[str],
        sizes: Sequence[int],
        in_features: int,
        interleaved_heads: Sequence[bool] = (),
    ) -> LinearBase:
        """The parts stacked along the output dimension. A part without a bias beside one that has it gets zeros."""
        weight = torch.empty(sum(sizes), in_features, dtype=self.dtype, device=self.device)
        bias: torch.Tensor | None = None
        if any(f"{part}.bias" in self.available for part in parts):
            bias = torch.zeros(sum(sizes), dtype=self.dtype, device=self.device)
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        for index, (part, (start, stop)) in enumerate(zip(parts, pairwise(ends), strict=True)):
            interleaved = bool(interleaved_heads) and interleaved_heads[index]
            self._read(f"{part}.weight", weight[start:stop], interleaved)
            if bias is not None and f"{part}.bias" in self.available:
                self._read(f"{part}.bias", bias[start:stop], interleaved)
        return Linear(weight, bias)

    def _read(self, name: str, out: torch.Tensor, interleaved_heads: bool = False) -> None:
        if name not in self.available:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}, which {self.spec.architecture} needs")
        shape = self.source.shape(name)
        if shape != tuple(out.shape):
            raise CheckpointError(f"tensor {name!r} has shape {list(shape)}, the model needs {list(out.shape)}")
        if not interleaved_heads:
            self.source.read(name, out)
            return
        # Within a head, stored rows 2j and 2j + 1 are rows j and j + head_dim / 2 of the half layout.
        stored = torch.empty_like(out)
        self.source.read(name, stored)
        pairs = stored.view(-1, self.spec.head_dim // 2, 2, *stored.shape[1:])
        out.view(-1, 2, self.spec.head_dim // 2, *out.shape[1:]).copy_(pairs.transpose(1, 2))
