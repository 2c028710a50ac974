"""A small random Llama-style model, in memory, and an engine around it."""

from __future__ import annotations

from dataclasses import replace

import torch

from backends.prefill_only.decoder import Decoder
from backends.prefill_only.kv_pages import KvPages
from backends.prefill_only.models.linear import Linear
from backends.prefill_only.models.spec import LayerSpec, ModelSpec, RopeSpec
from backends.prefill_only.models.weights import LayerWeights, ModelWeights
from backends.prefill_only.readout import LmHead

__all__ = ["TINY", "tiny_decoder", "tiny_weights"]

TINY = ModelSpec(
    architecture="LlamaForCausalLM",
    hidden_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=192,
    vocab_size=320,
    max_position=2048,
    layers=(LayerSpec(),) * 3,
    ropes=(RopeSpec(rotary_dim=64),),
    attn_scale=64**-0.5,
    norm_eps=1e-5,
)


def tiny_weights(
    spec: ModelSpec = TINY, dtype: torch.dtype = torch.float32, seed: int = 0, device: torch.device | None = None
) -> ModelWeights:
    """Spread so that attention is far from uniform and predictions far from flat."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 1.5 / shape[-1] ** 0.5).to(device, dtype)

    def gains(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(device, dtype)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    layers = [
        LayerWeights(
            input_norm=gains(hidden),
            qkv=Linear(random(spec.q_size + 2 * spec.kv_size, hidden)),
            o=Linear(random(hidden, spec.q_size)),
            mlp_norm=gains(hidden),
            gate_up=Linear(random(2 * inner, hidden)),
            down=Linear(random(hidden, inner)),
        )
        for _ in range(spec.num_layers)
    ]
    embed = random(spec.vocab_size, hidden) * hidden**0.5 / 2
    return ModelWeights(
        embed=embed, layers=layers, final_norm=gains(hidden), lm_head=Linear(random(spec.vocab_size, hidden) * 2)
    )


def tiny_decoder(
    spec: ModelSpec = TINY,
    weights: ModelWeights | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    pool_pages: int = 64,
    scratch_pages: int = 256,
    page_tokens: int = 32,
    chunk_rows: int = 64,
) -> tuple[Decoder, LmHead]:
    weights = weights or tiny_weights(spec, dtype)
    dtype = weights.embed.dtype
    kv = KvPages(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_tokens=page_tokens,
        pool_pages=pool_pages,
        scratch_pages=scratch_pages,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    decoder = Decoder(spec, weights, kv, max_positions=spec.max_position, chunk_rows=chunk_rows)
    assert weights.lm_head is not None
    return decoder, LmHead(weights.lm_head, soft_cap=spec.final_soft_cap, scale=spec.logit_scale)


def with_window(spec: ModelSpec, window: int) -> ModelSpec:
    """Every other layer sees ``window`` keys alone."""
    return replace(spec, layers=tuple(LayerSpec(window=window if i % 2 == 0 else 0) for i in range(spec.num_layers)))
