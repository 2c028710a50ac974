"""The order of waiting jobs: one number a job, lowest first, that waiting does not change.

A job's score is its remaining time less λ times what it has waited. All scores fall at the same rate, so the order by
``remaining + λ·arrival`` is the same at all times; it changes only when what remains of a job does.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.job import Job

__all__ = ["POLICIES", "Order"]

POLICIES = ("srjf", "sjf", "fcfs")


@dataclass(frozen=True, slots=True)
class Order:
    """``srjf``: what remains now; ``sjf``: what was predicted at submission; ``fcfs``: arrival alone."""

    policy: str = "srjf"
    fairness: float = 0.1  # λ: seconds of remaining time that a second of waiting outweighs
    priority_s: float = 10.0  # seconds of remaining time that one level of priority outweighs

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"scheduling policy {self.policy!r}: expected one of {', '.join(POLICIES)}")
        if self.fairness < 0 or self.priority_s < 0:
            raise ValueError(f"fairness and priority_s must not be negative: {self.fairness}, {self.priority_s}")

    def key(self, job: Job) -> float:
        """In s, to compare with other keys of the same order."""
        return self.standing(job) + self._length(job)

    def standing(self, job: Job) -> float:
        """The part of the key that stays while the job is computed."""
        waited = job.arrival_s if self.policy == "fcfs" else self.fairness * job.arrival_s
        return waited + job.priority * self.priority_s + job.defer_s

    def _length(self, job: Job) -> float:
        if self.policy == "fcfs":
            return 0.0
        return job.remaining_s if self.policy == "srjf" else job.predicted_s
