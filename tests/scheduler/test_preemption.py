"""When a pass that has begun is left for a shorter job."""

from __future__ import annotations

from scheduler.job import Job
from scheduler.job_time import JobTimeModel
from scheduler.prefix_index import PrefixIndex
from scheduler.scheduler import RunningPass, Scheduler, SchedulerConfig


def scheduler_of(**config: object) -> Scheduler:
    return Scheduler(SchedulerConfig(**config), JobTimeModel(0.01, 1e-3, 0.0), PrefixIndex(0))  # type: ignore[arg-type]


def begin(scheduler: Scheduler, job_id: int, tokens: int, now: float, tenant: str = "") -> RunningPass:
    scheduler.submit_group([Job(job_id, tokens, now, tenant=tenant, group=job_id)], now)
    (job,) = scheduler.next_pass(now).start
    running = scheduler.begin([job], [(tokens, 0)], now)
    scheduler.set_running(running)
    return running


def test_a_short_job_of_the_same_tenant_takes_over_from_the_first_moment() -> None:
    scheduler = scheduler_of()
    for round_ in range(3):  # whatever service the tenant has had before
        running = begin(scheduler, 10 * round_, 4000, 100.0 * round_)
        scheduler.submit_group([Job(10 * round_ + 1, 100, 100.0 * round_ + 0.05, group=1)], 100.0 * round_ + 0.05)
        assert scheduler.should_preempt(running, 100.0 * round_ + 0.06)
        scheduler.park(running, 100.0 * round_ + 0.06)
        (short,) = scheduler.next_pass(100.0 * round_ + 0.06, [running]).start
        view = scheduler.begin([short], [(100, 0)], 0.0)
        scheduler.set_running(view)
        scheduler.finished(view, 0.11, 0.0)
        assert scheduler.next_pass(100.0 * round_ + 0.2, [running]).resume is running
        scheduler.set_running(running)
        scheduler.finished(running, 4.01, 0.0)


def test_a_job_that_is_not_much_shorter_waits() -> None:
    scheduler = scheduler_of()
    running = begin(scheduler, 1, 1000, 0.0)
    scheduler.submit_group([Job(2, 950, 0.1, group=2)], 0.1)
    assert not scheduler.should_preempt(running, 0.1)
    running.remaining_s = 0.2
    scheduler.submit_group([Job(3, 170, 0.1, group=3)], 0.1)
    assert not scheduler.should_preempt(running, 0.1)


def test_no_pass_is_parked_more_often_than_allowed() -> None:
    scheduler = scheduler_of(max_parked_times=2)
    running = begin(scheduler, 1, 4000, 0.0)
    for i in range(2):
        scheduler.submit_group([Job(10 + i, 10, 0.1, group=10 + i)], 0.1)
        assert scheduler.should_preempt(running, 0.1)
        scheduler.park(running, 0.1)
        (short,) = scheduler.next_pass(0.1, [running]).start
        view = scheduler.begin([short], [(10, 0)], 0.1)
        scheduler.finished(view, 0.02, 0.1)
        scheduler.set_running(running)
    scheduler.submit_group([Job(20, 10, 0.2, group=20)], 0.2)
    assert not scheduler.should_preempt(running, 0.2)


def test_only_srjf_preempts() -> None:
    for policy in ("sjf", "fcfs"):
        scheduler = scheduler_of(policy=policy)
        running = begin(scheduler, 1, 4000, 0.0)
        scheduler.submit_group([Job(2, 10, 0.1, group=2)], 0.1)
        assert not scheduler.should_preempt(running, 0.1)


def test_a_tenants_turn_is_not_taken_back_once_its_pass_has_begun() -> None:
    scheduler = scheduler_of(fairness=0.0)
    now, ids = 0.0, 100
    scheduler.submit_group([Job(1, 2000, 0.0, tenant="quiet", group=1)], 0.0)
    while True:  # the flood is served until it has had as much as the quiet one asks for
        ids += 1
        scheduler.submit_group([Job(ids, 50, now, tenant="flood", group=ids)], now)
        (job,) = scheduler.next_pass(now).start
        view = scheduler.begin([job], [(job.total_tokens, 0)], now)
        scheduler.set_running(view)
        if job.tenant == "quiet":
            break
        now += view.predicted_s
        view.remaining_s = 0.0
        scheduler.finished(view, view.predicted_s, now)
    assert 1.8 < now < 2.2
    for done in range(9):
        view.remaining_s = view.predicted_s * (1 - done / 10)
        scheduler.submit_group([Job(ids + 1 + done, 50, now, tenant="flood", group=ids)], now)
        assert not scheduler.should_preempt(view, now)
    scheduler.submit_group([Job(9999, 50, now, tenant="quiet", group=9999)], now)
    view.remaining_s = view.predicted_s
    assert scheduler.should_preempt(view, now), "its own short jobs overtake it all the same"
