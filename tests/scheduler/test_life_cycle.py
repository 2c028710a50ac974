"""No job is lost or run twice, whatever is submitted, cancelled, parked, failed, put back or too late."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.admission import Refused
from scheduler.job import Job
from scheduler.job_time import JobTimeModel
from scheduler.scheduler import RunningPass
from tests.scheduler.driver import BLOCK, make_job, make_scheduler

Held = tuple[list[bytes | int], dict[bytes | int, int]]  # pinned, to be kept

shapes = st.tuples(st.text("ab", max_size=5), st.integers(0, 30), st.integers(1, BLOCK))


class LifeCycle(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(
            12,
            JobTimeModel(0.01, 1e-3, 1e-6),
            saturation_tokens=200,
            max_queue=12,
            max_queue_s=3.0,
            tenant_max_queue=8,
            tenant_weights={"b": 2.0},
            max_parked=2,
        )
        self.now = 0.0
        self.ids = 0
        self.waiting: set[Job] = set()
        self.gone: set[Job] = set()
        self.running: RunningPass | None = None
        self.parked: list[RunningPass] = []
        self.held: dict[RunningPass, Held] = {}

    @rule(
        group=st.lists(shapes, min_size=1, max_size=4),
        tenant=st.sampled_from("abc"),
        priority=st.integers(-1, 1),
        deadline=st.none() | st.floats(0.05, 4.0),
    )
    def submit(self, group: list[tuple[str, int, int]], tenant: str, priority: int, deadline: float | None) -> None:
        jobs = []
        for name, blocks, spare in group:
            self.ids += 1
            job = make_job(self.ids, blocks * BLOCK + spare, self.now, name, tenant=tenant, priority=priority)
            job.group = self.ids - len(jobs)
            job.deadline_s = None if deadline is None else self.now + deadline
            jobs.append(job)
        before = self.scheduler.stats()["queue_jobs"]
        try:
            self.scheduler.submit_group(jobs, self.now)
        except Refused as refusal:
            assert refusal.retry_after_s > 0
            assert self.scheduler.stats()["queue_jobs"] == before
        else:
            self.waiting.update(jobs)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        job = sorted(self.waiting, key=lambda job: job.job_id)[which % len(self.waiting)]
        assert self.scheduler.cancel(job.job_id)
        self.waiting.remove(job)
        self.gone.add(job)

    @precondition(lambda self: self.running is None)
    @rule(put_back=st.booleans())
    def decide(self, put_back: bool) -> None:
        decision = self.scheduler.next_pass(self.now, self.parked)
        if decision.resume is not None:
            assert decision.start == []
            self.parked.remove(decision.resume)
            self.running = decision.resume
        elif decision.start:
            assert set(decision.start) <= self.waiting, "a job runs once"
            if put_back:
                self.scheduler.requeue(decision.start)
                return
            self.waiting.difference_update(decision.start)
            self.running = self._begin(decision.start)
        else:
            assert not self.waiting
            assert not self.parked
            return
        self.scheduler.set_running(self.running)

    def _begin(self, jobs: list[Job]) -> RunningPass:
        index = self.scheduler.index
        segments = self.scheduler.segments_of(jobs)
        pinned: list[bytes | int] = []
        kept: dict[bytes | int, int] = {}
        for job in jobs:
            cached = index.match(job.block_hashes, job.max_cached_blocks)
            index.pin(job.block_hashes[:cached])
            pinned.extend(job.block_hashes[:cached])
            kept.update(index.allocate(job.block_hashes, cached, self.now))
        view = self.scheduler.begin(jobs, segments, self.now)
        self.held[view] = (pinned, kept)
        return view

    @precondition(lambda self: self.running is not None)
    @rule(share=st.floats(0.05, 0.95))
    def step(self, share: float) -> None:
        view = self.running
        assert view is not None
        self.now += view.remaining_s * share
        view.remaining_s *= 1 - share
        if self.scheduler.should_preempt(view, self.now):
            self.scheduler.park(view, self.now)
            self.parked.append(view)
            self.running = None
            assert len(self.parked) <= 2

    @precondition(lambda self: self.running is not None)
    @rule(succeeded=st.booleans())
    def end(self, succeeded: bool) -> None:
        view = self.running
        assert view is not None
        self.now += view.remaining_s
        pinned, kept = self.held.pop(view)
        (self.scheduler.index.commit if succeeded else self.scheduler.index.abort)(list(kept))
        self.scheduler.index.unpin(pinned)
        self.scheduler.finished(view, view.predicted_s if succeeded else None, self.now)
        self.gone.update(view.jobs)
        self.running = None

    @rule(wait=st.floats(0.0, 0.5))
    def expire(self, wait: float) -> None:
        self.now += wait
        late = self.scheduler.expire(self.now)
        assert all(job.deadline_s is not None and job.deadline_s - job.remaining_s < self.now for job in late)
        assert set(late) <= self.waiting
        self.waiting.difference_update(late)
        self.gone.update(late)

    @rule()
    def ask(self) -> None:
        wait = self.scheduler.predicted_wait_s([make_job(10**6, 300, tenant="c")], self.now)
        assert wait >= self.scheduler.model.predict(300, 0) * 0.5

    @invariant()
    def figures_add_up(self) -> None:
        stats = self.scheduler.stats()
        assert stats["queue_jobs"] == len(self.waiting)
        assert stats["queue_tokens"] == sum(job.total_tokens for job in self.waiting)
        assert abs(stats["queue_seconds"] - sum(job.cost_s for job in self.waiting)) < 1e-6
        assert not (self.waiting & self.gone)


LifeCycle.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLifeCycle = LifeCycle.TestCase
