"""``python -m kernels.cpu.bench [threads]``: the C++ kernels beside torch, in the shapes of a 135M and an 8B model.

On one thread the clock is that thread's processor time, so that other work on the machine disturbs less.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.attention import attention_torch
from kernels.cpu import native
from kernels.gated_act import gated_act_torch
from kernels.kv_write import kv_write_torch
from kernels.padded_linear import padded_linear
from kernels.rms_norm import rms_norm_torch
from kernels.rope import rope_torch_

_SECONDS = 0.4  # of each measurement, at least three runs
_MODELS = ((9, 3, 64), (32, 8, 128))  # heads, kv heads, head_dim
_SEGMENTS = {  # (cached, new) tokens of each
    "128": [(0, 128)],
    "16 × 128": [(0, 128)] * 16,
    "512": [(0, 512)],
    "2048": [(0, 2048)],
    "512 after 7680": [(7680, 512)],
    "150 after 2048": [(2048, 150)],
    "1 after 2048": [(2048, 1)],
}


def best_us(run: Callable[[], object]) -> float:
    """Microseconds of the fastest run."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    best, runs, end = float("inf"), 0, time.monotonic() + _SECONDS
    while runs < 3 or time.monotonic() < end:
        start = clock()
        run()
        best, runs = min(best, clock() - start), runs + 1
    return best * 1e6


def bench_attention() -> None:
    for heads, kv_heads, head_dim in _MODELS:
        for name, segments in _SEGMENTS.items():
            pages = [-(-(cached + new) // 16) for cached, new in segments]
            table = torch.zeros(len(segments), max(pages), dtype=torch.int32)
            for i, count in enumerate(pages):
                table[i, :count] = torch.arange(count) + sum(pages[:i])
            rows = torch.tensor([0, *(new for _, new in segments)]).cumsum(0).int()
            start = torch.tensor([cached for cached, _ in segments], dtype=torch.int32)
            q = torch.randn(int(rows[-1]), heads, head_dim).bfloat16()
            pools = [torch.randn(sum(pages), 16, kv_heads, head_dim).bfloat16() for _ in range(2)]
            tensors = (q, *pools, table, rows, start)
            options: dict[str, Any] = {"scale": head_dim**-0.5, "out": torch.empty_like(q)}
            ours = best_us(partial(native.attention, *tensors, max_q=0, **options))
            torchs = best_us(partial(attention_torch, *tensors, **options))
            flop = sum(4 * head_dim * heads * new * (cached + (new + 1) / 2) for cached, new in segments)
            rates = [f"{us:9.0f} us {flop / us / 1e3:5.0f} GFLOP/s" for us in (ours, torchs)]
            print(f"attention {heads}/{kv_heads} heads of {head_dim:3}, {name:14} {rates[0]}   torch {rates[1]}")


def bench_elementwise() -> None:
    n = 512
    gate_up, activated = torch.randn(n, 3072).bfloat16(), torch.empty(n, 1536, dtype=torch.bfloat16)
    x, weight = torch.randn(n, 576).bfloat16(), torch.randn(576).bfloat16()
    normed = torch.empty_like(x)
    q, k, v = torch.randn(n, 15, 64).bfloat16().split([9, 3, 3], 1)
    turn = (torch.rand(n, 32), torch.rand(n, 32), torch.arange(n))
    tables: dict[str, Any] = dict(zip(("cos", "sin", "positions"), turn, strict=True))
    kv: Any = (k, v, *(torch.zeros(n // 16, 16, 3, 64).bfloat16() for _ in range(2)), torch.arange(n))
    head = torch.randn(49152, 576).bfloat16()
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "gated_act 512 × 1536": (
            partial(native.gated_act, gate_up, kind="silu", out=activated),
            partial(gated_act_torch, gate_up, out=activated),
        ),
        "rms_norm 512 × 576": (
            partial(native.rms_norm, x, weight, 1e-6, out=normed),
            partial(rms_norm_torch, x, weight, 1e-6, out=normed),
        ),
        "rope 512 × 9 × 64": (partial(native.rope_, q, *turn), partial(rope_torch_, q, *turn)),
        "kv_write 512 × 3 × 64": (
            partial(native.rope_kv_write, *kv, **tables),
            partial(kv_write_torch, *kv, **tables),
        ),
    }
    for rows in (1, 16, 64):
        part = x[:rows]
        cases[f"head {rows} × 576 → 49152"] = (partial(native.linear, part, head), partial(padded_linear, part, head))
    for name, (ours, torchs) in cases.items():
        print(f"{name:45} {best_us(ours):9.0f} us                 torch {best_us(torchs):9.0f} us")


def bench_linear() -> None:
    x, weight = torch.randn(512, 576).bfloat16(), torch.randn(3072, 576).bfloat16()
    out = torch.empty(512, 3072, dtype=torch.bfloat16)
    us = best_us(partial(torch.mm, x, weight.t(), out=out))
    print(f"for comparison, torch.mm 512 × 576 → 3072 {us:13.0f} us {2 * 512 * 576 * 3072 / us / 1e3:5.0f} GFLOP/s")


def main() -> None:
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    print(f"{native.describe()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with torch.inference_mode():
        bench_linear()
        bench_attention()
        bench_elementwise()


if __name__ == "__main__":
    main()
