"""What the scheduler knows of a job. Plain data: no torch, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Job"]


@dataclass(slots=True, eq=False)
class Job:
    """One prompt waiting for, or taking part in, a pass.

    ``block_hashes[i]`` identifies tokens ``0 .. (i+1)·block_tokens`` under the job's salt (a hash chain), one for each
    whole block. ``max_cached_blocks`` bounds how many of them may be read from the cache: at least the last token is
    always computed, and a job that wants prompt log-probabilities needs every scored row computed.
    """

    job_id: int
    total_tokens: int
    arrival_s: float
    block_hashes: Sequence[int | bytes] = ()
    max_cached_blocks: int = 0
    tenant: str = ""
    priority: int = 0  # lower runs earlier
    deadline_s: float | None = None  # absolute, on the scheduler's clock
    group: int = 0  # jobs submitted together
    extra_s: float = 0.0  # predicted time beyond the pass itself (prompt log-probabilities)

    # Kept by the scheduler.
    cached_blocks: int = 0
    shared_blocks: int = 0  # leading ones that another waiting job begins with too
    predicted_s: float = 0.0  # at submission, alone
    remaining_s: float = 0.0  # alone, with what is cached now
    cost_s: float = 0.0  # what it adds to the backlog: a prefix shared with others that wait counts once
    defer_s: float = 0.0  # added to the key so that it does not make accepted deadlines fail
    key: float = 0.0  # place in its tenant's order
    parked_times: int = 0
    payload: object = field(default=None, repr=False)  # the engine's own record
