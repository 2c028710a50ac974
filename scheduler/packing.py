"""Which waiting jobs join the head of the queue in one pass.

First those that share with it (its group, or an uncached prefix at least as long as what is left of them, which is
then computed once), then others in order, until the pass has the tokens at which the device is saturated: beyond that,
company makes a pass longer and saves nothing. A head that saturates the device by itself takes only jobs that share
with it.

Company delays the head. Its latency is what it has waited plus its own time; company may add ``delay_share`` of that.
Its own group is exempt: whoever asked wants all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.job import Job
from scheduler.job_time import JobTimeModel, Segment

__all__ = ["PackLimits", "pack", "segments_of"]

_SIBLING_MISSES = 8  # siblings that may not fit before the search among them ends


@dataclass(frozen=True, slots=True)
class PackLimits:
    saturation_tokens: int
    block_tokens: int
    delay_share: float = 0.5
    max_jobs: int = 256


def pack(
    head: Job,
    siblings: Iterable[Job],
    others: Iterable[Job],
    times: JobTimeModel,
    limits: PackLimits,
    now: float,
    stretch: float = 1.0,
) -> list[Job]:
    """``head`` and its company, in the order in which they were chosen. Deadlines must be met even if the pass takes
    ``stretch`` times what is predicted."""
    packed = _Pack(times, limits.block_tokens)
    packed.add(head, packed.segment(head))
    alone_s, head_tokens = packed.seconds, packed.tokens
    latest_s = now + alone_s + limits.delay_share * (max(0.0, now - head.arrival_s) + alone_s)

    def admit(candidates: Iterable[Job], most_tokens: int, misses: int, least_share: float) -> None:
        for job in candidates:
            if len(packed.jobs) >= limits.max_jobs or packed.tokens >= most_tokens:
                return
            if job.job_id in packed.ids:
                continue
            segment = packed.segment(job)
            kin = job.group == head.group
            if not kin and segment[1] - job.cached_blocks * limits.block_tokens < least_share * segment[0]:
                continue
            seconds = packed.seconds + packed.added_s(job, segment)
            in_time = now + seconds * stretch <= min(packed.deadline_s, _deadline(job))
            fits = packed.tokens + segment[0] <= most_tokens and in_time
            if fits and (now + seconds <= latest_s or kin):
                packed.add(job, segment)
            elif misses == 0:
                return
            else:
                misses -= 1

    ranked = sorted(siblings, key=lambda job: (job.group != head.group, job.key))
    admit(ranked, head_tokens + limits.saturation_tokens, _SIBLING_MISSES, 1.0)
    # Not one of the others may be passed over: whoever does not fit has the next turn, and waits for nobody behind it.
    admit(others, limits.saturation_tokens, 0, 0.0)
    return packed.jobs


def segments_of(jobs: Iterable[Job], block_tokens: int) -> list[Segment]:
    """What one pass over ``jobs`` computes, each shared uncached prefix once."""
    packed = _Pack(JobTimeModel(), block_tokens)
    for job in jobs:
        packed.add(job, packed.segment(job))
    return packed.segments


class _Pack:
    """A pass being put together. ``ids``, ``tokens`` and ``seconds`` are those of the jobs so far."""

    def __init__(self, times: JobTimeModel, block_tokens: int) -> None:
        self._times, self._block_tokens = times, block_tokens
        # Blocks computed by the pass, by where the cached part before them ends: jobs share what they compute only
        # if they begin at the same place.
        self._blocks: dict[int, set[bytes | int]] = {}
        self._parted = 0  # where the last job left what others compute: siblings leave it at the same place
        self.jobs: list[Job] = []
        self.ids: set[int] = set()
        self.segments: list[Segment] = []
        self.tokens = 0
        self.seconds = times.predict_many([])
        self.deadline_s = math.inf

    def added_s(self, job: Job, segment: Segment) -> float:
        return self._times.marginal(*segment) + job.extra_s

    def add(self, job: Job, segment: Segment) -> None:
        new, before = segment
        self.segments.append(segment)
        self.tokens += new
        self.seconds += self.added_s(job, segment)
        self.deadline_s = min(self.deadline_s, _deadline(job))
        self.jobs.append(job)
        self.ids.add(job.job_id)
        shareable = (job.total_tokens - 1) // self._block_tokens
        known = before // self._block_tokens
        self._blocks.setdefault(job.cached_blocks, set()).update(job.block_hashes[known:shareable])

    def segment(self, job: Job) -> Segment:
        """What the pass would compute for ``job``."""
        low = job.cached_blocks
        blocks = self._blocks.get(low)
        if blocks:
            hashes = job.block_hashes
            high = min((job.total_tokens - 1) // self._block_tokens, len(hashes))
            middle = self._parted
            if not low < middle <= high:
                middle = (low + high + 1) // 2
            while low < high:
                if hashes[middle - 1] in blocks:
                    low = middle
                    if low < high and hashes[low] not in blocks:
                        break
                else:
                    high = middle - 1
                middle = (low + high + 1) // 2
            self._parted = low
        before = low * self._block_tokens
        return job.total_tokens - before, before


def _deadline(job: Job) -> float:
    return math.inf if job.deadline_s is None else job.deadline_s
