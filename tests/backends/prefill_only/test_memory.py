"""How memory is divided: the longest prompt, and who limits it."""

from __future__ import annotations

import pytest
import torch

from backends.prefill_only.memory import (
    PAGE_TOKENS,
    MemoryPlan,
    free_bytes,
    pass_bytes_per_token,
    plan_memory,
    pool_bytes_per_token,
)
from tests.backends.prefill_only.tiny import TINY

PASS = pass_bytes_per_token(TINY, 2)  # (128 + 2 · 2 · 64) · 2
POOL = pool_bytes_per_token(TINY, 2)


def plan(free: int, **more: object) -> MemoryPlan:
    options: dict[str, object] = {"kv_cache_bytes": None, "max_model_len": None, "on_cpu": False, **more}
    return plan_memory(TINY, element_bytes=2, free=free, workspace_bytes=1000, **options)  # type: ignore[arg-type]


def test_bytes_of_a_token() -> None:
    assert PASS == (128 + 2 * 2 * 64) * 2
    assert POOL == 2 * 3 * 2 * 64 * 2


@pytest.mark.parametrize("tokens", [64, 1000, 5000, 100_000])
def test_what_is_planned_fits(tokens: int) -> None:
    free = tokens * PASS
    found = plan(free)
    used = found.pool_pages * PAGE_TOKENS * POOL + -(-found.max_model_len // PAGE_TOKENS) * PAGE_TOKENS * PASS
    assert used + 1000 <= free
    assert found.limited_by == ("memory" if found.max_model_len < TINY.max_position else "model")
    assert found.scratch_pages * PAGE_TOKENS >= found.max_model_len


def test_a_long_prompt_comes_before_the_pool() -> None:
    needed = TINY.max_position * PASS
    assert plan(int((needed + 2000) / 0.9) + PAGE_TOKENS * POOL).max_model_len == TINY.max_position
    assert plan(10 * needed).pool_pages > 0


def test_settings_are_kept() -> None:
    found = plan(1 << 30, kv_cache_bytes=100 * PAGE_TOKENS * POOL, max_model_len=500)
    assert (found.pool_pages, found.max_model_len, found.limited_by) == (100, 500, "setting")
    assert plan(1 << 30, kv_cache_bytes=0).pool_pages == 0
    with pytest.raises(MemoryError, match="ONEPASS_KV_CACHE_BYTES"):
        plan(1 << 20, kv_cache_bytes=1 << 20)
    with pytest.raises(MemoryError, match="no room"):
        plan(5000)


def test_this_machine_has_memory_left() -> None:
    assert 1 << 20 < free_bytes(torch.device("cpu")) < 1 << 50
