"""Chooses a kernel's tile sizes from the table in config_table.py. No torch device is asked and nothing is timed here."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.config_table import ATTENTION

# Compute capabilities with rows of their own.
_WITH_ROWS = (80, 90, 100)


class AttentionConfig(NamedTuple):
    """Query and key rows of a tile, warps of a program, stages of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def attention_config(capability: int, dtype: torch.dtype, head_dim: int) -> AttentionConfig:
    """Of a head of `head_dim` on sm_`capability`; 0 is the interpreter, to which a small tile costs what a large does."""
    if capability == 0:
        return AttentionConfig(64, 64, 4, 1)
    padded = max(64, 1 << (head_dim - 1).bit_length())
    return AttentionConfig(*ATTENTION[rows_of(capability), width_of(dtype), padded])


def rows_of(capability: int) -> int:
    """The capability whose rows serve `capability`: its own, else the smallest, which every later GPU can run."""
    return capability if capability in _WITH_ROWS else _WITH_ROWS[0]


def width_of(dtype: torch.dtype) -> str:
    """bf16 and fp16 share their rows: "16"; "32" for fp32."""
    return "32" if dtype == torch.float32 else "16"
