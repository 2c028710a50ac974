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
from backends.prefill_only.models.quantized import (
    BLOCK,
    dequantize,
    form_of,
    mxfp4_values,
    read_int8,
    read_scale,
    scale_name,
    tensors_of,
)
from backends.prefill_only.models.quantized_linear import QuantizedLinear
from backends.prefill_only.models.source import CheckpointError, TensorSource
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.models.weights import LayerWeights, ModelWeights

__all__ = ["build"]

# What checkpoints carry beside parameters: tables that are computed here, and scales of quantised activations.
_NO_PARAMETERS = (
    ".inv_freq", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight",
    ".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".weight_shape", ".weight_format",
)  # fmt: skip


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
    """Allocates and fills all parameters.

    Raises ``CheckpointError`` for a tensor that is missing or misshapen, or that the description has no place for.
    """
    gather = _Gather(spec, names, source, dtype, device)
    embed = gather.tensor(body_prefix + names.embed + ".weight", (spec.vocab_size, spec.hidden_size))
    layers = []
    for i in range(spec.num_layers):
        layers.append(gather.layer(i, body_prefix))
        if progress is not None:
            progress((i + 1) / (spec.num_layers + 1), f"loading weights, layer {i + 1} of {spec.num_layers}")
    head = head_prefix + names.lm_head
    lm_head: Linear | None = None
    if spec.head == "lm":
        tied = spec.tie_embeddings
        lm_head = Linear(embed) if tied else gather.dense_linear(head, spec.vocab_size, spec.hidden_size)
    score = None
    if spec.head == "classification":
        score = gather.dense_linear(head_prefix + names.score, spec.num_labels, spec.hidden_size)
    final_norm = gather.tensor(body_prefix + names.final_norm + ".weight", (spec.hidden_size,))
    gather.check_all_used(body_prefix, head)
    return ModelWeights(embed=embed, layers=layers, final_norm=final_norm, lm_head=lm_head, score=score)


class _Gather:
    """Reads named tensors into fused parameters."""

    def __init__(
        self, spec: ModelSpec, names: Names, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.names, self.source = spec, names, source
        self.dtype, self.device = dtype, device
        self.available = source.names()
        self.used: set[str] = set()

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
                bias=spec.qkv_bias,
                interleaved_heads=(True, True, False) if names.qk_interleaved else (),
            ),
            o=self.linear([named(names.o)], [spec.hidden_size], spec.q_size, bias=spec.o_bias),
            mlp_norm=norm(names.mlp_norm),
        )
        if spec.post_norms:
            layer.post_attn_norm = norm(names.post_attn_norm)
            layer.post_mlp_norm = norm(names.post_mlp_norm)
        if spec.qk_norm:
            layer.q_norm = norm(names.q_norm, spec.head_dim)
            layer.k_norm = norm(names.k_norm, spec.head_dim)
        if spec.layers[i].sinks:
            layer.sinks = self.tensor(named(names.sinks), (spec.num_heads,))
        if spec.layers[i].moe:
            self._experts(layer, named)
            return layer
        sizes = [spec.intermediate_size] * len(names.gate_up)
        if len(sizes) == 1:
            sizes = [2 * spec.intermediate_size]
        biased = spec.mlp_bias
        layer.gate_up = self.linear([named(n) for n in names.gate_up], sizes, spec.hidden_size, bias=biased)
        layer.down = self.linear([named(names.down)], [spec.hidden_size], spec.intermediate_size, bias=biased)
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
        *,
        bias: bool = False,
        interleaved_heads: Sequence[bool] = (),
    ) -> LinearBase:
        """The parts stacked along the output dimension."""
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        slices = [slice(start, stop) for start, stop in pairwise(ends)]
        flags = list(interleaved_heads) or [False] * len(parts)
        biases: torch.Tensor | None = None
        if bias:
            biases = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
            for part, where, interleaved in zip(parts, slices, flags, strict=True):
                self._read(f"{part}.bias", biases[where], interleaved)
        quantized = self._quantized(parts, slices, in_features, biases)
        if quantized is not None:
            return quantized
        weight = torch.empty(sum(sizes), in_features, dtype=self.dtype, device=self.device)
        for part, where, interleaved in zip(parts, slices, flags, strict=True):
            self._dense(part, weight[where], interleaved)
        return Linear(weight, biases)

    def dense_linear(self, part: str, size: int, in_features: int) -> Linear:
        """In the activations' dtype, whatever it is stored in."""
        weight = torch.empty(size, in_features, dtype=self.dtype, device=self.device)
        self._dense(part, weight)
        return Linear(weight, self.tensor(f"{part}.bias", (size,)) if f"{part}.bias" in self.available else None)

    def check_all_used(self, body_prefix: str, head: str) -> None:
        """A tensor of the body that nothing asked for means that the description is of another model."""
        left = [
            name
            for name in self.available - self.used
            if name.startswith(body_prefix)
            and not name.endswith(_NO_PARAMETERS)
            and not name.startswith((head + ".", self.names.score + "."))
        ]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise CheckpointError(
                f"the checkpoint has tensor {min(left)!r}{more}, for which {self.spec.architecture} has no place: "
                "is its configuration that of another model?"
            )

    def _quantized(
        self, parts: Sequence[str], slices: Sequence[slice], in_features: int, bias: torch.Tensor | None
    ) -> LinearBase | None:
        """None where a part is stored plainly, or where scales of different kinds or blocks do not line up."""
        forms = {form_of(self.source, self.available, part) for part in parts}
        if "plain" in forms or ("fp8" in forms and len(forms) > 1):
            return None
        scales = []
        for part, where in zip(parts, slices, strict=True):
            self._check_shape(part, (where.stop - where.start, in_features))
            scales.append(read_scale(self.source, self.available, part, where.stop - where.start))
        by_block = [scale.shape[0] != where.stop - where.start for scale, where in zip(scales, slices, strict=True)]
        if len({scale.shape[1] for scale in scales}) > 1 or len(set(by_block)) > 1:
            return None
        if by_block[0] and any(where.start % BLOCK for where in slices):
            return None
        kind = torch.float8_e4m3fn if "fp8" in forms else torch.int8
        weight = torch.empty(slices[-1].stop, in_features, dtype=kind, device=self.device)
        for part, where in zip(parts, slices, strict=True):
            self._read_eight_bits(part, weight[where])
        return QuantizedLinear(weight, torch.cat(scales).to(self.device), self.dtype, bias)

    def _dense(self, part: str, out: torch.Tensor, interleaved_heads: bool = False) -> None:
        """One layer's weight ``[size, in]`` as numbers of the model's dtype."""
        form = form_of(self.source, self.available, part)
        if form == "plain":
            self._read(f"{part}.weight", out, interleaved_heads)
            return
        self._check_shape(part, tuple(out.shape))
        values = torch.empty(out.shape, dtype=torch.float8_e4m3fn if form == "fp8" else torch.int8)
        self._read_eight_bits(part, values)
        dequantize(values, read_scale(self.source, self.available, part, out.shape[0]), out)

    def _read_eight_bits(self, part: str, out: torch.Tensor) -> None:
        form = form_of(self.source, self.available, part)
        self.used.update(tensors_of(form, self.available, part))
        if form == "fp8":
            self.source.read(f"{part}.weight", out)
        else:
            read_int8(self.source, part, form, out)

    def _check_shape(self, part: str, shape: tuple[int, ...]) -> None:
        form = form_of(self.source, self.available, part)
        name = tensors_of(form, self.available, part)[0]
        stored = self.source.shape(name)
        needed = (shape[0], -(-shape[1] // 4)) if form == "int8_packed" else shape
        if stored != needed:
            raise CheckpointError(f"tensor {name!r} has shape {list(stored)}, the model needs {list(needed)}")
        scale_name(self.available, part)

    def _experts(self, layer: LayerWeights, named: Callable[[str], str]) -> None:
        spec, names, moe = self.spec, self.names, self.spec.moe
        assert moe is not None
        layer.router = self.dense_linear(named(names.router), moe.num_experts, spec.hidden_size)
        inner, hidden, count = moe.intermediate_size, spec.hidden_size, moe.num_experts
        gate_up = torch.empty(count, 2 * inner, hidden, dtype=self.dtype, device=self.device)
        down = torch.empty(count, hidden, inner, dtype=self.dtype, device=self.device)
        layer.experts_gate_up, layer.experts_down = gate_up, down
        halves = (slice(0, inner), slice(inner, 2 * inner))
        match names.expert_layout:
            case "each":
                for e in range(count):
                    for template, half in zip(names.expert_gate_up, halves, strict=True):
                        self._dense(named(template).replace("{e}", str(e)), gate_up[e, half])
                    self._dense(named(names.expert_down).replace("{e}", str(e)), down[e])
            case "stacked":
                for template, half in zip(names.expert_gate_up, halves, strict=True):
                    self._read(f"{named(template)}.weight", gate_up[:, half])
                self._read(f"{named(names.expert_down)}.weight", down)
            case "gpt_oss":
                self._gpt_oss_experts(layer, named(names.expert_gate_up[0]), named(names.expert_down))

    def _gpt_oss_experts(self, layer: LayerWeights, gate_up_name: str, down_name: str) -> None:
        """Rows of gate and up alternate. Plain values lie ``[experts, in, out]``, mxfp4 ``[experts, out, in]``."""
        gate_up, down = layer.experts_gate_up, layer.experts_down
        assert gate_up is not None and down is not None

        def both(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], dim=-2)

        for name, out, order in ((gate_up_name, gate_up, both), (down_name, down, lambda rows: rows)):
            count, rows, columns = out.shape
            if f"{name}_blocks" in self.available:
                blocks = torch.empty(count, rows, columns // 32, 16, dtype=torch.uint8)
                scales = torch.empty(count, rows, columns // 32, dtype=torch.uint8)
                self._read(f"{name}_blocks", blocks)
                self._read(f"{name}_scales", scales)
                for e in range(count):
                    out[e].copy_(order(mxfp4_values(blocks[e], scales[e], self.dtype)))
            else:
                stored = torch.empty(count, columns, rows, dtype=self.dtype)
                self._read(name, stored)
                for e in range(count):
                    out[e].copy_(order(stored[e].t()))
        bias = self.tensor(f"{gate_up_name}_bias", (gate_up.shape[0], gate_up.shape[1]))
        layer.experts_gate_up_bias = both(bias[..., None])[..., 0].contiguous()
        layer.experts_down_bias = self.tensor(f"{down_name}_bias", (down.shape[0], down.shape[1]))

    def _read(self, name: str, out: torch.Tensor, interleaved_heads: bool = False) -> None:
        if name not in self.available:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}, which {self.spec.architecture} needs")
        self.used.add(name)
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
