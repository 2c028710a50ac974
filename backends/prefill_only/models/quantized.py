"""How checkpoints store quantised linear layers, and reading them: scales in the kernels' layouts, or plain values.

A layer's form is told by its tensors, not by the configuration, since exporters leave single layers as they were:

===============  =======================================  ============================================
form             tensors beside ``X``                     written by
===============  =======================================  ============================================
``plain``        ``.weight``                              everybody
``fp8``          ``.weight`` e4m3, ``.weight_scale``      compressed-tensors, AutoFP8 (tensor, channel, 128×128)
``fp8``          ``.weight`` e4m3, ``.weight_scale_inv``  DeepSeek, Qwen (128×128; it multiplies, despite its name)
``int8``         ``.weight`` int8, ``.weight_scale``      compressed-tensors (tensor, channel, group)
``int8``         ``.weight`` int8, ``.SCB``               bitsandbytes (channel, 127 times the scale)
``int8_packed``  ``.weight_packed`` int32                 compressed-tensors, four offset bytes an element
===============  =======================================  ============================================

Activations are not quantised, whatever the checkpoint's recipe says: the answer is at least as exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from backends.prefill_only.models.families import UnsupportedModel
from backends.prefill_only.models.source import CheckpointError, TensorSource

__all__ = [
    "BLOCK", "Form", "check_quantization", "dequantize", "form_of", "mxfp4_values", "read_int8", "read_scale",
    "scale_name", "tensors_of",
]  # fmt: skip

Form = Literal["plain", "fp8", "int8", "int8_packed"]

BLOCK = 128  # rows and columns that share a scale in block formats
_SUPPORTED = "fp8 (tensor, channel and 128x128 scales), compressed-tensors 8 bits, bitsandbytes 8 bits, mxfp4"
_SCALES = (".weight_scale_inv", ".weight_scale", ".SCB")
# By code: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, MXFP4).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_FP4_BIAS = 127


def check_quantization(config: Mapping[str, Any]) -> None:
    """Refuses what cannot be read, by the configuration's ``quantization_config``. Raises ``UnsupportedModel``."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return
    method = quantization.get("quant_method", "compressed-tensors" if "config_groups" in quantization else "unknown")
    match method:
        case "compressed-tensors":
            for group in quantization.get("config_groups", {}).values():
                _check_group(group.get("weights") or {})
        case "fp8":
            block = quantization.get("weight_block_size")
            if block is not None and list(block) != [BLOCK, BLOCK]:
                raise UnsupportedModel(f"FP8 weights in blocks of {block} are not supported; supported: {_SUPPORTED}")
        case "bitsandbytes" if quantization.get("load_in_8bit"):
            pass
        case "mxfp4":
            pass
        case _:
            raise UnsupportedModel(f"quantisation {method!r} is not supported; supported: {_SUPPORTED}")


def _check_group(weights: Mapping[str, Any]) -> None:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if bits != 8 or kind not in ("float", "int"):
        raise UnsupportedModel(f"{bits}-bit {kind} weights are not supported; supported: {_SUPPORTED}")
    if not weights.get("symmetric", True):
        raise UnsupportedModel("asymmetric int8 weights (with zero points) are not supported")
    if strategy == "block" and list(weights.get("block_structure") or [BLOCK, BLOCK]) != [BLOCK, BLOCK]:
        raise UnsupportedModel(f"weights in blocks of {weights['block_structure']} are not supported")


def form_of(source: TensorSource, available: set[str], part: str) -> Form:
    """``part``: the layer's name without an ending. ``plain`` also for a layer that is absent."""
    if f"{part}.weight_packed" in available:
        return "int8_packed"
    if f"{part}.weight" not in available:
        return "plain"
    match source.dtype(f"{part}.weight"):
        case torch.float8_e4m3fn:
            return "fp8"
        case torch.int8:
            return "int8"
    return "plain"


def scale_name(available: set[str], part: str) -> str:
    for ending in _SCALES:
        if part + ending in available:
            return part + ending
    raise CheckpointError(f"tensor '{part}.weight' is quantised, but the checkpoint has no '{part}.weight_scale'")


def tensors_of(form: Form, available: set[str], part: str) -> list[str]:
    """Names of what a layer is read from, its bias aside."""
    if form == "plain":
        return [f"{part}.weight"]
    weight = f"{part}.weight_packed" if form == "int8_packed" else f"{part}.weight"
    return [weight, scale_name(available, part)]


def read_scale(source: TensorSource, available: set[str], part: str, size: int) -> torch.Tensor:
    """fp32 ``[size, groups]`` (one a channel: groups is 1), or ``[⌈size / 128⌉, ⌈in / 128⌉]`` for blocks."""
    name = scale_name(available, part)
    scale = torch.empty(source.shape(name), dtype=torch.float32)
    source.read(name, scale)
    if name.endswith(".SCB"):
        scale /= 127
    if scale.numel() == 1:
        return scale.reshape(1, 1).repeat(size, 1)
    if scale.shape[0] == size:
        return scale.reshape(size, -1)
    if scale.dim() == 2 and scale.shape[0] == -(-size // BLOCK):
        return scale
    raise CheckpointError(f"tensor {name!r} has shape {list(scale.shape)}, which fits no scale of {size} channels")


def read_int8(source: TensorSource, part: str, form: Form, out: torch.Tensor) -> None:
    """``out``: int8 ``[size, in]``."""
    if form == "int8":
        source.read(f"{part}.weight", out)
        return
    size, in_features = out.shape
    packed = torch.empty(size, -(-in_features // 4), dtype=torch.int32)
    source.read(f"{part}.weight_packed", packed)
    # Four unsigned bytes an element, the first in the lowest bits; 128 stands for zero.
    out.copy_((packed.view(torch.uint8)[:, :in_features].to(torch.int16) - 128).to(torch.int8))


def dequantize(values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i, j] = values[i, j] · scale``; ``scale`` as :func:`read_scale` gives it."""
    rows, columns = values.shape
    if scale.shape[0] == rows:
        for first in range(0, rows, BLOCK):
            part = slice(first, min(first + BLOCK, rows))
            grouped = values[part].float().unflatten(1, (scale.shape[1], -1))
            out[part].copy_((grouped * scale[part, :, None].to(values.device)).flatten(1))
        return
    for block, row_scale in enumerate(scale.to(values.device)):
        part = slice(block * BLOCK, min((block + 1) * BLOCK, rows))
        out[part].copy_(values[part].float() * row_scale.repeat_interleave(BLOCK)[:columns])


def mxfp4_values(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``blocks`` uint8 ``[rows, groups, 16]`` and ``scales`` uint8 ``[rows, groups]`` as ``[rows, groups · 32]``.

    A byte holds two values, the first in its low half; a group of 32 shares the power of two ``2^(scale - 127)``.
    """
    table = torch.tensor(_FP4, dtype=torch.float32)
    low, high = table[(blocks & 0x0F).long()], table[(blocks >> 4).long()]
    pairs = torch.stack([low, high], dim=-1).flatten(-2)  # [rows, groups, 32]
    exponent = scales.to(torch.int32)[..., None] - _FP4_BIAS
    return torch.ldexp(pairs, exponent).flatten(-2).to(dtype)
