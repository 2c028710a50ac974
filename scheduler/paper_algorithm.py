"""Algorithm 1 of *PrefillOnly* (arXiv 2505.07203), as a reference: every waiting job scored at every decision.

Before each pass, what is cached of every waiting job is looked up anew, its time is predicted from that, and λ times
what it has waited is taken off; the job of the lowest score runs, alone and to its end. O(n) a decision, and nothing to
keep up to date: what the indexed queue must agree with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.job import Job
from scheduler.job_time import JobTimeModel
from scheduler.queue import Block, Match

__all__ = ["lowest_score", "score"]


def score(job: Job, match: Match, times: JobTimeModel, block_tokens: int, fairness: float, now: float) -> float:
    """Remaining time with what is cached now, less λ times the time waited, in s."""
    hashes: Sequence[Block] = job.block_hashes
    cached = match(hashes, job.max_cached_blocks, 0) * block_tokens
    return times.predict(job.total_tokens - cached, cached) + job.extra_s - fairness * (now - job.arrival_s)


def lowest_score(
    waiting: Iterable[Job], match: Match, times: JobTimeModel, block_tokens: int, fairness: float, now: float
) -> Job | None:
    """The job to run next, the earliest submitted among equals; None if nothing waits."""
    return min(
        waiting,
        key=lambda job: (score(job, match, times, block_tokens, fairness, now), job.job_id),
        default=None,
    )
