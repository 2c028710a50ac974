"""From a GGUF file's metadata to a :class:`ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.prefill_only.models.families import UnsupportedModel
from backends.prefill_only.models.names import GGUF_PERMUTED, Names
from backends.prefill_only.models.spec import LayerSpec, ModelSpec, RopeSpec

__all__ = ["gguf_spec"]


def gguf_spec(metadata: Mapping[str, Any], tensor_names: set[str], vocab_size: int) -> tuple[ModelSpec, Names]:
    """Raises :class:`UnsupportedModel` for an architecture that is not in the table."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise UnsupportedModel(f"GGUF architecture {architecture!r} is not supported; supported: llama")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    hidden, heads, layers = get("embedding_length"), get("attention.head_count"), get("block_count")
    head_dim = get("attention.key_length", hidden // heads)
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return (
        ModelSpec(
            architecture=architecture,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=get("feed_forward_length"),
            vocab_size=vocab_size,
            max_position=get("context_length"),
            layers=(LayerSpec(),) * layers,
            ropes=(
                RopeSpec(rotary_dim=get("rope.dimension_count", head_dim), theta=float(get("rope.freq_base", 10000.0))),
            ),
            attn_scale=head_dim**-0.5,
            norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            tie_embeddings="output.weight" not in tensor_names,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=() if eos is None else (int(eos),),
        ),
        GGUF_PERMUTED,
    )
