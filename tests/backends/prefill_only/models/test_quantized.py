"""Checkpoints with 8-bit weights give what their dequantised copies give. Formats are written here as exporters do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from backends.prefill_only.models.families import UnsupportedModel
from backends.prefill_only.models.linear import Linear
from backends.prefill_only.models.loader import load
from backends.prefill_only.models.quantized_linear import QuantizedLinear
from backends.prefill_only.models.source import CheckpointError
from tests.backends.prefill_only.models.engine import logprobs
from tests.backends.prefill_only.models.transformers_models import prompt, save_model

pytestmark = pytest.mark.usefixtures("one_thread")

E4M3_MAX = 448.0
SIZES = {"hidden_size": 160, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}

Tensors = dict[str, torch.Tensor]
Quantized = tuple[Tensors, torch.Tensor]  # tensors by ending, and the weight that they stand for


def _fp8(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def fp8_tensor(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().max() / E4M3_MAX
    stored = _fp8(weight / scale)
    return {".weight": stored, ".weight_scale": scale, ".input_scale": torch.tensor(1.0)}, stored.float() * scale


def fp8_channel(weight: torch.Tensor) -> Quantized:
    scale = (weight.abs().amax(1, keepdim=True) / E4M3_MAX).to(torch.bfloat16)
    stored = _fp8(weight / scale.float())
    return {".weight": stored, ".weight_scale": scale}, stored.float() * scale.float()


def fp8_block(weight: torch.Tensor) -> Quantized:
    scale = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    stored, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale[i, j] = weight[block].abs().max() / E4M3_MAX
            stored[block] = _fp8(weight[block] / scale[i, j])
            meant[block] = stored[block].float() * scale[i, j]
    return {".weight": stored, ".weight_scale_inv": scale}, meant


def int8_channel(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return {".weight": stored, ".weight_scale": scale}, stored.float() * scale


def int8_packed_groups(weight: torch.Tensor) -> Quantized:
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, 32)
    scale = grouped.abs().amax(2) / 127
    values = (grouped / scale[..., None]).round()
    unsigned = (values + 128).to(torch.int64).view(rows, columns // 4, 4)
    words = (unsigned << torch.tensor([0, 8, 16, 24])).sum(2)
    packed = (words - (words >= 2**31) * 2**32).to(torch.int32)
    shape = torch.tensor([rows, columns])
    meant = (values * scale[..., None]).view(rows, columns)
    return {".weight_packed": packed, ".weight_scale": scale, ".weight_shape": shape}, meant


def int8_bitsandbytes(weight: torch.Tensor) -> Quantized:
    largest = weight.abs().amax(1)
    stored = (weight * 127 / largest[:, None]).round().to(torch.int8)
    meant = stored.float() * largest[:, None] / 127
    return {".weight": stored, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}, meant


def _groups(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True, **weights}}},
    }


FORMATS: dict[str, tuple[Callable[[torch.Tensor], Quantized], dict[str, Any]]] = {
    "fp8-tensor": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-channel": (fp8_channel, _groups(type="float", strategy="channel")),
    "fp8-block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int8-channel": (int8_channel, _groups(type="int", strategy="channel")),
    "int8-packed-groups": (int8_packed_groups, _groups(type="int", strategy="group", group_size=32)),
    "int8-bitsandbytes": (int8_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def rewrite(
    directory: Path,
    plain: Path,
    quantize: Callable[[torch.Tensor], Quantized],
    description: dict[str, Any],
    *,
    endings: tuple[str, ...] = ("_proj.weight",),
    skip: tuple[str, ...] = (),
) -> None:
    """Quantises tensors of ``directory`` in place; ``plain`` gets the values that they then stand for."""
    tensors = load_file(directory / "model.safetensors")
    meant = dict(tensors)
    for name in list(tensors):
        if name.endswith(endings) and not any(part in name for part in skip):
            parts, meant[name] = quantize(tensors.pop(name))
            tensors |= {name.removesuffix(".weight") + ending: part.contiguous() for ending, part in parts.items()}
    config = json.loads((directory / "config.json").read_text())
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    save_file(meant, plain / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": description}))
    save_file(tensors, directory / "model.safetensors")


def check_same(directory: Path, plain: Path) -> None:
    token_ids = prompt(40)
    found = logprobs(load(str(directory), dtype="float32", device="cpu"), token_ids)
    expected = logprobs(load(str(plain), dtype="float32", device="cpu"), token_ids)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_answers_as_its_dequantised_copy(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen2", **SIZES)
    rewrite(tmp_path / "model", tmp_path / "plain", *FORMATS[name])

    weights = load(str(tmp_path / "model"), dtype="float32", device="cpu").weights

    for layer in weights.layers:
        assert isinstance(layer.qkv, QuantizedLinear) and isinstance(layer.down, QuantizedLinear)
        assert layer.qkv.weight.element_size() == 1 and layer.qkv.bias is not None
    check_same(tmp_path / "model", tmp_path / "plain")


def test_layers_that_were_left_alone_stay_as_they_are(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", **SIZES)
    rewrite(
        tmp_path / "model", tmp_path / "plain", *FORMATS["fp8-channel"], skip=("o_proj", "layers.1.self_attn.k_proj")
    )

    weights = load(str(tmp_path / "model"), dtype="float32", device="cpu").weights

    assert isinstance(weights.layers[0].qkv, QuantizedLinear) and isinstance(weights.layers[0].o, Linear)
    assert isinstance(weights.layers[1].qkv, Linear)  # one of its three parts is not quantised
    check_same(tmp_path / "model", tmp_path / "plain")


def test_blocks_that_do_not_line_up_when_fused_are_dequantised(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", **SIZES | {"head_dim": 32, "intermediate_size": 192})
    rewrite(tmp_path / "model", tmp_path / "plain", *FORMATS["fp8-block"])

    weights = load(str(tmp_path / "model"), dtype="float32", device="cpu").weights

    assert isinstance(weights.layers[0].gate_up, Linear) and isinstance(weights.layers[0].down, QuantizedLinear)
    check_same(tmp_path / "model", tmp_path / "plain")


@pytest.mark.parametrize("start", [0, 64, 128, 200])
def test_output_columns_of_a_block_scaled_layer(start: int) -> None:
    torch.manual_seed(0)
    parts, _ = fp8_block(torch.randn(320, 160))
    layer = QuantizedLinear(parts[".weight"], parts[".weight_scale_inv"], torch.float32, torch.randn(320))
    x = torch.randn(16, 160)

    part = layer.rows(start, 320)

    torch.testing.assert_close(part(x), layer(x)[:, start:])
    torch.testing.assert_close(part.rows(8, 100)(x), layer(x)[:, start + 8 : start + 100])
    assert part.out_features == 320 - start


def test_quantised_experts_are_dequantised(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "mixtral", num_local_experts=3, num_experts_per_tok=2, **SIZES)
    experts = (".w1.weight", ".w2.weight", ".w3.weight")
    rewrite(tmp_path / "model", tmp_path / "plain", *FORMATS["fp8-block"], endings=experts)
    assert any(name.endswith(".w1.weight_scale_inv") for name in load_file(tmp_path / "model" / "model.safetensors"))
    check_same(tmp_path / "model", tmp_path / "plain")


def test_mxfp4_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Dequantised as transformers does it."""
    directory, plain = tmp_path / "model", tmp_path / "plain"
    save_model(directory, "gpt_oss", num_local_experts=3, num_experts_per_tok=2, hidden_size=64, intermediate_size=96)
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    meant = dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 126, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
            assert meant[name].shape == (experts, inputs, outputs)
    save_file(meant, plain / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    save_file(tensors, directory / "model.safetensors")
    check_same(directory, plain)


@pytest.mark.parametrize(
    ("description", "word"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "64"),
        (_groups(type="int", strategy="group") | {"config_groups": {"g": {"weights": {"num_bits": 4}}}}, "4-bit"),
        (_groups(type="int", symmetric=False), "asymmetric"),
    ],
)
def test_other_quantisations_are_refused(description: dict[str, Any], word: str, tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": description}))
    with pytest.raises(UnsupportedModel, match=word):
        load(str(tmp_path), dtype="float32", device="cpu")


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", **SIZES)
    rewrite(tmp_path / "model", tmp_path / "plain", *FORMATS["fp8-block"])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(str(tmp_path / "model"), dtype="float32", device="cpu")
