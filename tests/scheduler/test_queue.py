"""The indexed queue against a naive rescoring of all jobs, and its counts against what it holds."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.job import Job
from scheduler.job_time import JobTimeModel
from scheduler.keep_policy import NoDemand
from scheduler.order import Order
from scheduler.paper_algorithm import lowest_score, score
from scheduler.prefix_index import PrefixIndex
from scheduler.queue import JobQueue, common_blocks
from scheduler.scheduler import RunningPass
from tests.scheduler.driver import BLOCK, make_job, make_scheduler

FAIRNESS = 0.25
TIMES = JobTimeModel(0.01, 1e-3, 1e-6)


class DecisionMachine(RuleBasedStateMachine):
    """Random submissions, cancellations, passes (done, failed, overlapping): every decision is Algorithm 1's."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(
            9, TIMES, fairness=FAIRNESS, max_pass_jobs=1, max_queue=None, saturation_tokens=64
        )
        self.scheduler.index.demand = NoDemand()  # else what waiting jobs would read is not evicted
        self.waiting: dict[int, Job] = {}
        self.begun: list[tuple[RunningPass, list[bytes | int], dict[bytes | int, int]]] = []
        self.now = 0.0
        self.ids = 0

    @rule(name=st.text("abc", max_size=5), blocks=st.integers(0, 7), spare=st.integers(1, BLOCK), wait=st.floats(0, 3))
    def submit(self, name: str, blocks: int, spare: int, wait: float) -> None:
        self.now += wait
        self.ids += 1
        job = make_job(self.ids, blocks * BLOCK + spare, self.now, name)
        self.scheduler.submit_group([job], self.now)
        self.waiting[job.job_id] = job

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        job_id = sorted(self.waiting)[which % len(self.waiting)]
        del self.waiting[job_id]
        assert self.scheduler.cancel(job_id)
        assert not self.scheduler.cancel(job_id), "it has left"

    @precondition(lambda self: self.waiting)
    @rule()
    def decide(self) -> None:
        index = self.scheduler.index
        expected = lowest_score(self.waiting.values(), index.match, TIMES, BLOCK, FAIRNESS, self.now)
        (job,) = self.scheduler.next_pass(self.now).start
        args = (index.match, TIMES, BLOCK, FAIRNESS, self.now)
        assert expected is not None
        assert job is expected or score(job, *args) == pytest.approx(score(expected, *args), abs=1e-9)
        del self.waiting[job.job_id]
        cached = index.match(job.block_hashes, job.max_cached_blocks)
        assert job.cached_blocks == cached
        here = list(job.block_hashes[:cached])
        index.pin(here)
        kept = dict(index.allocate(job.block_hashes, cached, self.now))
        view = self.scheduler.begin([job], self.scheduler.segments_of([job]), self.now)
        self.begun.append((view, here, kept))

    @precondition(lambda self: self.begun)
    @rule(which=st.integers(0, 100), succeeded=st.booleans())
    def end(self, which: int, succeeded: bool) -> None:
        view, pinned, kept = self.begun.pop(which % len(self.begun))
        self.now += view.predicted_s
        (self.scheduler.index.commit if succeeded else self.scheduler.index.abort)(list(kept))
        self.scheduler.index.unpin(pinned)
        self.scheduler.finished(view, None, self.now)

    @precondition(lambda self: self.begun)
    @rule(which=st.integers(0, 100))
    def begin_again(self, which: int) -> None:
        view, pinned, kept = self.begun.pop(which % len(self.begun))
        self.scheduler.index.abort(list(kept))
        self.scheduler.index.unpin(pinned)
        self.scheduler.requeue(view.jobs)
        self.waiting.update((job.job_id, job) for job in view.jobs)

    @invariant()
    def every_job_knows_what_is_cached_of_it(self) -> None:
        for job in self.waiting.values():
            cached = self.scheduler.index.match(job.block_hashes, job.max_cached_blocks)
            assert job.cached_blocks == cached
            before = cached * BLOCK
            assert job.remaining_s == pytest.approx(TIMES.predict(job.total_tokens - before, before))

    @invariant()
    def counts_are_those_of_what_waits(self) -> None:
        stats = self.scheduler.stats()
        assert stats["queue_jobs"] == len(self.waiting)
        assert stats["queue_tokens"] == sum(job.total_tokens for job in self.waiting.values())
        assert stats["queue_seconds"] == pytest.approx(sum(job.cost_s for job in self.waiting.values()))


DecisionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestDecisions = DecisionMachine.TestCase


def make_queue(pages: int = 0, **more: object) -> JobQueue:
    return JobQueue(Order("srjf", FAIRNESS), TIMES, PrefixIndex(pages).match, BLOCK, **more)  # type: ignore[arg-type]


def serve(queue: JobQueue, job: Job) -> None:
    queue.take([job])
    queue.serve(job.tenant, job.cost_s)


def test_what_is_ahead_is_what_comes_before_in_order_over_all_tenants() -> None:
    rng = random.Random(7)
    queue = make_queue()
    for i in range(400):
        queue.add(make_job(i, rng.randint(1, 400), rng.random() * 50, tenant=rng.choice("abcd"), group=i))
    for _ in range(60):
        head = queue.head()
        assert head is not None
        serve(queue, head)
    ordered = list(queue.in_order())
    assert len(ordered) == len(queue) == 340
    scores = [queue.score(job) for job in ordered]
    assert scores == sorted(scores)
    before = 0.0
    for job in ordered:
        assert queue.ahead_s(job) == pytest.approx(before, abs=1e-9)
        before += job.cost_s
    assert queue.total_s() == pytest.approx(before)


def test_a_prefix_that_several_wait_for_counts_once_in_the_backlog() -> None:
    queue = make_queue(keepable_blocks=100)
    jobs = [make_job(i, 40 * BLOCK, 0.0, "p" * 38) for i in range(1, 11)]
    for job in jobs:
        queue.add(job)
    suffix = TIMES.predict(2 * BLOCK, 38 * BLOCK)
    assert queue.total_s() == pytest.approx(jobs[0].remaining_s + 9 * suffix)


def test_a_prefix_that_the_pool_cannot_keep_counts_every_time() -> None:
    queue = make_queue(keepable_blocks=0)
    jobs = [make_job(i, 40 * BLOCK, 0.0, "p" * 38) for i in range(1, 11)]
    for job in jobs:
        queue.add(job)
    assert queue.total_s() == pytest.approx(10 * jobs[0].remaining_s)


def test_tenants_share_by_weight_while_both_wait() -> None:
    queue = make_queue(weights={"big": 3.0})
    for i in range(400):
        queue.add(make_job(i, 100, 0.0, tenant="big" if i < 200 else "small"))
    taken = {"big": 0, "small": 0}
    for _ in range(200):
        head = queue.head()
        assert head is not None
        serve(queue, head)
        taken[head.tenant] += 1
    assert taken["big"] == pytest.approx(150, abs=3)


def test_a_flood_of_short_jobs_leaves_another_tenant_its_share() -> None:
    queue = make_queue()
    queue.add(make_job(0, 3000, 0.0, tenant="quiet"))
    own = queue.total_s()
    spent = 0.0
    for i in range(1, 10_000):
        queue.add(make_job(i, 50, 0.0, tenant="flood"))
        head = queue.head()
        assert head is not None
        serve(queue, head)
        if head.tenant == "quiet":
            break
        spent += head.cost_s
    assert spent < own + 0.1, "it waited for no more service to others than it asked for itself"


def test_a_tenant_that_was_away_saves_nothing_up() -> None:
    queue = make_queue()
    for i in range(100):
        queue.add(make_job(i, 100, 0.0, tenant="busy"))
        serve(queue, job) if (job := queue.head()) else None
    for i in range(100, 120):
        queue.add(make_job(i, 100, 0.0, tenant="busy" if i % 2 else "back"))
    order = []
    for _ in range(10):
        head = queue.head()
        assert head is not None
        serve(queue, head)
        order.append(head.tenant)
    assert 4 <= order.count("back") <= 6


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    queue = make_queue()
    for i in range(10_000):
        queue.add(make_job(i, 10, 0.0, tenant=str(i)))
        queue.remove(i)
    assert len(queue._tenants) <= 5000


def test_rescoring_puts_all_in_the_new_order() -> None:
    queue = make_queue()
    queue.add(make_job(1, 200, 0.0))
    queue.add(make_job(2, 100, 1.0))
    assert queue.head() is queue.get(1)
    queue.rescore(JobTimeModel(0.1, 1e-1, 0.0))
    queue.catch_up(10)
    assert queue.head() is queue.get(2)


@pytest.mark.parametrize(
    ("one", "other", "shared"), [("abcd", "abxd", 2), ("abc", "abc", 3), ("", "a", 0), ("x", "y", 0)]
)
def test_common_blocks(one: str, other: str, shared: int) -> None:
    chain = [[text[: i + 1] for i in range(len(text))] for text in (one, other)]
    assert common_blocks([c.encode() for c in chain[0]], [c.encode() for c in chain[1]], 0, 99) == shared


def test_a_job_waits_once() -> None:
    queue = make_queue()
    queue.add(make_job(1, 10))
    with pytest.raises(ValueError, match="waits already"):
        queue.add(make_job(1, 10))
    assert queue.remove(2) is None
