"""Measures how long a call takes on its device, and what the device can do at best. Used by bench.py and tune.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

# Written between two runs on a GPU, so that none finds its inputs in the cache. Larger than any L2 so far.
_FLUSH_BYTES = 256 << 20


def median_seconds(call: Callable[[], object], device: torch.device, *, budget_s: float = 0.3) -> float:
    """Median over as many runs as fit in `budget_s`, at least 3, after one that does not count."""
    call()
    if device.type != "cuda":
        begun = time.perf_counter()
        times: list[float] = []
        while len(times) < 3 or time.perf_counter() - begun < budget_s:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    estimate = _events(call, flush, 3)
    return statistics.median(_events(call, flush, max(3, min(200, int(budget_s / statistics.median(estimate))))))


def _events(call: Callable[[], object], flush: torch.Tensor, runs: int) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for begin, end in pairs:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(flush.device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written a second by a large copy."""
    size = (1 << 30) if device.type == "cuda" else (128 << 20)
    source, target = (torch.empty(size, dtype=torch.int8, device=device) for _ in range(2))
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def matmul_flop_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Of a square product that is large for the device."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b, device)
