"""Compiles what a model will launch, before anybody waits for it, by calling each op once as the model will.

Triton compiles a kernel for the dtypes, constants and alignment of its arguments, not for their values: row counts,
positions and table widths do not matter, strides and sizes do. A caller passes what the model is. On a CPU, where
nothing is compiled, nothing is done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from kernels.attention import attention
from kernels.fp8_linear import fp8_linear
from kernels.gated_act import Kind, gated_act
from kernels.int8_linear import int8_linear
from kernels.kv_write import kv_write
from kernels.lm_head_readout import lm_head_readout
from kernels.moe_grouped_gemm import moe_grouped_gemm
from kernels.rms_norm import rms_norm
from kernels.rope import rope_

logger = logging.getLogger(__name__)

_ROWS = 32


class Rope(Protocol):
    """One rotary embedding of a model."""

    @property
    def rotary_dim(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...


class Layer(Protocol):
    """What differs between a model's layers."""

    @property
    def window(self) -> int: ...
    @property
    def rope(self) -> int: ...
    @property
    def sinks(self) -> bool: ...
    @property
    def moe(self) -> bool: ...


class Experts(Protocol):
    """The experts of a mixture."""

    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def activation(self) -> Kind: ...


class Model(Protocol):
    """What a model says of itself, as far as its kernels depend on it. `rope` of a layer indexes `ropes`; −1: none."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def layers(self) -> Sequence[Layer]: ...
    @property
    def ropes(self) -> Sequence[Rope]: ...
    @property
    def activation(self) -> Kind: ...
    @property
    def attn_soft_cap(self) -> float: ...
    @property
    def final_soft_cap(self) -> float: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def moe(self) -> Experts | None: ...


def warm_up(
    model: Model,
    k_pages: torch.Tensor,
    *,
    expert_biases: bool = False,
    quantised: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
) -> float:
    """Launches every kernel variant of `model`; returns the seconds it took.

    k_pages   [P, page, Hkv, D]  the model's own pages, for their dtype, device and strides: one is enough; not written
    quantised (weight, scale)    8-bit linears of the model, one of each shape
    """
    if k_pages.device.type != "cuda":
        return 0.0
    begun = time.monotonic()
    launch_all(model, k_pages, expert_biases=expert_biases, quantised=quantised)
    torch.cuda.synchronize(k_pages.device)
    seconds = time.monotonic() - begun
    logger.info("kernels are warm after %.1f s", seconds)
    return seconds


def launch_all(
    model: Model,
    k_pages: torch.Tensor,
    *,
    expert_biases: bool = False,
    quantised: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
) -> None:
    """The calls of `warm_up`, on any device."""
    dtype, device = k_pages.dtype, k_pages.device

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    hidden, norm = zeros(_ROWS, model.hidden_size), zeros(model.hidden_size)
    rms_norm(hidden, norm, 1e-6, out=torch.empty_like(hidden))
    # Queries are a part of the fused projection's rows in most layers, rows of their own in the last.
    columns = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    fused = zeros(_ROWS, columns).unflatten(1, (-1, model.head_dim))
    alone = zeros(_ROWS, model.num_heads, model.head_dim)
    keys = zeros(_ROWS, 2 * model.num_kv_heads, model.head_dim)
    for queries in (fused[:, : model.num_heads], alone):
        _attention_ops(model, queries, k_pages)
    for k in (fused[:, model.num_heads : model.num_heads + model.num_kv_heads], keys[:, : model.num_kv_heads]):
        _key_ops(model, k, k_pages)
    if not all(layer.moe for layer in model.layers):
        gated_act(zeros(_ROWS, 2 * model.intermediate_size), kind=model.activation)
    if model.moe is not None:
        _expert_ops(model.moe, hidden, expert_biases)
    for weight, scale in quantised:
        x = zeros(_ROWS, weight.shape[1])
        (int8_linear if weight.dtype == torch.int8 else fp8_linear)(x, weight, scale)
    # One row stands for all of a weight: no memory is taken that a full device would lack.
    head, targets = zeros(1, model.hidden_size).expand(model.vocab_size, -1), zeros(_ROWS, dtype=torch.int64)
    for top_k in (0, 1):
        lm_head_readout(hidden, head, targets=targets, top_k=top_k, soft_cap=model.final_soft_cap)


def _attention_ops(model: Model, q: torch.Tensor, k_pages: torch.Tensor) -> None:
    device = q.device
    if model.qk_norm:
        q = rms_norm(q, torch.zeros(model.head_dim, dtype=q.dtype, device=device), 1e-6)
    positions = torch.zeros(_ROWS, dtype=torch.int32, device=device)
    for rope in model.ropes:
        table = torch.zeros(1, rope.rotary_dim // 2, device=device)
        rope_(q, table, table, positions, interleaved=rope.interleaved)
    table, cu_q = positions[:1, None], torch.tensor([0, 1], dtype=torch.int32, device=device)
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    for window, with_sinks in sorted({(layer.window, layer.sinks) for layer in model.layers}):
        attention(
            q, k_pages, k_pages, table, cu_q, positions[:1], scale=1.0, max_q=1, window=window,
            soft_cap=model.attn_soft_cap, out=out,
            sinks=torch.zeros(model.num_heads, dtype=q.dtype, device=device) if with_sinks else None,
        )  # fmt: skip


def _key_ops(model: Model, k: torch.Tensor, k_pages: torch.Tensor) -> None:
    device = k.device
    if model.qk_norm:
        k = rms_norm(k, torch.zeros(model.head_dim, dtype=k.dtype, device=device), 1e-6)
    nowhere = torch.full((_ROWS,), -1, dtype=torch.int64, device=device)
    positions = torch.zeros(_ROWS, dtype=torch.int32, device=device)
    v = torch.empty(_ROWS, 2 * model.num_kv_heads, model.head_dim, dtype=k.dtype, device=device)[:, : k.shape[1]]
    for index in sorted({layer.rope for layer in model.layers}):
        if index < 0:
            kv_write(k, v, k_pages, k_pages, nowhere)
            continue
        rope = model.ropes[index]
        table = torch.zeros(1, rope.rotary_dim // 2, device=device)
        kv_write(
            k, v, k_pages, k_pages, nowhere, cos=table, sin=table, positions=positions, interleaved=rope.interleaved
        )


def _expert_ops(experts: Experts, hidden: torch.Tensor, biases: bool) -> None:
    device, dtype, size = hidden.device, hidden.dtype, hidden.shape[1]
    pairs = _ROWS * experts.top_k
    row_ids = torch.zeros(pairs, dtype=torch.int64, device=device)
    offsets = torch.full((experts.num_experts + 1,), pairs, dtype=torch.int32, device=device)
    offsets[0] = 0

    def product(x: torch.Tensor, channels: int, **options: torch.Tensor) -> torch.Tensor:
        weight = torch.zeros(1, x.shape[1], dtype=dtype, device=device).expand(experts.num_experts, channels, -1)
        bias = torch.zeros(experts.num_experts, channels, dtype=dtype, device=device) if biases else None
        return moe_grouped_gemm(x, weight, offsets, bias=bias, **options)

    gate_up = product(hidden, 2 * experts.intermediate_size, row_ids=row_ids)
    activated = gated_act(gate_up, kind=experts.activation)
    product(activated, size, row_scale=torch.zeros(pairs, device=device))
