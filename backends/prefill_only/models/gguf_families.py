"""From a GGUF file's metadata to a :class:`ModelSpec`.

The metadata is brought into the form of a ``config.json``, so that ``families`` stays the one description of each
family; what llama.cpp stores differently is corrected afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from backends.prefill_only.models.families import UnsupportedModel, config_spec
from backends.prefill_only.models.names import GGUF, GGUF_PERMUTED, GGUF_PHI3, Names
from backends.prefill_only.models.source import TensorSource
from backends.prefill_only.models.spec import ModelSpec

__all__ = ["EMBEDDING", "gguf_spec"]

EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class _Architecture:
    stem: str  # of the transformers architecture
    names: Names = GGUF
    moe_stem: str = ""  # where the file has experts
    scaled_by_heads_at: int = 0  # number of layers at which queries are scaled by hidden / heads instead of head_dim


_ARCHITECTURES = {
    "llama": _Architecture("Llama", GGUF_PERMUTED, moe_stem="Mixtral"),
    "qwen2": _Architecture("Qwen2"),
    "qwen3": _Architecture("Qwen3"),
    "qwen3moe": _Architecture("Qwen3Moe", moe_stem="Qwen3Moe"),
    "gemma2": _Architecture("Gemma2", scaled_by_heads_at=46),
    "gemma3": _Architecture("Gemma3", scaled_by_heads_at=62),
    "phi3": _Architecture("Phi3", GGUF_PHI3),
}


def gguf_spec(metadata: Mapping[str, Any], source: TensorSource) -> tuple[ModelSpec, Names]:
    """Raises ``UnsupportedModel`` for an architecture that is not in the table, ValueError for a missing key."""
    name = str(metadata.get("general.architecture", "unknown"))
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        supported = ", ".join(_ARCHITECTURES)
        raise UnsupportedModel(f"GGUF architecture {name!r} is not supported; supported are {supported}")

    parts = int(metadata.get("split.count", 1))
    if parts > 1:
        raise UnsupportedModel(f"this is one of {parts} parts of a GGUF model: join them with llama-gguf-split --merge")

    def get(key: str) -> Any:
        return metadata.get(f"{name}.{key}")

    tensors = source.names()
    config = _config(architecture, get, source)
    for token, key in (("bos", "bos_token_id"), ("eos", "eos_token_id")):
        config[key] = metadata.get(f"tokenizer.ggml.{token}_token_id")
    ends = [config["eos_token_id"], metadata.get("tokenizer.ggml.eot_token_id")]
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    missing = [key for key in _REQUIRED if config[key] is None]
    if missing:
        raise ValueError(f"the GGUF file's metadata lack {name}.{_REQUIRED[missing[0]]}")
    spec, _ = config_spec({key: value for key, value in config.items() if value is not None})
    if "rope_freqs.weight" in tensors:  # Llama 3's scaling, worked out by the converter
        factors = _read(source, "rope_freqs.weight")
        rope = replace(spec.ropes[0], scaling="longrope", short_factor=factors, long_factor=factors)
        spec = replace(spec, ropes=(rope,))
    return replace(spec, norm_offset=0.0), architecture.names  # the converter adds Gemma's one to the stored norms


_REQUIRED = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def _config(architecture: _Architecture, get: Callable[[str], Any], source: TensorSource) -> dict[str, Any]:
    tensors = source.names()
    config: dict[str, Any] = {key: get(gguf_key) for key, gguf_key in _REQUIRED.items()}
    hidden, heads = config["hidden_size"] or 0, config["num_attention_heads"] or 1
    head_dim = get("attention.key_length") or hidden // heads
    experts = get("expert_count")
    config |= {
        "architectures": [(architecture.moe_stem if experts else architecture.stem) + "ForCausalLM"],
        "head_dim": head_dim,
        "num_key_value_heads": get("attention.head_count_kv"),
        "vocab_size": source.shape(EMBEDDING)[0],
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "sliding_window": get("attention.sliding_window") or None,
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "query_pre_attn_scalar": hidden // heads
        if config["num_hidden_layers"] == architecture.scaled_by_heads_at
        else head_dim,
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _rope_scaling(get, source),
        "partial_rotary_factor": (get("rope.dimension_count") or head_dim) / head_dim,
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
    }
    if experts:
        config |= {
            "num_experts": experts,
            "num_local_experts": experts,
            "num_experts_per_tok": get("expert_used_count"),
            "moe_intermediate_size": get("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    return config


def _rope_scaling(get: Callable[[str], Any], source: TensorSource) -> dict[str, Any] | None:
    original = get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in source.names():
        return {
            "rope_type": "longrope",
            "long_factor": _read(source, "rope_factors_long.weight"),
            "short_factor": _read(source, "rope_factors_short.weight"),
            "original_max_position_embeddings": original,
            "attention_factor": get("rope.scaling.attn_factor"),
        }
    kind = get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = get("rope.scaling.factor")
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def _read(source: TensorSource, name: str) -> tuple[float, ...]:
    values = torch.empty(source.shape(name))
    source.read(name, values)
    return tuple(values.tolist())
