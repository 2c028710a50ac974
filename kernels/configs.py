"""Chooses a kernel's tile sizes from the table in config_table.py. It asks no device and times nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.config_table import ATTENTION, MATMUL, QUANTISED_MATMUL

# Every GPU can run these.
_SAFE_ROWS = 80


class AttentionConfig(NamedTuple):
    """Query and key rows of a tile, warps of a program, stages of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def attention_config(capability: int, dtype: torch.dtype, head_dim: int) -> AttentionConfig:
    """Of a head of `head_dim` on sm_`capability`; 0 is the interpreter, where tiles of any size cost the same."""
    if capability == 0:
        return AttentionConfig(64, 64, 4, 1)
    padded = max(64, 1 << (head_dim - 1).bit_length())
    return AttentionConfig(*ATTENTION[rows_of(capability), width_of(dtype), padded])


class MatmulConfig(NamedTuple):
    """Rows, channels and inputs of a tile, warps of a program, stages of the load pipeline."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def matmul_config(capability: int, dtype: torch.dtype) -> MatmulConfig:
    """Of the expert products and the LM head, on sm_`capability`.

    It does not depend on the number of rows: a row's bits must not depend on its company.
    """
    return MatmulConfig(*MATMUL[rows_of(capability), width_of(dtype)])


def quantised_matmul_config(capability: int, dtype: torch.dtype) -> MatmulConfig:
    """Of the products with 8-bit weights, on sm_`capability`, for activations of `dtype`."""
    return MatmulConfig(*QUANTISED_MATMUL[rows_of(capability), width_of(dtype)])


def rows_of(capability: int) -> int:
    """The capability whose rows serve sm_`capability`: its own if it has any, else those that suit every GPU."""
    return capability if (capability, "16") in MATMUL else _SAFE_ROWS


def width_of(dtype: torch.dtype) -> str:
    """bf16 and fp16 share their rows: "16"; "32" for fp32."""
    return "32" if dtype == torch.float32 else "16"
