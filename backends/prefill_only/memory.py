"""How memory is divided, and the longest prompt that follows from it.

A pass of T rows needs ``T · (hidden + 2 · kv_heads · head_dim)`` elements: its hidden rows and one layer's K and V.
Everything else (weights, chunk workspace, a chunk of logits, the prefix pool) does not depend on T.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.readout import ROWS_AT_ONCE

__all__ = [
    "CHUNK_ROWS_CPU", "CHUNK_ROWS_GPU", "PAGE_TOKENS", "MemoryPlan", "chunk_bytes", "free_bytes",
    "pass_bytes_per_token", "plan_memory", "pool_bytes_per_token", "workspace_bytes",
]  # fmt: skip

PAGE_TOKENS = 32
CHUNK_ROWS_CPU, CHUNK_ROWS_GPU = 512, 2048  # at most; on a slow device fewer, see profile_run
_POOL_SHARE = 0.35  # of the free memory, where ONEPASS_KV_CACHE_BYTES does not say
_POOL_MAX_BYTES_CPU = 4 << 30  # a server's RAM is shared with its neighbours
_MARGIN = 0.10  # of the free memory, left alone
_IN_FLIGHT_PROMPTS = 4  # longest prompts' worth of rows that may run or be parked at once


def pass_bytes_per_token(spec: ModelSpec, element_bytes: int) -> int:
    return (spec.hidden_size + 2 * spec.num_kv_heads * spec.head_dim) * element_bytes


def chunk_bytes(spec: ModelSpec, chunk_rows: int, element_bytes: int) -> int:
    """Of the decoder's workspace for a chunk of rows; does not grow with a pass's."""
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return chunk_rows * element_bytes * (3 * spec.intermediate_size + 2 * spec.hidden_size + attention)


def workspace_bytes(spec: ModelSpec, chunk_rows: int, element_bytes: int) -> int:
    """Of a chunk, and of the logits that are read at once with what reductions over them take."""
    return chunk_bytes(spec, chunk_rows, element_bytes) + ROWS_AT_ONCE * spec.vocab_size * 12


def pool_bytes_per_token(spec: ModelSpec, element_bytes: int) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    free_bytes: int  # before any of the below
    pool_pages: int
    scratch_pages: int
    max_model_len: int  # longest prompt in tokens
    limited_by: str  # what set it: "model", "memory" or "setting"


def plan_memory(
    spec: ModelSpec,
    *,
    element_bytes: int,
    free: int,
    workspace_bytes: int,
    kv_cache_bytes: int | None,
    max_model_len: int | None,
    on_cpu: bool,
) -> MemoryPlan:
    """Divides ``free`` bytes. Raises MemoryError when not even one page fits."""
    usable = int(free * (1 - _MARGIN)) - workspace_bytes
    page_pool_bytes = PAGE_TOKENS * pool_bytes_per_token(spec, element_bytes)
    page_pass_bytes = PAGE_TOKENS * pass_bytes_per_token(spec, element_bytes)
    if kv_cache_bytes is not None:
        pool_bytes = kv_cache_bytes
        if pool_bytes + page_pass_bytes > usable:
            raise MemoryError(
                f"ONEPASS_KV_CACHE_BYTES={kv_cache_bytes} leaves no room for a pass: {max(usable, 0)} bytes are usable"
            )
    else:
        pool_bytes = min(int(usable * _POOL_SHARE), _POOL_MAX_BYTES_CPU if on_cpu else usable)
        # A long prompt comes before the pool: what cannot be cached is slower, what does not fit is refused.
        wanted = min(spec.max_position, max_model_len or spec.max_position)
        pool_bytes = max(0, min(pool_bytes, usable - wanted * pass_bytes_per_token(spec, element_bytes)))
    rows_pages = (usable - pool_bytes) // page_pass_bytes
    if rows_pages < 1:
        raise MemoryError(f"no room for a pass: {max(usable, 0)} bytes are usable after weights and workspace")
    limits = {"model": spec.max_position, "memory": rows_pages * PAGE_TOKENS}
    if max_model_len is not None:
        limits["setting"] = max_model_len
    limited_by = min(limits, key=lambda name: limits[name])
    longest = limits[limited_by]
    most_pages = _IN_FLIGHT_PROMPTS * (-(-longest // PAGE_TOKENS)) + 1024
    return MemoryPlan(
        free_bytes=free,
        pool_pages=pool_bytes // page_pool_bytes,
        scratch_pages=min(rows_pages, most_pages),
        max_model_len=longest,
        limited_by=limited_by,
    )


def free_bytes(device: torch.device) -> int:
    """Memory that this process could still take on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    candidates = [_available_ram()]
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int(Path(limit_file).read_text())
            candidates.append(max(0, limit - int(Path(usage_file).read_text())))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return min(candidates)


def _available_ram() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
