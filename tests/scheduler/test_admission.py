"""Bounds and promises. Times are the model's: 0.01 s a pass, 1 ms a token."""

from __future__ import annotations

import pytest

from scheduler.admission import Bounds, Load, Refused, check_bounds
from scheduler.job import Job
from scheduler.scheduler import Scheduler
from tests.scheduler.driver import Engine, make_job, make_scheduler


def submit(scheduler: Scheduler, *jobs: Job, now: float = 0.0) -> None:
    scheduler.submit_group(jobs, now)


def refusal(scheduler: Scheduler, *jobs: Job, now: float = 0.0) -> Refused:
    with pytest.raises(Refused) as caught:
        scheduler.submit_group(jobs, now)
    return caught.value


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ({"max_queue": 3}, "queue_full"),
        ({"max_queue_tokens": 350}, "queue_tokens"),
        ({"max_queue_s": 0.4}, "queue_seconds"),
        ({"tenant_max_queue": 3}, "tenant"),
        ({"tenant_max_queue_tokens": 350}, "tenant"),
        ({"tenant_max_queue_s": 0.4}, "tenant"),
    ],
)
def test_a_full_queue_refuses_and_accepts_again_when_the_backlog_falls(bound: dict[str, float], reason: str) -> None:
    scheduler = make_scheduler(**bound)
    submit(scheduler, *(make_job(i, 100, group=1) for i in (1, 2, 3)))
    refused = refusal(scheduler, make_job(4, 100))
    assert refused.reason == reason
    assert 0 < refused.retry_after_s < 10
    assert scheduler.stats()["queue_jobs"] == 3
    assert scheduler.stats()[f"refused_{reason}"] == 1
    scheduler.cancel(2)
    submit(scheduler, make_job(5, 100))


def test_one_tenants_bound_does_not_concern_another() -> None:
    scheduler = make_scheduler(tenant_max_queue=1)
    submit(scheduler, make_job(1, 100, tenant="a"))
    assert refusal(scheduler, make_job(2, 100, tenant="a")).reason == "tenant"
    submit(scheduler, make_job(3, 100, tenant="b"))


def test_a_group_waits_whole_or_not_at_all() -> None:
    scheduler = make_scheduler(max_queue=3)
    submit(scheduler, make_job(1, 100))
    refusal(scheduler, *(make_job(i, 100, group=2) for i in (2, 3, 4)))
    assert scheduler.stats()["queue_jobs"] == 1
    submit(scheduler, *(make_job(i, 100, group=2) for i in (2, 3)))


def test_more_prompts_than_can_ever_wait_are_refused_with_that_reason() -> None:
    scheduler = make_scheduler(max_queue=2)
    assert "at most 2" in str(refusal(scheduler, *(make_job(i, 10, group=1) for i in (1, 2, 3))))


def test_an_empty_queue_takes_a_request_of_any_size() -> None:
    scheduler = make_scheduler(max_queue_tokens=10, max_queue_s=0.001)
    submit(scheduler, make_job(1, 5000))


def test_retry_after_is_the_time_in_which_room_comes_free() -> None:
    waiting = Load(10, 1000, 20.0)
    with pytest.raises(Refused) as caught:
        check_bounds(waiting, Load(2, 10, 1.0), Bounds(jobs=10), tenant=False, before_s=3.0)
    assert caught.value.retry_after_s == pytest.approx(3.0 + 20.0 * 2 / 10)


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    scheduler = make_scheduler()
    assert refusal(scheduler, make_job(1, 1000, deadline_s=0.5)).reason == "deadline"
    submit(scheduler, make_job(2, 1000, deadline_s=2.0))
    scheduler = make_scheduler(max_queue=None)
    submit(scheduler, *(make_job(i, 200, group=1) for i in range(1, 11)))  # 2.1 s of work
    assert refusal(scheduler, make_job(11, 300, deadline_s=1.0)).reason == "deadline"
    submit(scheduler, make_job(12, 100, deadline_s=1.0))


def test_what_runs_counts_unless_it_would_be_parked() -> None:
    for policy, accepted in (("srjf", True), ("sjf", False)):
        scheduler = make_scheduler(policy=policy)
        view = scheduler.begin([long := make_job(1, 5000)], [(5000, 0)], 0.0)
        long.remaining_s = view.predicted_s
        scheduler.set_running(view)
        if accepted:
            submit(scheduler, make_job(2, 100, deadline_s=1.0))
        else:
            assert refusal(scheduler, make_job(2, 100, deadline_s=1.0)).reason == "deadline"


def test_the_default_deadline_counts_from_submission() -> None:
    scheduler = make_scheduler(default_deadline_s=1.0)
    job = make_job(1, 100)
    submit(scheduler, job, now=5.0)
    assert job.deadline_s == 6.0
    assert refusal(scheduler, make_job(2, 2000), now=5.0).reason == "deadline"


def test_a_newcomer_goes_behind_whoever_it_would_make_late() -> None:
    scheduler = make_scheduler(deadline_margin=0.0)
    promised = make_job(1, 500, deadline_s=0.6)
    submit(scheduler, promised)
    newcomer = make_job(2, 200)
    submit(scheduler, newcomer)
    engine = Engine(scheduler)
    engine.run_all()
    assert [job for _, job in engine.finished] == [promised, newcomer]
    assert engine.finished[0][0] <= 0.6


def test_a_newcomer_that_can_be_on_time_neither_before_nor_behind_a_promise_is_refused() -> None:
    scheduler = make_scheduler(deadline_margin=0.0)
    submit(scheduler, make_job(1, 500, deadline_s=0.6))
    assert refusal(scheduler, make_job(2, 200, deadline_s=0.6)).reason == "deadline"
    submit(scheduler, make_job(3, 200, deadline_s=0.8))


def test_a_group_that_shares_a_prefix_is_promised_what_it_really_takes() -> None:
    scheduler = make_scheduler(200)
    group = [
        make_job(i, 1010, path="p" * 62, group=1, deadline_s=3.0) for i in range(1, 21)
    ]  # 20 s if each computed it
    submit(scheduler, *group)
    engine = Engine(scheduler)
    engine.run_all()
    assert engine.now < 3.0


def test_predicted_wait_is_of_the_whole_backlog_and_leaves_no_trace() -> None:
    scheduler = make_scheduler()
    job = make_job(1, 300)
    before = scheduler.predicted_wait_s([job], 0.0)
    submit(scheduler, *(make_job(i, 100, group=2) for i in range(2, 12)))
    after = scheduler.predicted_wait_s([job], 0.0)
    assert after - before == pytest.approx(10 * 0.1105, rel=0.05)
    assert scheduler.stats()["queue_jobs"] == 10
    assert job.job_id == 1


def test_jobs_that_cannot_be_on_time_any_more_expire() -> None:
    scheduler = make_scheduler()
    submit(scheduler, early := make_job(1, 100, deadline_s=1.0), late := make_job(2, 100, deadline_s=5.0))
    assert scheduler.expire(0.5) == []
    assert scheduler.expire(0.95) == [early], "0.11 s of work do not fit into 0.05 s"
    assert scheduler.expire(10.0) == [late]
    assert scheduler.expire(10.0) == []
    assert scheduler.stats()["queue_jobs"] == 0


def test_deadlines_of_jobs_that_left_are_forgotten() -> None:
    scheduler = make_scheduler()
    for i in range(5000):
        submit(scheduler, make_job(i, 10, deadline_s=1e9), now=float(i))
        scheduler.cancel(i)
    assert len(scheduler._latest_starts) < 1000


def test_draining_empties_the_queue_and_nothing_else() -> None:
    scheduler = make_scheduler()
    submit(scheduler, *(make_job(i, 100, group=1) for i in range(5)))
    running = scheduler.next_pass(0.0).start
    waiting = scheduler.drain()
    assert len(running) + len(waiting) == 5
    assert scheduler.next_pass(0.0).start == []
    assert scheduler.stats()["queue_tokens"] == 0


def test_prompts_of_equal_length_wait_for_each_other() -> None:
    scheduler = make_scheduler()
    group = [make_job(i, 1000, group=1) for i in range(1, 5)]
    assert scheduler.predicted_wait_s(group, 0.0) == pytest.approx(4 * 1.06, rel=0.01)
