"""The profile run: enough samples whatever the budget, and a fit that predicts."""

from __future__ import annotations

import pytest
import torch

from backends.prefill_only.profile_run import choose_chunk_rows, profile_run
from backends.prefill_only.warm_up import warm_up
from scheduler.job_time import JobTimeModel
from tests.backends.prefill_only.tiny import tiny_decoder


@pytest.mark.parametrize("budget_s", [0.0, 60.0])
def test_a_spent_budget_leaves_enough_to_fit(budget_s: float) -> None:
    decoder, head = tiny_decoder(pool_pages=64)
    with torch.inference_mode():
        profile = profile_run(decoder, head, longest=2048, budget_s=budget_s, report=lambda *_: None)
    shapes = {(new, cached) for new, cached, _ in profile.samples}
    assert profile.complete == (budget_s > 0)
    assert len(shapes) >= 3 and max(new for new, _ in shapes) >= 700
    assert any(cached for _, cached in shapes) == profile.complete
    times = JobTimeModel()
    times.fit(profile.samples)
    assert times.predict(2000, 0) > times.predict(20, 0) > 0


def test_without_a_head_or_a_pool() -> None:
    decoder, _ = tiny_decoder(pool_pages=0)
    with torch.inference_mode():
        warm_up(decoder, None)
        assert choose_chunk_rows(decoder, None) == 64
        profile = profile_run(decoder, None, longest=100, budget_s=60.0, report=lambda *_: None)
    assert {(new, cached) for new, cached, _ in profile.samples} == {(16, 0), (64, 0)}
    assert decoder.kv.free_scratch_pages == decoder.kv.scratch_pages
