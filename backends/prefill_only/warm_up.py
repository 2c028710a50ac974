"""Pays before the first request for what is done at the first call of a shape.

On a GPU that is compiling kernels. A CPU's matrix products are prepared for each row count, and a pass may have any
multiple of ``ROW_ALIGN`` up to the chunk.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backends.prefill_only.decoder import Decoder
from backends.prefill_only.direct import probe_job, run_directly
from backends.prefill_only.models.quantized_linear import QuantizedLinear
from backends.prefill_only.readout import LmHead
from backends.prefill_only.rows import ROW_ALIGN
from kernels.warmup import warm_up as compile_kernels

__all__ = ["warm_up"]

_LENGTHS = (1, 40, 200)  # and one of three chunks, if that is not longer than
_LONGEST = 1000


def warm_up(decoder: Decoder, head: LmHead | None) -> None:
    if decoder.device.type == "cpu":
        _linears(decoder)
    else:
        _kernels(decoder)
    for length in (*_LENGTHS, min(_LONGEST, 2 * decoder.chunk_rows + 40)):
        job = probe_job(decoder, head, length, seed=length)
        if head is not None:
            job.readout = replace(job.readout, prompt_logprobs=1)
        run_directly(decoder, head, [job])


def _kernels(decoder: Decoder) -> None:
    quantised: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    biases = False
    for layer in decoder.weights.layers:
        biases = biases or layer.experts_gate_up_bias is not None
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            if isinstance(linear, QuantizedLinear):
                quantised[tuple(linear.weight.shape)] = (linear.weight, linear.scale)
    compile_kernels(decoder.spec, decoder.kv.k[:1], expert_biases=biases, quantised=quantised.values())


def _linears(decoder: Decoder) -> None:
    """Of the first layer, at every row count; layers are alike, but for the last one's queries apart from its keys."""
    spec, layer, last = decoder.spec, decoder.weights.layers[0], decoder.weights.layers[-1].qkv
    q = spec.q_size
    queries, keys_values = last.rows(0, q), last.rows(q, last.out_features)
    for rows in range(ROW_ALIGN, decoder.chunk_rows + 1, ROW_ALIGN):

        def zeros(columns: int, rows: int = rows) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=decoder.dtype, device=decoder.device)

        hidden = zeros(spec.hidden_size)
        layer.qkv(hidden, out=zeros(layer.qkv.out_features))
        queries(hidden)
        keys_values(hidden)
        layer.o.add_(zeros(q), hidden)
        if layer.gate_up is not None and layer.down is not None:
            layer.gate_up(hidden, out=zeros(layer.gate_up.out_features))
            layer.down.add_(zeros(layer.down.in_features), hidden)
