"""A GGUF model written as a Hugging Face directory is the same model, to this engine and to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.prefill_only.models.linear import Linear
from backends.prefill_only.models.loader import load
from loadtest.export_hf import export, main
from tests.backends.prefill_only.models.gguf_files import write_gguf
from tests.backends.prefill_only.models.transformers_models import save_model


def test_the_built_in_model_as_a_directory(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0

    built_in, exported = (load(name, dtype="bfloat16", device="cpu") for name in ("builtin", str(tmp_path)))

    assert exported.spec == built_in.spec and exported.eos_token_ids == built_in.eos_token_ids
    assert torch.equal(exported.weights.embed, built_in.weights.embed)
    for ours, theirs in zip(built_in.weights.layers, exported.weights.layers, strict=True):
        assert isinstance(ours.qkv, Linear) and isinstance(theirs.qkv, Linear)
        assert torch.equal(ours.qkv.weight, theirs.qkv.weight) and torch.equal(ours.mlp_norm, theirs.mlp_norm)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16 and model.config.rope_parameters["rope_theta"] == 100000.0

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Is 7 a prime?"}], return_dict=False)
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nIs 7 a prime?<|im_end|>\n")
    assert ids[0] == built_in.spec.bos_token_id and built_in.eos_token_ids[0] in ids


def test_other_families_are_refused(tmp_path: Path) -> None:
    write_gguf(save_model(tmp_path / "hf", "qwen2"), tmp_path / "qwen.gguf")
    with pytest.raises(ValueError, match="Llama architecture"):
        export(load(str(tmp_path / "qwen.gguf"), dtype="float32", device="cpu"), tmp_path / "out")
