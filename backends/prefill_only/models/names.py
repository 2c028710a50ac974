"""What checkpoints call the parameters of :class:`weights.LayerWeights`.

Each field holds name templates without the ``.weight`` or ``.bias`` ending. ``{i}`` is the layer; ``{{e}}`` is the
expert, filled in after it.
Fields of several names are parts that are stacked in that order, so a checkpoint that is already fused has one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["GEMMA2", "GGUF", "GGUF_PERMUTED", "GGUF_PHI3", "GPT_OSS", "LLAMA", "MIXTRAL", "PHI3", "QWEN3_MOE", "Names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    embed: str
    final_norm: str
    lm_head: str
    score: str
    input_norm: str
    qkv: tuple[str, ...]
    o: str
    mlp_norm: str
    gate_up: tuple[str, ...]
    down: str
    post_attn_norm: str = ""
    post_mlp_norm: str = ""
    q_norm: str
    k_norm: str
    sinks: str
    router: str = ""
    expert_gate_up: tuple[str, ...] = ()
    expert_down: str = ""
    # each: a tensor an expert; stacked: [experts, out, in]; gpt_oss: that model's own, see ``build``
    expert_layout: Literal["each", "stacked", "gpt_oss"] = "each"
    qk_interleaved: bool = False  # q and k rows are stored for interleaved rope


LLAMA = Names(
    embed="embed_tokens",
    final_norm="norm",
    lm_head="lm_head",
    score="score",
    input_norm="layers.{i}.input_layernorm",
    qkv=("layers.{i}.self_attn.q_proj", "layers.{i}.self_attn.k_proj", "layers.{i}.self_attn.v_proj"),
    o="layers.{i}.self_attn.o_proj",
    mlp_norm="layers.{i}.post_attention_layernorm",
    gate_up=("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"),
    down="layers.{i}.mlp.down_proj",
    q_norm="layers.{i}.self_attn.q_norm",
    k_norm="layers.{i}.self_attn.k_norm",
    sinks="layers.{i}.self_attn.sinks",
)
GEMMA2 = replace(
    LLAMA,
    post_attn_norm="layers.{i}.post_attention_layernorm",
    mlp_norm="layers.{i}.pre_feedforward_layernorm",
    post_mlp_norm="layers.{i}.post_feedforward_layernorm",
)
PHI3 = replace(LLAMA, qkv=("layers.{i}.self_attn.qkv_proj",), gate_up=("layers.{i}.mlp.gate_up_proj",))
QWEN3_MOE = replace(
    LLAMA,
    router="layers.{i}.mlp.gate",
    expert_gate_up=("layers.{i}.mlp.experts.{{e}}.gate_proj", "layers.{i}.mlp.experts.{{e}}.up_proj"),
    expert_down="layers.{i}.mlp.experts.{{e}}.down_proj",
)
MIXTRAL = replace(
    LLAMA,
    router="layers.{i}.block_sparse_moe.gate",
    expert_gate_up=("layers.{i}.block_sparse_moe.experts.{{e}}.w1", "layers.{i}.block_sparse_moe.experts.{{e}}.w3"),
    expert_down="layers.{i}.block_sparse_moe.experts.{{e}}.w2",
)
GPT_OSS = replace(
    LLAMA,
    router="layers.{i}.mlp.router",
    expert_gate_up=("layers.{i}.mlp.experts.gate_up_proj",),
    expert_down="layers.{i}.mlp.experts.down_proj",
    expert_layout="gpt_oss",
)
GGUF = Names(
    embed="token_embd",
    final_norm="output_norm",
    lm_head="output",
    score="cls.output",
    input_norm="blk.{i}.attn_norm",
    qkv=("blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v"),
    o="blk.{i}.attn_output",
    mlp_norm="blk.{i}.ffn_norm",
    gate_up=("blk.{i}.ffn_gate", "blk.{i}.ffn_up"),
    down="blk.{i}.ffn_down",
    post_attn_norm="blk.{i}.post_attention_norm",
    post_mlp_norm="blk.{i}.post_ffw_norm",
    q_norm="blk.{i}.attn_q_norm",
    k_norm="blk.{i}.attn_k_norm",
    sinks="blk.{i}.attn_sinks",
    router="blk.{i}.ffn_gate_inp",
    expert_gate_up=("blk.{i}.ffn_gate_exps", "blk.{i}.ffn_up_exps"),
    expert_down="blk.{i}.ffn_down_exps",
    expert_layout="stacked",
)
# llama.cpp keeps the rows of q and k of the Llama family in the order of Meta's interleaved rope.
GGUF_PERMUTED = replace(GGUF, qk_interleaved=True)
GGUF_PHI3 = replace(GGUF, qkv=("blk.{i}.attn_qkv",), gate_up=("blk.{i}.ffn_up",))
