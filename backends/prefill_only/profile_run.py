"""Times a few passes before the first request: they warm everything up and say how long jobs will take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backends.prefill_only.decoder import Decoder
from backends.prefill_only.direct import DirectPass, probe_job
from backends.prefill_only.readout import LmHead

__all__ = ["Profile", "Sample", "choose_chunk_rows", "profile_run"]

Sample = tuple[int, int, float]  # new tokens, cached tokens before them, seconds

_LENGTHS = (16, 64, 160, 384, 768, 1536, 3072)
_STEP_GOAL_S = 0.02  # of one chunk of rows in one layer: what a newcomer waits at most, with room for attention
_LEAST_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Profile:
    samples: list[Sample]
    longest_step_s: float


def choose_chunk_rows(decoder: Decoder, head: LmHead | None) -> int:
    """Halves the decoder's chunk until one of its steps is short enough to preempt at. Sets and returns it."""
    while decoder.chunk_rows > _LEAST_CHUNK_ROWS:
        rows = min(decoder.chunk_rows, decoder.max_positions)
        steps = []
        for _ in range(2):
            direct = DirectPass(decoder, head, [probe_job(decoder, head, rows, seed=rows)])
            seconds = direct.run()
            steps.append(seconds / decoder.spec.num_layers)
        if min(steps) <= _STEP_GOAL_S:
            break
        decoder.chunk_rows //= 2
    return decoder.chunk_rows


def profile_run(
    decoder: Decoder,
    head: LmHead | None,
    *,
    longest: int,
    budget_s: float,
    report: Callable[[float, str], None],
) -> Profile:
    """Passes of growing length, each as often as ``budget_s`` allows (once to three times), the last with a cached
    prefix where the pool has room for one."""
    samples: list[Sample] = []
    longest_step = 0.0
    shapes = [(n, 0) for n in _LENGTHS if n <= longest]
    cached_blocks = min(2048, longest // 2) // decoder.kv.page_tokens
    if 0 < cached_blocks <= decoder.kv.pool_pages:
        shapes += [(64, cached_blocks), (384, cached_blocks)]
    spent = 0.0
    for i, (new, blocks) in enumerate(shapes):
        cached = blocks * decoder.kv.page_tokens
        if new + cached > longest:
            continue
        times: list[float] = []
        while len(times) < 3:
            direct = DirectPass(decoder, head, [probe_job(decoder, head, new + cached, seed=i)], blocks)
            times.append(direct.run())
            longest_step = max(longest_step, direct.longest_step_s)
            spent += times[-1]
            if times[-1] > budget_s / 10:
                break
        # The least: neighbours and first touches only ever add.
        samples.append((new, cached, min(times)))
        report((i + 1) / len(shapes), "profile run")
        if spent > budget_s:
            break
    return Profile(samples, longest_step)
