"""Pays before the first request for what libraries do at the first call of a shape.

A CPU's matrix products are compiled for each row count; a pass may have any multiple of ``ROW_ALIGN`` up to the chunk.
"""

from __future__ import annotations

import random

import torch

from backends.base import Readout
from backends.prefill_only.decoder import Decoder
from backends.prefill_only.direct import run_directly
from backends.prefill_only.prefill_pass import PassJob
from backends.prefill_only.readout import LmHead
from backends.prefill_only.rows import ROW_ALIGN

__all__ = ["warm_up"]

_LENGTHS = (1, 40, 200, 1000)


def warm_up(decoder: Decoder, head: LmHead) -> None:
    if decoder.device.type == "cpu":
        _linears(decoder)
    rng = random.Random(0)
    for length in _LENGTHS:
        prompt = [rng.randrange(head.vocab) for _ in range(min(length, decoder.max_positions))]
        run_directly(decoder, head, [PassJob(prompt, Readout(top_logprobs=1, prompt_logprobs=1))])


def _linears(decoder: Decoder) -> None:
    """Of the first layer, at every row count; layers are alike."""
    spec, layer = decoder.spec, decoder.weights.layers[0]
    q = spec.q_size
    for rows in range(ROW_ALIGN, decoder.chunk_rows + 1, ROW_ALIGN):

        def zeros(columns: int, rows: int = rows) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=decoder.dtype, device=decoder.device)

        hidden = zeros(spec.hidden_size)
        layer.qkv(hidden, out=zeros(layer.qkv.out_features))
        layer.qkv.rows(0, q)(hidden)
        layer.qkv.rows(q, layer.qkv.out_features)(hidden)
        layer.o.add_(zeros(q), hidden)
        if layer.gate_up is not None and layer.down is not None:
            layer.gate_up(hidden, out=zeros(layer.gate_up.out_features))
            layer.down.add_(zeros(layer.down.in_features), hidden)
