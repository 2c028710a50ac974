"""The profile run: enough samples whatever the budget, and a fit that predicts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backends.prefill_only.profile_run import choose_chunk_rows, estimate, profile_run
from backends.prefill_only.warm_up import warm_up
from scheduler.job_time import JobTimeModel
from tests.backends.prefill_only.tiny import TINY, tiny_decoder


@pytest.mark.parametrize("budget_s", [0.0, 60.0])
def test_a_spent_budget_leaves_enough_to_fit(budget_s: float) -> None:
    decoder, head = tiny_decoder(pool_pages=64)
    with torch.inference_mode():
        profile = profile_run(decoder, head, longest=2048, budget_s=budget_s, report=lambda *_: None)
    shapes = {(new, cached) for new, cached, _ in profile.samples}
    assert profile.complete == (budget_s > 0) == (not profile.estimates)
    assert len(shapes) >= 3 and max(new for new, _ in shapes) >= 700
    assert any(cached for _, cached in shapes) == profile.complete
    times = JobTimeModel()
    times.fit([*profile.samples, *profile.estimates])
    assert times.predict(2000, 0) > times.predict(20, 0) > 0


def test_a_few_short_passes_do_not_make_long_ones_impossible() -> None:
    """Seen on a busy machine: a fit to these three alone gives 6.3 µs a pair, and 7,500 tokens would take 200 s."""
    samples = [(768, 0, 4.43), (16, 0, 0.152), (160, 0, 0.696)]
    spec = dataclasses.replace(
        TINY, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536,
        layers=TINY.layers[:1] * 30,
    )  # fmt: skip
    assert (spec.linear_multiplications, spec.pair_multiplications) == (106_168_320, 34_560)
    estimates = estimate(samples, [(1536, 0), (3072, 0), (64, 2048), (384, 2048)], spec)
    alone, helped = JobTimeModel(), JobTimeModel()
    alone.fit(samples)
    helped.fit([*samples, *estimates])
    assert alone.predict(7500, 0) > 190
    assert helped.predict(7500, 0) == pytest.approx(84, rel=0.1)
    assert helped.predict(768, 0) == pytest.approx(4.43, rel=0.15)


def test_without_a_head_or_a_pool() -> None:
    decoder, _ = tiny_decoder(pool_pages=0)
    with torch.inference_mode():
        warm_up(decoder, None)
        assert choose_chunk_rows(decoder, None) == 64
        profile = profile_run(decoder, None, longest=100, budget_s=60.0, report=lambda *_: None)
    assert {(new, cached) for new, cached, _ in profile.samples} == {(16, 0), (64, 0)}
    assert decoder.kv.free_scratch_pages == decoder.kv.scratch_pages
