"""Compiles all kernels in a process of its own and writes what came out as JSON: `python -m … FILE`.

A process interprets kernels or compiles them, never both; the test session interprets. What `report` holds are the rows
of kernels.report; `warm` and `requested` are the kernels that warm-up and requests ask for, by hash; `counted` is what
the counter of late compilations saw of two requests and one foreign kernel, launched twice.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import dispatch, report, warmup
from kernels.attention import attention
from kernels.compile_only import compile_only
from kernels.gated_act import gated_act
from kernels.kv_write import kv_write
from kernels.lm_head_readout import lm_head_readout
from kernels.moe_grouped_gemm import moe_grouped_gemm, sort_by_expert
from kernels.rms_norm import rms_norm
from kernels.rope import rope_

_OPS = ("attention", "gated_act", "kv_write", "lm_head_readout", "moe_grouped_gemm", "rms_norm", "rope")


@dataclass(frozen=True)
class Rope:
    rotary_dim: int = 64
    interleaved: bool = False


@dataclass(frozen=True)
class Layer:
    window: int = 0
    rope: int = 0
    sinks: bool = False
    moe: bool = False


@dataclass(frozen=True)
class Experts:
    num_experts: int = 4
    top_k: int = 2
    intermediate_size: int = 96
    activation: str = "silu"


@dataclass(frozen=True)
class Model:
    hidden_size: int = 192
    intermediate_size: int = 320
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 64
    vocab_size: int = 1000
    layers: tuple[Layer, ...] = (Layer(), Layer(window=20), Layer(moe=True))
    ropes: tuple[Rope, ...] = (Rope(),)
    activation: str = "silu"
    attn_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    qk_norm: bool = True
    moe: Experts = Experts()


def request(model: Model, pages: torch.Tensor, rows: int, segments: int, position: int, window: int) -> None:
    """What one chunk of a pass launches; numbers that differ from call to call are arguments. All is zero."""

    def zeros(*shape: int, dtype: torch.dtype = pages.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=pages.device)

    norm, head_norm = zeros(model.hidden_size), zeros(model.head_dim)
    hidden = zeros(rows + 16, model.hidden_size)[16:]
    rms_norm(hidden, norm, 1e-6, out=zeros(64, model.hidden_size)[:rows])
    fused = zeros(rows, 5 * model.head_dim).unflatten(1, (-1, model.head_dim))
    positions = zeros(rows + 1, dtype=torch.int32)[1:]
    table = zeros(8192, 32, dtype=torch.float32)
    slots = zeros(rows + 3, dtype=torch.int64)[3:] - 1
    kv_write(fused[:, 3:4], fused[:, 4:], pages, pages, slots, cos=table, sin=table, positions=positions)
    rms_norm(fused[:, 3:4], head_norm, 1e-6)
    index = zeros(segments + 1, dtype=torch.int32)
    for q in (fused[:, :3], zeros(rows, 3, model.head_dim)):
        rms_norm(q, head_norm, 1e-6)
        rope_(q, table, table, positions)
        attention(
            q, pages, pages, zeros(segments, position // 16 + 1, dtype=torch.int32), index, index[1:], scale=0.3,
            max_q=rows, window=window, out=zeros(64, 3 * model.head_dim)[:rows].unflatten(1, (3, -1)),
        )  # fmt: skip
    gated_act(zeros(rows, 2 * model.intermediate_size))
    pairs = sort_by_expert(zeros(rows, 2, dtype=torch.int64), 4)
    up = moe_grouped_gemm(hidden, zeros(4, 192, model.hidden_size), pairs.offsets, row_ids=pairs.row_ids)
    shares = zeros(2 * rows, dtype=torch.float32)
    moe_grouped_gemm(gated_act(up), zeros(4, model.hidden_size, 96), pairs.offsets, row_scale=shares)
    targets = zeros(rows, dtype=torch.int64)
    for top_k in (0, 5, 20):
        lm_head_readout(hidden, zeros(model.vocab_size, model.hidden_size), targets=targets, top_k=top_k)


def main() -> None:
    rows = list(report.compile_all())
    # The public functions would choose torch for the CPU tensors that stand in for a device's.
    for op in _OPS:
        importlib.import_module(f"kernels.{op}").use_triton = lambda *_: True
    assert dispatch.triton_missing() is None
    model, pages = Model(), torch.zeros(3, 16, 1, 64, dtype=torch.bfloat16)
    with compile_only(90) as warm:
        warmup.launch_all(model, pages)
    with compile_only(90) as requested:
        for count, segments, position, window in ((1, 1, 0, 0), (16, 2, 16, 20), (48, 1, 5000, 20), (33, 33, 1, 0)):
            request(model, pages, count, segments, position, window)
    # Counted from here on: what was compiled before, or lies in the cache on disk, is not.
    os.environ["TRITON_CACHE_DIR"] = str(Path(sys.argv[1]).with_suffix(".cache"))
    dispatch.count_compilations(torch.device("cuda"))
    with compile_only(90):
        for _ in range(2):
            request(model, pages, 16, 1, 0, 0)
            rms_norm(torch.zeros(2, 200), torch.zeros(200), 1e-6)
    Path(sys.argv[1]).write_text(
        json.dumps(
            {
                "report": [row._asdict() | {"facts": row.facts._asdict()} for row in rows],
                "counted": dispatch.compilation_counts,
                "warm": [[kernel.metadata.name, kernel.hash] for kernel in warm],
                "requested": [[kernel.metadata.name, kernel.hash] for kernel in requested],
            }
        )
    )


if __name__ == "__main__":
    main()
