"""Decides what the engine computes next. The engine, the simulator and the tests drive the same object.

Time is an argument everywhere (seconds on any monotonic clock); nothing here blocks, reads a clock or draws a random
number. Not thread-safe: the caller holds its own lock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from scheduler.admission import Bounds, Load, Refused, check_bounds
from scheduler.job import Job
from scheduler.job_time import JobTimeModel, Segment
from scheduler.order import Order
from scheduler.packing import PackLimits, pack, segments_of
from scheduler.prefix_index import PrefixIndex
from scheduler.queue import JobQueue

__all__ = ["Decision", "RunningPass", "Scheduler", "SchedulerConfig"]

_DRIFT = 0.1  # relative change of predictions at which the whole queue is put in order anew
_REFERENCE_PASSES: tuple[Segment, ...] = ((128, 0), (1024, 0), (8192, 0))  # whose predictions are watched for drift
_OTHERS_TRIED = 512  # waiting jobs, in order, that one decision looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """``None`` is no bound. Bounds count what waits, not what runs."""

    policy: str = "srjf"  # srjf | sjf | fcfs; only srjf preempts
    fairness: float = 0.1  # λ: seconds of remaining time that a second of waiting outweighs
    priority_s: float = 10.0  # seconds of remaining time that one level of priority outweighs
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # shares under contention; 1 where absent
    tenant_share: float = 1.0  # s a s: how strongly service had counts against a tenant; 0: not at all

    block_tokens: int = 32
    saturation_tokens: int = 2048  # new tokens at which a pass uses the device fully
    max_pass_jobs: int = 256
    pack_delay_share: float = 0.5  # of its latency so far and its own time, that company may add to a head's latency

    max_parked: int = 4  # passes lying half done; 0: no preemption
    max_parked_bytes: int | None = None
    max_parked_times: int = 1000  # then a pass runs to its end; λ ends it earlier
    hysteresis_s: float = 0.005  # what a newcomer must be shorter by, at least
    hysteresis_share: float = 0.1  # and by this share of what remains of the running pass

    max_queue: int | None = 4096
    max_queue_tokens: int | None = None
    max_queue_s: float | None = None
    tenant_max_queue: int | None = None
    tenant_max_queue_tokens: int | None = None
    tenant_max_queue_s: float | None = None
    default_deadline_s: float | None = None
    deadline_margin: float = 0.2  # promises are made as if everything took so much longer than predictions err

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.saturation_tokens < 1 or self.max_pass_jobs < 1:
            raise ValueError("block_tokens, saturation_tokens and max_pass_jobs are at least 1")
        if any(weight <= 0 for weight in self.tenant_weights.values()):
            raise ValueError("tenant weights are greater than 0")


@dataclass(slots=True, eq=False)
class RunningPass:
    """A pass that has begun. The engine keeps ``remaining_s`` and ``bytes`` up to date."""

    jobs: list[Job]
    segments: list[Segment]
    predicted_s: float
    started_s: float
    remaining_s: float
    standing: float  # its key without what remains of it
    tenant: str  # whose service counts against it
    deadline_s: float  # the tightest of its jobs'
    bytes: int = 0
    parked_times: int = 0
    served_s: float = 0.0  # of its predicted time, what its tenants have been charged for


@dataclass(frozen=True, slots=True)
class Decision:
    """Begin a pass over ``start`` (they have left the queue), or go on with ``resume``, or neither: nothing to do."""

    start: list[Job]
    resume: RunningPass | None = None


class Scheduler:
    """``index`` is public: the engine allocates, pins and commits there, and the queue follows."""

    def __init__(self, config: SchedulerConfig, model: JobTimeModel, index: PrefixIndex) -> None:
        self.config, self.model, self.index = config, model, index
        self._order = Order(config.policy, config.fairness, config.priority_s)
        self._order_times = JobTimeModel(*model.coefficients)
        self._queue = JobQueue(
            self._order,
            self._order_times,
            index.match,
            config.block_tokens,
            keepable_blocks=index.num_pages,
            share=config.tenant_share,
            weights=config.tenant_weights,
        )
        index.demand = self._queue
        index.on_inserted = self._queue.inserted
        index.on_evicted = self._queue.evicted
        self._limits = PackLimits(
            config.saturation_tokens, config.block_tokens, config.pack_delay_share, config.max_pass_jobs
        )
        self._bounds = Bounds(config.max_queue, config.max_queue_tokens, config.max_queue_s)
        self._tenant_bounds = Bounds(config.tenant_max_queue, config.tenant_max_queue_tokens, config.tenant_max_queue_s)
        self._running: RunningPass | None = None
        self._parked: list[RunningPass] = []
        self._latest_starts: list[tuple[float, int]] = []  # heap; entries of jobs that left are passed over
        self._group_starts: list[tuple[float, int]] = []  # likewise, for all of a group that waits
        self._refusals = dict.fromkeys(("queue_full", "queue_tokens", "queue_seconds", "tenant", "deadline"), 0)
        self._expired = self._preemptions = self._rescored = self._started_jobs = self._started_passes = 0

    # --- coming and going --------------------------------------------------------------------------------------------

    def submit_group(self, jobs: Sequence[Job], now: float) -> None:
        """All wait now, or none: raises Refused. Sets what the scheduler keeps in a job."""
        for job in jobs:
            if job.deadline_s is None and self.config.default_deadline_s is not None:
                job.deadline_s = now + self.config.default_deadline_s
        before_s = self._all_begun_s()
        queue = self._queue
        waiting = Load(len(queue), queue.tokens, queue.total_s())
        try:
            if self._bounds.jobs is not None:  # ahead of the rest: a full queue refuses at next to no cost
                check_bounds(
                    waiting, Load(len(jobs), 0, 0.0), Bounds(self._bounds.jobs), tenant=False, before_s=before_s
                )
            tenants = {job.tenant: Load(*queue.of_tenant(job.tenant)) for job in jobs}
            self._add(jobs)
            try:
                self._check_bounds(jobs, waiting, tenants, before_s)
                self._check_deadlines(jobs, now)
            except Refused:
                self._withdraw(jobs)
                raise
        except Refused as refusal:
            self._refusals[refusal.reason] += 1
            raise
        self._watch(jobs)

    def cancel(self, job_id: int) -> bool:
        """Whether it waited, and does no longer."""
        return self._queue.remove(job_id) is not None

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Puts back what ``next_pass`` gave out and could not be begun. No bound applies."""
        for job in jobs:
            self._queue.add(job)
        self._watch(jobs)

    def expire(self, now: float) -> list[Job]:
        """Takes out the waiting jobs that cannot meet their deadline any more, even if begun at once."""
        late: list[Job] = []
        while self._latest_starts and self._latest_starts[0][0] < now:
            _, job_id = heapq.heappop(self._latest_starts)
            job = self._queue.get(job_id)
            if job is None or job.deadline_s is None:
                continue
            latest = job.deadline_s - job.remaining_s
            if latest < now:
                self._queue.remove(job_id)
                late.append(job)
            else:  # more of it is cached than when it came
                heapq.heappush(self._latest_starts, (latest, job_id))
        self._expired += len(late)
        return late

    def drain(self) -> list[Job]:
        """Empties the queue; what runs or is parked goes on."""
        jobs = list(self._queue.jobs())
        for job in jobs:
            self._queue.remove(job.job_id)
        self._latest_starts.clear()
        self._group_starts.clear()
        return jobs

    # --- deciding ----------------------------------------------------------------------------------------------------

    def next_pass(self, now: float, parked: Sequence[RunningPass] = (), *, resume_only: bool = False) -> Decision:
        """What to compute, with nothing computing. ``resume_only``: begin nothing new, there is no room."""
        self._queue.catch_up()
        best = min(parked, key=self._score, default=None)
        head = None if resume_only else self._queue.head()
        if head is None:
            return Decision([], best)
        resume = best if best is not None and self._score(best) <= self._queue.head_score() else None
        work_s = head.remaining_s if resume is None else resume.remaining_s
        view = self._pressing_view(parked, work_s, now)
        job = self._pressing_job(work_s, now)
        if view is not None and (job is None or view.deadline_s <= _deadline(job)):
            return Decision([], view)
        if job is not None:
            head, resume = job, None
        if resume is not None:
            return Decision([], resume)
        jobs = [head]
        if self.config.max_pass_jobs > 1:
            others = islice(self._queue.in_order(), _OTHERS_TRIED)
            siblings, stretch = self._queue.siblings(head), self._stretch()
            jobs = pack(head, siblings, others, self._order_times, self._limits, now, stretch)
        self._queue.take(jobs)
        return Decision(jobs)

    def begin(self, jobs: Sequence[Job], segments: Sequence[Segment], now: float) -> RunningPass:
        """The pass over ``jobs`` starts: ``segments`` are the ``(new tokens, tokens before them)`` it computes."""
        predicted = self.model.predict_many(segments) + sum(job.extra_s for job in jobs)
        self._started_jobs += len(jobs)
        self._started_passes += 1
        first = min(jobs, key=lambda job: job.key - job.remaining_s)
        return RunningPass(
            jobs=list(jobs),
            segments=list(segments),
            predicted_s=predicted,
            started_s=now,
            remaining_s=predicted,
            standing=first.key - first.remaining_s,
            tenant=first.tenant,
            deadline_s=min((job.deadline_s for job in jobs if job.deadline_s is not None), default=math.inf),
        )

    def segments_of(self, jobs: Sequence[Job]) -> list[Segment]:
        """What a pass over ``jobs`` computes, by what was cached when they left the queue."""
        return segments_of(jobs, self.config.block_tokens)

    def set_running(self, running: RunningPass | None) -> None:
        """What computes now, for predictions."""
        self._running = running
        if running in self._parked:
            self._parked.remove(running)

    def should_preempt(self, running: RunningPass, now: float) -> bool:
        """Whether to park ``running`` for the head of the queue. Cheap enough to ask after every step."""
        if not len(self._queue) or not self._may_be_parked(running):
            return False
        job = self._pressing_job(running.remaining_s, now)
        if job is None:
            job = self._queue.head()
            if not self._yields(running, self._queue.head_score()):
                return False
        assert job is not None
        return not self._pressed(running.remaining_s, running.deadline_s, job.remaining_s, now)

    def park(self, running: RunningPass, now: float) -> None:
        """``running`` lies until ``next_pass`` resumes it."""
        self._charge(running, running.predicted_s - running.remaining_s)
        running.parked_times += 1
        for job in running.jobs:
            job.parked_times += 1
        self._preemptions += 1
        self._parked.append(running)
        if self._running is running:
            self._running = None

    def finished(self, running: RunningPass, seconds: float | None, now: float) -> None:
        """The pass ended after ``seconds`` of computing; None: not computed as planned, which teaches nothing."""
        if self._running is running:
            self._running = None
        if running in self._parked:
            self._parked.remove(running)
        self._charge(running, running.predicted_s if seconds is not None else running.predicted_s - running.remaining_s)
        if seconds is None:
            return
        self.model.observe(running.segments, seconds - sum(job.extra_s for job in running.jobs))
        if any(
            abs(self.model.predict(*segment) / max(self._order_times.predict(*segment), 1e-12) - 1) > _DRIFT
            for segment in _REFERENCE_PASSES
        ):
            self._order_times = JobTimeModel(*self.model.coefficients)
            self._queue.rescore(self._order_times)
            self._rescored += 1

    # --- telling -----------------------------------------------------------------------------------------------------

    def predicted_wait_s(self, jobs: Sequence[Job], now: float) -> float:
        """Predicted time until the last of ``jobs`` would be answered if submitted now. They are not submitted."""
        fresh = [Job(-1 - i, job.total_tokens, now, job.block_hashes, job.max_cached_blocks, job.tenant, job.priority,
                     group=-1, extra_s=job.extra_s) for i, job in enumerate(jobs)]  # fmt: skip
        self._add(fresh)
        wait = max((self._finish_in_s(job, now) for job in fresh), default=0.0)
        self._withdraw(fresh)
        return wait

    def retry_after_s(self, now: float) -> float:
        """Until what runs and waits now would be done."""
        return max(0.05, self._all_begun_s() + self._queue.total_s())

    def stats(self) -> dict[str, float]:
        """For metrics, by name."""
        return {
            "queue_jobs": float(len(self._queue)),
            "queue_tokens": float(self._queue.tokens),
            "queue_seconds": self._queue.total_s(),
            "jobs_started": float(self._started_jobs),
            "passes_started": float(self._started_passes),
            "preemptions": float(self._preemptions),
            "expired_jobs": float(self._expired),
            "queue_rescored": float(self._rescored),
            **{f"refused_{reason}": float(count) for reason, count in self._refusals.items()},
            **self.model.stats(),
            **self.index.stats(),
        }

    # --- inside ------------------------------------------------------------------------------------------------------

    def _charge(self, view: RunningPass, served_s: float) -> None:
        """Charges the tenants of a pass for what it has been served since it last was, each for its jobs' part."""
        whole = sum(job.cost_s for job in view.jobs)
        for job in view.jobs:
            self._queue.serve(job.tenant, (served_s - view.served_s) * job.cost_s / whole if whole > 0 else 0.0)
        view.served_s = served_s

    def _score(self, view: RunningPass) -> float:
        """Of a pass that has begun, to compare with scores of waiting jobs: both are charged for service had by now.

        What remains is divided by those who wait for it (Smith's rule): leaving a pass makes all of them wait."""
        return view.standing + view.remaining_s / len(view.jobs) + self._queue.charge(view.tenant)

    def _add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            cached = self.index.match(job.block_hashes, job.max_cached_blocks)
            before = cached * self.config.block_tokens
            job.predicted_s = self.model.predict(job.total_tokens - before, before) + job.extra_s
            self._queue.add(job)

    def _watch(self, jobs: Iterable[Job]) -> None:
        """Files the deadlines of ``jobs``, which wait now."""
        starts, groups = self._latest_starts, self._group_starts
        if len(starts) > 2 * self._queue.with_deadline + 256:  # mostly of jobs that left
            starts[:] = [entry for entry in starts if entry[1] in self._queue]
            heapq.heapify(starts)
            groups[:] = [entry for entry in groups if self._queue.of_group(entry[1])[0] is not None]
            heapq.heapify(groups)
        for job in jobs:
            if job.deadline_s is not None:
                heapq.heappush(starts, (job.deadline_s - job.remaining_s, job.job_id))
        for group, deadline in {job.group: job.deadline_s for job in jobs}.items():
            if deadline is not None:
                heapq.heappush(groups, (deadline - self._queue.of_group(group)[1], group))

    def _withdraw(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._queue.remove(job.job_id)

    def _check_bounds(self, jobs: Sequence[Job], waiting: Load, tenants: Mapping[str, Load], before_s: float) -> None:
        added = Load(len(jobs), sum(job.total_tokens for job in jobs), sum(job.cost_s for job in jobs))
        check_bounds(waiting, added, self._bounds, tenant=False, before_s=before_s)
        for name, load in tenants.items():
            own = [job for job in jobs if job.tenant == name]
            added = Load(len(own), sum(job.total_tokens for job in own), sum(job.cost_s for job in own))
            check_bounds(load, added, self._tenant_bounds, tenant=True, before_s=before_s)

    def _check_deadlines(self, jobs: Sequence[Job], now: float) -> None:
        """Keeps the promises made: ``jobs`` go behind whoever they would make late. Then their own must hold."""
        own = {job.job_id for job in jobs}
        if self._queue.with_deadline > sum(job.deadline_s is not None for job in jobs):
            threatened = self._last_threatened(own, now)
            if threatened is not None:
                self._queue.defer(jobs, self._queue.score(threatened))
        for job in jobs:
            if job.deadline_s is None:
                continue
            finish = self._finish_in_s(job, now) * self._stretch()
            if now + finish > job.deadline_s:
                left = job.deadline_s - now
                raise Refused(
                    "deadline",
                    f"the answer would take about {finish:.2f} s, the deadline is in {left:.2f} s",
                    finish - left,
                )

    def _last_threatened(self, own: set[int], now: float) -> Job | None:
        """The last waiting job in order that is in time now, but would not be behind those of ``own`` before it."""
        stretch, begun = self._stretch(), self._all_begun_s()
        before = before_without = 0.0
        last = None
        for job in self._queue.in_order():
            before += job.cost_s
            if job.job_id in own:
                continue
            before_without += job.cost_s
            if job.deadline_s is None or before == before_without:
                continue
            if now + (begun + before) * stretch > job.deadline_s >= now + before_without:
                last = job
        return last

    def _finish_in_s(self, job: Job, now: float) -> float:
        """Predicted time until ``job``, which waits, is answered, with everything before it in order."""
        score = self._queue.score(job)
        work = self._queue.ahead_s(job) + job.cost_s
        begun = sum(
            view.remaining_s
            for view in self._parked
            if self._score(view) <= score or self._pressed(view.remaining_s, view.deadline_s, work, now)
        )
        running = self._running
        if running is not None and (
            not self._yields(running, score) or self._pressed(running.remaining_s, running.deadline_s, work, now)
        ):
            begun += running.remaining_s
        return begun + work

    def _stretch(self) -> float:
        """By how much a promise exceeds its prediction: what passes are underestimated by, and the margin on top."""
        return 1.0 + self.config.deadline_margin + self.model.underestimate

    def _all_begun_s(self) -> float:
        """What remains of all passes that have begun."""
        running = self._running.remaining_s if self._running is not None else 0.0
        return running + sum(view.remaining_s for view in self._parked)

    def _pressed(self, remaining_s: float, deadline_s: float, work_s: float, now: float) -> bool:
        """Whether a deadline can be met, but not if ``work_s`` is done first."""
        return now + remaining_s <= deadline_s < now + (work_s + remaining_s) * self._stretch()

    def _pressing_view(self, parked: Sequence[RunningPass], work_s: float, now: float) -> RunningPass | None:
        """The parked pass with the earliest deadline, if any of them would miss its own behind ``work_s`` of work."""
        for view in sorted(parked, key=lambda view: view.deadline_s):
            if self._pressed(view.remaining_s, view.deadline_s, work_s, now):
                return view
            work_s += view.remaining_s
        return None

    def _pressing_job(self, work_s: float, now: float) -> Job | None:
        """A job of the group that must begin first, if it would miss its deadline behind ``work_s`` of work."""
        starts = self._group_starts
        while starts:
            latest, group = starts[0]
            job, group_s = self._queue.of_group(group)
            if job is None or job.deadline_s is None:
                heapq.heappop(starts)
                continue
            needed_s = max(group_s, job.remaining_s)
            if job.deadline_s - needed_s > latest:  # more of it is cached, or less of it waits, than when it came
                heapq.heapreplace(starts, (job.deadline_s - needed_s, group))
                continue
            return job if self._pressed(needed_s, job.deadline_s, work_s, now) else None
        return None

    def _yields(self, running: RunningPass, score: float) -> bool:
        """Whether ``running`` may be parked for a job of this score, its deadline aside."""
        config = self.config
        margin = max(config.hysteresis_s, config.hysteresis_share * running.remaining_s / len(running.jobs))
        return score + margin < self._score(running) and self._may_be_parked(running)

    def _may_be_parked(self, running: RunningPass) -> bool:
        config = self.config
        if config.policy != "srjf" or len(self._parked) >= config.max_parked:
            return False
        if running.parked_times >= config.max_parked_times:
            return False
        held = sum(view.bytes for view in self._parked) + running.bytes
        return config.max_parked_bytes is None or held <= config.max_parked_bytes


def _deadline(job: Job) -> float:
    return math.inf if job.deadline_s is None else job.deadline_s
