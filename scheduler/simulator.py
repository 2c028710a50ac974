"""The scheduler under simulated time: the engine's objects, with a clock that jumps and passes that compute nothing.

A pass takes what ``times`` says (by default what the scheduler believes, optionally with noise), in steps like those of
the engine: whoever arrives during a step is seen at its end. Kept blocks become readable when a pass ends.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.admission import Refused
from scheduler.job import Job
from scheduler.job_time import JobTimeModel, Segment
from scheduler.packing import segments_of
from scheduler.paper_algorithm import lowest_score
from scheduler.prefix_index import Block, PrefixIndex
from scheduler.scheduler import Decision, RunningPass, SchedulerConfig

__all__ = ["Outcome", "PaperScheduler", "Result", "Schedules", "best_hit_ratio", "lognormal_noise", "simulate"]


class Schedules(Protocol):
    """What the simulator asks of a scheduler: `Scheduler`'s interface, as far as it drives an engine."""

    index: PrefixIndex

    def submit_group(self, jobs: Sequence[Job], now: float) -> None: ...
    def next_pass(self, now: float, parked: Sequence[RunningPass] = ()) -> Decision: ...
    def begin(self, jobs: Sequence[Job], segments: Sequence[Segment], now: float) -> RunningPass: ...
    def set_running(self, running: RunningPass | None) -> None: ...
    def should_preempt(self, running: RunningPass, now: float) -> bool: ...
    def park(self, running: RunningPass, now: float) -> None: ...
    def finished(self, running: RunningPass, seconds: float | None, now: float) -> None: ...
    def expire(self, now: float) -> list[Job]: ...


class PaperScheduler:
    """Algorithm 1 of the paper as a scheduler: rescoring, one job a pass, no preemption, no bounds."""

    def __init__(self, config: SchedulerConfig, model: JobTimeModel, index: PrefixIndex) -> None:
        self._config, self._model, self.index = config, model, index
        self._waiting: dict[int, Job] = {}

    def submit_group(self, jobs: Sequence[Job], now: float) -> None:
        self._waiting.update((job.job_id, job) for job in jobs)

    def next_pass(self, now: float, parked: Sequence[RunningPass] = ()) -> Decision:
        config = self._config
        job = lowest_score(
            self._waiting.values(), self.index.match, self._model, config.block_tokens, config.fairness, now
        )
        return Decision([] if job is None else [self._waiting.pop(job.job_id)])

    def begin(self, jobs: Sequence[Job], segments: Sequence[Segment], now: float) -> RunningPass:
        predicted = self._model.predict_many(segments)
        return RunningPass(list(jobs), list(segments), predicted, now, predicted, 0.0, "", math.inf)

    def set_running(self, running: RunningPass | None) -> None: ...

    def should_preempt(self, running: RunningPass, now: float) -> bool:
        return False

    def park(self, running: RunningPass, now: float) -> None: ...

    def finished(self, running: RunningPass, seconds: float | None, now: float) -> None: ...

    def expire(self, now: float) -> list[Job]:
        return []


@dataclass(slots=True)
class Outcome:
    """What became of a request; times in s on the simulated clock."""

    arrival_s: float
    deadline_s: float | None
    started_s: float = math.inf  # its first job's pass
    finished_s: float = math.inf  # its last job's pass; infinite if refused or expired
    refused: str = ""
    retry_after_s: float = 0.0

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.arrival_s

    @property
    def in_time(self) -> bool:
        return self.finished_s <= (math.inf if self.deadline_s is None else self.deadline_s)


@dataclass(slots=True)
class Result:
    outcomes: list[Outcome]
    ended_s: float = 0.0
    computed_tokens: int = 0
    hit_tokens: int = 0  # read from the prefix cache
    shared_tokens: int = 0  # computed once for several jobs of a pass
    passes: int = 0
    parked: int = 0
    most_waiting: int = 0
    accesses: list[Sequence[Block]] = field(default_factory=list)  # blocks of each job, in the order they ran

    @property
    def answered(self) -> list[Outcome]:
        return [o for o in self.outcomes if math.isfinite(o.finished_s)]

    @property
    def latencies_s(self) -> list[float]:
        """Sorted, of what was answered."""
        return sorted(o.latency_s for o in self.answered)

    @property
    def mean_s(self) -> float:
        latencies = self.latencies_s
        return sum(latencies) / len(latencies) if latencies else 0.0

    def quantile_s(self, q: float) -> float:
        latencies = self.latencies_s
        return latencies[min(len(latencies) - 1, int(q * len(latencies)))] if latencies else 0.0

    @property
    def throughput(self) -> float:
        """Requests a second, from the first arrival to the last answer."""
        begun = min((o.arrival_s for o in self.outcomes), default=0.0)
        return len(self.answered) / (self.ended_s - begun) if self.ended_s > begun else 0.0

    @property
    def reuse_ratio(self) -> float:
        """Share of prompt tokens that were read from the cache, or computed for another job of the same pass."""
        reused = self.hit_tokens + self.shared_tokens
        return reused / (reused + self.computed_tokens) if reused else 0.0


@dataclass(slots=True, eq=False)
class _Pass:
    view: RunningPass
    left_s: float  # true time
    total_s: float
    pinned: list[Block]
    kept: list[Block]


def simulate(
    groups: Sequence[Sequence[Job]],
    scheduler: Schedules,
    times: JobTimeModel,
    block_tokens: int,
    *,
    step_s: float = 0.005,
    noise: Callable[[], float] = lambda: 1.0,
) -> Result:
    """Runs ``groups`` (each submitted at its jobs' arrival) to the end. ``noise()`` multiplies a pass's true time."""
    return _Run(groups, scheduler, times, block_tokens, step_s, noise).result()


class _Run:
    def __init__(
        self,
        groups: Sequence[Sequence[Job]],
        scheduler: Schedules,
        times: JobTimeModel,
        block_tokens: int,
        step_s: float,
        noise: Callable[[], float],
    ) -> None:
        self._scheduler, self._times, self._block_tokens = scheduler, times, block_tokens
        self._step_s, self._noise = step_s, noise
        self._coming = sorted((jobs[0].arrival_s, i, jobs) for i, jobs in enumerate(groups))
        self._coming.reverse()
        self._result = Result([Outcome(jobs[0].arrival_s, jobs[0].deadline_s) for jobs in groups])
        self._owner = {job.job_id: i for i, jobs in enumerate(groups) for job in jobs}
        self._left = {i: len(jobs) for i, jobs in enumerate(groups)}
        self._parked: list[_Pass] = []
        self._waiting = 0
        self._now = 0.0

    def result(self) -> Result:
        running: _Pass | None = None
        while True:
            if running is None:
                self._expire()
                running = self._next()
                if running is None:
                    if not self._coming:
                        return self._result
                    self._now = max(self._now, self._coming[-1][0])
                    self._arrive()
                continue
            if self._advance(running):
                self._end(running)
                running = None
            elif self._scheduler.should_preempt(running.view, self._now):
                self._scheduler.park(running.view, self._now)
                self._parked.append(running)
                self._result.parked += 1
                running = None

    def _advance(self, running: _Pass) -> bool:
        """Computes to the end, or to the end of the step during which somebody came. Whether it ended."""
        end = self._now + running.left_s
        if not self._coming or self._coming[-1][0] >= end:
            running.left_s = 0.0
            running.view.remaining_s = 0.0
            self._now = end
            self._arrive()
            return True
        steps = math.floor(max(0.0, self._coming[-1][0] - self._now) / self._step_s) + 1
        spent = min(running.left_s, steps * self._step_s)
        arrived = self._coming[-1][0]
        running.left_s -= spent
        running.view.remaining_s = running.view.predicted_s * running.left_s / running.total_s
        self._now = max(self._now + spent, arrived)
        self._arrive()
        self._expire()
        return running.left_s <= 0

    def _arrive(self) -> None:
        while self._coming and self._coming[-1][0] <= self._now:
            arrival, i, jobs = self._coming.pop()
            try:
                self._scheduler.submit_group(jobs, arrival)
            except Refused as refusal:
                self._result.outcomes[i].refused = refusal.reason
                self._result.outcomes[i].retry_after_s = refusal.retry_after_s
            else:
                self._waiting += len(jobs)
                self._result.most_waiting = max(self._result.most_waiting, self._waiting)
                self._result.outcomes[i].deadline_s = jobs[0].deadline_s

    def _expire(self) -> None:
        self._waiting -= len(self._scheduler.expire(self._now))

    def _next(self) -> _Pass | None:
        decision = self._scheduler.next_pass(self._now, [p.view for p in self._parked])
        if decision.resume is not None:
            running = next(p for p in self._parked if p.view is decision.resume)
            self._parked.remove(running)
        elif decision.start:
            running = self._begin(decision.start)
        else:
            return None
        self._scheduler.set_running(running.view)
        return running

    def _begin(self, jobs: Sequence[Job]) -> _Pass:
        index, result = self._scheduler.index, self._result
        pinned: list[Block] = []
        kept: list[Block] = []
        for job in jobs:
            job.cached_blocks = index.match(job.block_hashes, job.max_cached_blocks)
            here = job.block_hashes[: job.cached_blocks]
            index.pin(here)
            pinned.extend(here)
            kept.extend(block for block, _ in index.allocate(job.block_hashes, job.cached_blocks, self._now))
            outcome = result.outcomes[self._owner[job.job_id]]
            outcome.started_s = min(outcome.started_s, self._now)
            result.accesses.append(job.block_hashes)
        segments = segments_of(jobs, self._block_tokens)
        computed = sum(new for new, _ in segments)
        hits = sum(job.cached_blocks for job in jobs) * self._block_tokens
        result.computed_tokens += computed
        result.hit_tokens += hits
        result.shared_tokens += sum(job.total_tokens for job in jobs) - computed - hits
        result.passes += 1
        self._waiting -= len(jobs)
        seconds = self._times.predict_many(segments) * self._noise()
        return _Pass(self._scheduler.begin(jobs, segments, self._now), seconds, seconds, pinned, kept)

    def _end(self, running: _Pass) -> None:
        index, result = self._scheduler.index, self._result
        index.commit(running.kept)
        index.unpin(running.pinned)
        self._scheduler.finished(running.view, running.total_s, self._now)
        result.ended_s = self._now
        for job in running.view.jobs:
            i = self._owner[job.job_id]
            self._left[i] -= 1
            if not self._left[i]:
                result.outcomes[i].finished_s = self._now


def best_hit_ratio(accesses: Sequence[Sequence[Block]], capacity: int) -> float:
    """Share of blocks that the best possible cache of ``capacity`` blocks would have held, had it known the future.

    Belady's rule with the choice not to keep: of what is cached and what is new, go the blocks that are asked for
    latest. A block is never asked for later than one further down its prompt, so with ties broken towards the deeper
    one the cached blocks stay closed under prefixes, as the real index demands.
    """
    following: dict[Block, int] = {}
    next_use: list[list[int]] = []
    never = len(accesses)
    for i in range(len(accesses) - 1, -1, -1):
        next_use.append([following.get(block, never) for block in accesses[i]])
        following.update(dict.fromkeys(accesses[i], i))
    next_use.reverse()
    cached: dict[Block, int] = {}  # next use
    heap: list[tuple[int, int, Block]] = []  # latest first
    hits = asked = 0
    for blocks, uses in zip(accesses, next_use, strict=True):
        asked += len(blocks)
        leading = 0
        while leading < len(blocks) and blocks[leading] in cached:
            leading += 1
        hits += leading
        for depth, (block, use) in enumerate(zip(blocks, uses, strict=True)):
            cached[block] = use
            heapq.heappush(heap, (-use, -depth, block))
        while len(cached) > capacity or (heap and -heap[0][0] == never):
            use, _, block = heapq.heappop(heap)
            if cached.get(block) == -use:
                del cached[block]
    return hits / asked if asked else 0.0


def lognormal_noise(rng: random.Random, sigma: float) -> Callable[[], float]:
    """Multiplies by ``exp(N(0, σ))``."""
    return lambda: math.exp(rng.gauss(0.0, sigma))
