"""Writes models of transformers as GGUF files, as llama.cpp's converter lays them out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

__all__ = ["write_gguf"]

_ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
}  # fmt: skip


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> None:
    """``kind``: the type of weights; ``metadata`` and ``tensors``: what else the file holds."""
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_uint32("tokenizer.ggml.eos_token_id", config.eos_token_id)
    if config.model_type in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key.format(arch=architecture), value)
    names = gguf.get_tensor_name_map(_named(architecture), config.num_hidden_layers)
    for name, tensor in _tensors(model, architecture, head_dim).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        one_dimensional = tensor.ndim == 1 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]
        if one_dimensional or "norm" in found:
            writer.add_tensor(found, tensor)
        else:
            writer.add_tensor(found, gguf.quantize(tensor, kind), raw_dtype=kind)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(architecture: str) -> gguf.MODEL_ARCH:
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _tensors(model: PreTrainedModel, architecture: str, head_dim: int) -> dict[str, np.ndarray]:
    found = {}
    for name, parameter in model.state_dict().items():
        tensor = parameter.detach().float()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if architecture == "llama" and re.search(r"self_attn\.[qk]_proj\.", name):
            halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            stem = name.removesuffix("gate_up_proj")
            found[f"{stem}gate_proj.weight"] = gate.contiguous().numpy()
            found[f"{stem}up_proj.weight"] = up.contiguous().numpy()
            continue
        if name.endswith("experts.down_proj"):
            name += ".weight"
        found[name] = tensor.contiguous().numpy()
    return found
