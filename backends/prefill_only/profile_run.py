"""Times a few passes before the first request: they warm everything up and say how long jobs will take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.prefill_only.decoder import Decoder
from backends.prefill_only.direct import DirectPass, probe_job
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.readout import LmHead

__all__ = ["Profile", "Sample", "choose_chunk_rows", "estimate", "profile_run"]

Sample = tuple[int, int, float]  # new tokens, cached tokens before them, seconds

# What says most comes first: a slow or busy machine does not get to the rest.
_LENGTHS = (768, 16, 160, 1536, 64, 384, 3072)
_LEAST_SHAPES = 3
_STEP_GOAL_S = 0.02  # of one chunk of rows in one layer: what a newcomer waits at most, with room for attention
_LEAST_CHUNK_ROWS = 64
_STEPS_TIMED = 4  # to choose the chunk: layers are alike


@dataclass(frozen=True, slots=True)
class Profile:
    samples: list[Sample]
    estimates: list[Sample]  # of the shapes that there was no time for, from those that there was
    longest_step_s: float
    complete: bool  # every kind of shape was measured: worth keeping for the next start


def choose_chunk_rows(decoder: Decoder, head: LmHead | None) -> int:
    """Halves the decoder's chunk until one of its steps is short enough to preempt at. Sets and returns it."""
    while decoder.chunk_rows > _LEAST_CHUNK_ROWS:
        rows = min(decoder.chunk_rows, decoder.max_positions)
        timed = min(_STEPS_TIMED, decoder.spec.num_layers)
        job = probe_job(decoder, head, rows, seed=rows)
        if min(DirectPass(decoder, head, [job]).run(timed) for _ in range(2)) / timed <= _STEP_GOAL_S:
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
    """Passes of several lengths, each once to three times, some behind a cached prefix where the pool has room for one.
    Leaves out what would exceed ``budget_s``, once there is enough to tell a fixed cost from one by length."""
    samples: list[Sample] = []
    longest_step = 0.0
    shapes = [(n, 0) for n in _LENGTHS if n <= longest]
    cached_blocks = min(2048, longest // 2) // decoder.kv.page_tokens
    if 0 < cached_blocks <= decoder.kv.pool_pages:
        shapes += [(new, cached_blocks) for new in (64, 384) if new + cached_blocks * decoder.kv.page_tokens <= longest]
    spent = 0.0
    for i, (new, blocks) in enumerate(shapes):
        if len(samples) >= _LEAST_SHAPES:
            fastest = min(seconds / tokens for tokens, _, seconds in samples)
            if spent + fastest * new > budget_s:
                continue
        cached = blocks * decoder.kv.page_tokens
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
    measured = {(new, cached) for new, cached, _ in samples}
    left_out = {(new, blocks * decoder.kv.page_tokens) for new, blocks in shapes} - measured
    estimates = estimate(samples, sorted(left_out), decoder.spec)
    complete = any(cached for _, cached in measured) or not any(cached for _, cached in left_out)
    return Profile(samples, estimates, longest_step, complete)


def estimate(samples: Sequence[Sample], shapes: Sequence[tuple[int, int]], spec: ModelSpec) -> list[Sample]:
    """``shapes`` with the seconds they take if time goes by multiplications, as in the shortest and longest sample.

    A fit to a few short passes could call any growth quadratic, and long prompts impossible.
    """
    if not shapes or len(samples) < 2:
        return []

    def work(new: int, cached: int) -> float:
        return new * spec.linear_multiplications + new * (cached + new / 2) * spec.pair_multiplications

    (least, low_s), *_, (most, high_s) = sorted((work(new, cached), seconds) for new, cached, seconds in samples)
    slope = max(0.0, (high_s - low_s) / (most - least))
    return [(new, cached, high_s + slope * (work(new, cached) - most)) for new, cached in shapes]
