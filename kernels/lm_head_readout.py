"""Hidden rows × vocabulary, reduced to what was asked without ever holding all logits.

It does not sample, apply temperature or format anything; it returns raw numbers for a caller that does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.dispatch import use_native, use_triton
from kernels.padded_linear import ROW_MULTIPLE, padded_linear


class Readout(NamedTuple):
    """What `lm_head_readout` returns, for n rows; fields that were not asked for are None."""

    lse: torch.Tensor  # [n] fp32: log Σ_v exp(logit); log-probability of v = logit − lse
    target_logit: torch.Tensor | None  # [n] fp32
    target_rank: torch.Tensor | None  # [n] int64, 1 + number of strictly greater logits
    top_values: torch.Tensor | None  # [n, k] fp32, descending
    top_ids: torch.Tensor | None  # [n, k] int64
    named_logits: torch.Tensor | None  # [n, m] fp32


#: Bytes of logits that an implementation holds at a time.
WORKSPACE_BYTES = 64 << 20
_REDUCED_ROWS = 32
MAX_TOP_K = 1024


def lm_head_readout(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    targets: torch.Tensor | None = None,
    top_k: int = 0,
    bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    scale: float = 1.0,
    named_ids: torch.Tensor | None = None,
) -> Readout:
    """logit[i, v] = cap(scale · hidden[i] · weight[v]) + bias[v], or −inf where allowed[v] is false; then reductions.

    cap(x) = soft_cap · tanh(x / soft_cap) if `soft_cap` > 0 (Gemma 2).

    hidden    [n, H]  bf16, fp16 or fp32
    weight    [V, H]  same dtype
    targets   [n]     int64: their logit and rank come back
    top_k             0 … min(V, 1024) largest logits, ties by lower id on a GPU and in torch's order on a CPU
    bias      [V]     fp32
    allowed   [V]     bool
    named_ids [n, m]  int64: their logits come back, whatever their rank

    Rows are independent: a row's numbers do not depend on the others. Beyond the answer, the torch version holds about
    `WORKSPACE_BYTES`; on a GPU it is a few numbers a row and tile of the vocabulary, and `WORKSPACE_BYTES` for a top-k.

    Errors: ValueError if shapes do not fit. Ids outside the vocabulary are an error on a CPU and undefined on a GPU.
    Source: the chunked cross entropy of Liger-Kernel and Wijmans et al., Cut Your Losses (2024).
    """
    rows, vocab = hidden.shape[0], weight.shape[0]
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} does not fit weight {tuple(weight.shape)}")
    if not 0 <= top_k <= min(vocab, MAX_TOP_K):
        raise ValueError(f"top_k must be from 0 to {min(vocab, MAX_TOP_K)}, got {top_k}")
    if (targets is not None and targets.shape != (rows,)) or (named_ids is not None and named_ids.shape[0] != rows):
        raise ValueError(f"targets must be [{rows}] and named_ids [{rows}, m]")
    if (bias is not None and bias.shape != (vocab,)) or (allowed is not None and allowed.shape != (vocab,)):
        raise ValueError(f"bias and allowed must be [{vocab}]")
    if rows and use_triton("lm_head_readout", hidden):
        from kernels import triton_lm_head as implementation

        return implementation.lm_head_readout(
            hidden, weight, targets=targets, top_k=top_k, bias=bias, allowed=allowed,
            soft_cap=soft_cap, scale=scale, named_ids=named_ids,
        )  # fmt: skip
    return lm_head_readout_torch(
        hidden, weight, targets=targets, top_k=top_k, bias=bias, allowed=allowed,
        soft_cap=soft_cap, scale=scale, named_ids=named_ids,
    )  # fmt: skip


def lm_head_readout_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    targets: torch.Tensor | None = None,
    top_k: int = 0,
    bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    scale: float = 1.0,
    named_ids: torch.Tensor | None = None,
) -> Readout:
    """`lm_head_readout` in torch, over chunks of rows: the reference and the CPU path."""
    rows, vocab, device = hidden.shape[0], weight.shape[0], hidden.device
    result = empty_readout(rows, top_k, targets, named_ids, device)
    chunk = max(ROW_MULTIPLE, WORKSPACE_BYTES // (4 * vocab) // ROW_MULTIPLE * ROW_MULTIPLE)
    for start in range(0, rows, chunk):
        products = head_logits(hidden[start : start + chunk], weight)
        # A few rows at a time: their fp32 logits stay in memory that is warm.
        for first in range(start, min(start + chunk, rows), _REDUCED_ROWS):
            part = slice(first, min(first + _REDUCED_ROWS, start + chunk, rows))
            logits = products[part.start - start : part.stop - start].float()
            if scale != 1.0:
                logits = logits * scale
            if soft_cap:
                logits = torch.tanh(logits / soft_cap) * soft_cap
            if bias is not None:
                logits = logits + bias
            if allowed is not None:
                logits = logits.masked_fill(~allowed, float("-inf"))
            # A row by itself torch would add up in parts, one a thread; beside a copy it has the bits of company.
            beside = logits if len(logits) > 1 else logits.expand(2, -1)
            result.lse[part] = torch.logsumexp(beside, -1)[: len(logits)]
            if targets is not None and result.target_logit is not None and result.target_rank is not None:
                picked = logits.gather(1, targets[part, None])
                result.target_logit[part] = picked[:, 0]
                # A sum of booleans is several times as fast in 32 bits.
                result.target_rank[part] = (logits > picked).sum(-1, dtype=torch.int32) + 1
            if result.top_values is not None and result.top_ids is not None:
                result.top_values[part], result.top_ids[part] = torch.topk(logits, top_k, dim=-1)
            if named_ids is not None and result.named_logits is not None:
                result.named_logits[part] = logits.gather(1, named_ids[part])
    return result


def head_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden[n, H] · weight[V, H]ᵀ, [n, V], a row as it is alone; fp32 where the C++ kernel runs, else hidden's dtype.

    The C++ kernel takes for a few rows as long as reading the weight takes; torch computes 16 at least.
    """
    native = use_native("linear", hidden)
    if native is not None and weight.dtype == hidden.dtype and hidden.shape[1] % native.LINEAR_MULTIPLE == 0:
        logits: torch.Tensor = native.linear(hidden, weight)
        return logits
    return padded_linear(hidden, weight)


def empty_readout(
    rows: int, top_k: int, targets: torch.Tensor | None, named_ids: torch.Tensor | None, device: torch.device
) -> Readout:
    """A `Readout` of unset tensors of the right shapes."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Readout(
        lse=empty(rows),
        target_logit=None if targets is None else empty(rows),
        target_rank=None if targets is None else empty(rows, dtype=torch.int64),
        top_values=empty(rows, top_k) if top_k else None,
        top_ids=empty(rows, top_k, dtype=torch.int64) if top_k else None,
        named_logits=None if named_ids is None else empty(rows, named_ids.shape[1]),
    )
