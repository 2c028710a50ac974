"""``python -m loadtest.export_hf DIRECTORY``: the built-in model as a Hugging Face directory.

For servers to measure against that read no GGUF, and for tests. Weights are dequantised; any GGUF file of the Llama
architecture without experts will do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from backends.prefill_only.models.dtype import DTYPES
from backends.prefill_only.models.layout import checkpoint_tensors
from backends.prefill_only.models.linear import LinearBase
from backends.prefill_only.models.loader import LoadedModel, load
from backends.prefill_only.models.names import LLAMA
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.models.weights import ModelWeights
from backends.prefill_only.text.gguf_tokenizer import gguf_definition

__all__ = ["export", "main"]

_BODY = "model."


def export(model: LoadedModel, directory: Path) -> None:
    """Writes configuration, weights and tokenizer. ValueError for a model that is no plain Llama from a GGUF file."""
    spec = model.spec
    plain_rope = len(spec.ropes) == 1 and spec.ropes[0].scaling == "none"
    if spec.architecture != "LlamaForCausalLM" or not plain_rope or model.path.suffix != ".gguf":
        raise ValueError(
            f"{model.path}: only GGUF files of the Llama architecture without rope scaling can be exported"
        )
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(model))
    tensors = _tensors(spec, model.weights)
    expected = checkpoint_tensors(spec, LLAMA, _BODY)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    definition = gguf_definition(model.path)
    _write_json(directory / "tokenizer.json", definition.spec)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.max_position}
    settings |= definition.named_tokens
    if "default" in definition.chat_templates:
        settings["chat_template"] = definition.chat_templates["default"]
    _write_json(directory / "tokenizer_config.json", settings)


def _config(model: LoadedModel) -> dict[str, Any]:
    spec = model.spec
    ends = list(model.eos_token_ids)
    return {
        "architectures": [spec.architecture],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.ropes[0].theta,
        "hidden_act": "silu",
        "attention_bias": spec.qkv_bias,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "torch_dtype": str(model.weights.embed.dtype).removeprefix("torch."),
    }


def _tensors(spec: ModelSpec, weights: ModelWeights) -> dict[str, torch.Tensor]:
    found = {f"{_BODY}{LLAMA.embed}.weight": weights.embed}

    def put(linear: LinearBase | None, templates: Sequence[str], sizes: list[int], i: int) -> None:
        assert linear is not None
        start = 0
        for template, size in zip(templates, sizes, strict=True):
            part = linear.rows(start, start + size)
            name = _BODY + template.format(i=i)
            found[f"{name}.weight"] = part.weight.clone()  # type: ignore[attr-defined]  # read densely from a GGUF file
            if part.bias is not None:
                found[f"{name}.bias"] = part.bias.clone()
            start += size

    for i, layer in enumerate(weights.layers):
        put(layer.qkv, LLAMA.qkv, [spec.q_size, spec.kv_size, spec.kv_size], i)
        put(layer.o, [LLAMA.o], [spec.hidden_size], i)
        put(layer.gate_up, LLAMA.gate_up, [spec.intermediate_size] * 2, i)
        put(layer.down, [LLAMA.down], [spec.hidden_size], i)
        found[f"{_BODY}{LLAMA.input_norm.format(i=i)}.weight"] = layer.input_norm
        found[f"{_BODY}{LLAMA.mlp_norm.format(i=i)}.weight"] = layer.mlp_norm
    found[f"{_BODY}{LLAMA.final_norm}.weight"] = weights.final_norm
    if not spec.tie_embeddings:
        assert weights.lm_head is not None
        found[f"{LLAMA.lm_head}.weight"] = weights.lm_head.weight
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.export_hf", description=__doc__)
    parser.add_argument("directory", type=Path, help="is created if need be")
    parser.add_argument("--model", default="builtin", help="a .gguf file (default: the built-in model)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    args = parser.parse_args(argv)
    export(load(args.model, dtype=args.dtype, device="cpu"), args.directory)
    print(f"wrote {args.directory}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
