"""What a decoder-only model is, as data.

A :class:`ModelSpec` says everything the decoder needs besides the weights: sizes, which norms and activations, which
positions each layer sees and how they are rotated. It is built from a checkpoint's own description by ``families``.
Nothing here reads files or knows tensor names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

__all__ = ["Activation", "LayerSpec", "ModelSpec", "MoeSpec", "RopeScaling", "RopeSpec"]

Activation = Literal["silu", "gelu_tanh", "gelu"]
RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One rotary embedding. Only the first ``rotary_dim`` dims of a head turn.

    ``interleaved``: dims (2i, 2i+1) turn together; otherwise (i, i + rotary_dim/2). The loader brings every checkpoint
    to the second form.
    """

    rotary_dim: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: RopeScaling = "none"
    factor: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    original_max_position: int = 0  # dynamic, llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: correction range rounded to whole dims
    short_factor: tuple[float, ...] = ()  # longrope, rotary_dim / 2 divisors
    long_factor: tuple[float, ...] = ()

    def inv_freq(self, max_positions: int) -> torch.Tensor:
        """Radians per position, fp32 ``[rotary_dim / 2]``, for inputs of up to ``max_positions`` tokens.

        The operations and their order are those of transformers (``modeling_rope_utils``): a frequency that differs by
        one fp32 step is off by 1e-3 radians at position 8192, which the log-probabilities of long prompts show.
        """
        half = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / self.rotary_dim
        match self.scaling:
            case "none":
                return 1.0 / self.theta**half
            case "linear":
                return (1.0 / self.theta**half) / self.factor
            case "dynamic":
                reach = max(max_positions, self.original_max_position) / self.original_max_position
                stretch = (self.factor * reach - (self.factor - 1)) ** (self.rotary_dim / (self.rotary_dim - 2))
                return 1.0 / (self.theta * stretch) ** half
            case "llama3":
                return self._llama3(1.0 / self.theta**half)
            case "yarn":
                return self._yarn(self.theta**half)
            case "longrope":
                chosen = self.long_factor if max_positions > self.original_max_position else self.short_factor
                return 1.0 / (torch.tensor(chosen, dtype=torch.float32) * self.theta**half)

    def tables(self, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), fp32 ``[max_positions, rotary_dim / 2]`` on the CPU, ``attention_factor`` multiplied in.

        The angle is rounded to fp32 as in transformers, its cosine and sine are taken in float64.
        """
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), self.inv_freq(max_positions)).double()
        return (
            (angles.cos() * self.attention_factor).to(torch.float32),
            (angles.sin() * self.attention_factor).to(torch.float32),
        )

    def _llama3(self, inv_freq: torch.Tensor) -> torch.Tensor:
        """Long wavelengths are divided by ``factor``, short ones kept, those between interpolated (Llama 3.1)."""
        wavelength = 2 * math.pi / inv_freq
        longest_kept = self.original_max_position / self.high_freq_factor
        shortest_scaled = self.original_max_position / self.low_freq_factor
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * inv_freq / self.factor + smooth * inv_freq
        outside = torch.where(wavelength > shortest_scaled, inv_freq / self.factor, inv_freq)
        return torch.where((wavelength >= longest_kept) & (wavelength <= shortest_scaled), between, outside)

    def _yarn(self, pos_freqs: torch.Tensor) -> torch.Tensor:
        """YaRN (arXiv 2309.00071): a ramp over dims from kept to interpolated frequencies."""

        def dim_of(rotations: float) -> float:
            turns = self.original_max_position / (rotations * 2 * math.pi)
            return (self.rotary_dim * math.log(turns)) / (2 * math.log(self.theta))

        low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp, without dividing by zero
        ramp = torch.clamp((torch.arange(self.rotary_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
        kept = 1 - ramp
        return (1.0 / (self.factor * pos_freqs)) * (1 - kept) + (1.0 / pos_freqs) * kept


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts in place of a layer's MLP.

    Routing is softmax over all experts, then the ``top_k`` largest, divided by their sum if ``norm_topk``. (Softmax
    over the chosen logits alone, as in gpt-oss, is the same as ``norm_topk``.) Expert activation:

    - ``silu``: ``silu(gate) * up``;
    - ``clamped_swiglu``: with ``g = min(gate, 7)`` and ``u = clamp(up, -7, 7)``, ``g * sigmoid(1.702 * g) * (u + 1)``
      (gpt-oss; ``kernels.gated_act`` holds the constants).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk: bool = True
    activation: Literal["silu", "clamped_swiglu"] = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    window: int = 0  # keys a query sees, itself included; 0: all before it
    rope: int = 0  # index into ModelSpec.ropes; -1: positions are not rotated
    sinks: bool = False  # one learned logit a head in the softmax's denominator
    moe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. Soft caps of 0.0 mean none; ``x -> cap * tanh(x / cap)`` otherwise."""

    architecture: str  # as the checkpoint names it
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # rows of the embedding
    max_position: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    attn_scale: float
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # norms multiply by (weight + offset)
    activation: Activation = "silu"
    embed_scale: float = 1.0
    attn_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    logit_scale: float = 1.0
    qk_norm: bool = False  # RMS norm of each query and key head before rope
    post_norms: bool = False  # norms after attention and after the MLP, before the residual is added
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    moe: MoeSpec | None = None
    tie_embeddings: bool = False
    head: Literal["lm", "classification", "none"] = "lm"
    num_labels: int = 0
    id2label: Mapping[int, str] = field(default_factory=dict)
    pooling: Literal["last", "mean"] = "last"  # which hidden rows make an embedding
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def linear_multiplications(self) -> int:
        """Of one token in the linear layers of all layers, without the LM head."""
        attention = self.hidden_size * 2 * (self.q_size + self.kv_size)
        dense = 3 * self.hidden_size * self.intermediate_size
        sparse = 3 * self.hidden_size * self.moe.intermediate_size * self.moe.top_k if self.moe is not None else 0
        return sum(attention + (sparse if layer.moe else dense) for layer in self.layers)

    @property
    def pair_multiplications(self) -> int:
        """Of one query and one key before it, in the attention of all layers."""
        return 2 * self.q_size * self.num_layers

    def rope_tables(self, rope_index: int, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of one of ``ropes``: fp32 ``[max_positions, rotary_dim / 2]`` on the CPU.

        ``dynamic`` and ``longrope`` choose their frequencies by length. One table serves all prompts, so that a cached
        prefix fits any of them: pass the longest length to be served. Up to the trained length both are exact for
        every prompt.
        """
        return self.ropes[rope_index].tables(max_positions)
