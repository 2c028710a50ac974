"""Policies, priorities and life cycle of the scheduler as a whole."""

from __future__ import annotations

import pytest

from scheduler import bench
from scheduler.job_time import JobTimeModel
from scheduler.order import Order
from scheduler.scheduler import SchedulerConfig
from tests.scheduler.driver import BLOCK, Engine, make_job, make_scheduler


def order_of(**config: object) -> list[int]:
    scheduler = make_scheduler(max_pass_jobs=1, **config)
    scheduler.submit_group([make_job(1, 3000, 0.0)], 0.0)
    scheduler.submit_group([make_job(2, 100, 1.0), make_job(3, 500, 1.0)], 1.0)
    scheduler.submit_group([make_job(4, 50, 2.0, priority=1)], 2.0)
    engine = Engine(scheduler)
    engine.run_all()
    return [job.job_id for _, job in engine.finished]


def test_policies_order_by_what_they_are_named_after() -> None:
    assert order_of(policy="fcfs") == [1, 2, 3, 4]
    assert order_of(policy="srjf", fairness=0.0) == [2, 3, 1, 4]
    assert order_of(policy="sjf", fairness=0.0) == [2, 3, 1, 4]
    assert order_of(policy="srjf", fairness=0.0, priority_s=0.0) == [4, 2, 3, 1]
    assert order_of(policy="srjf", fairness=100.0) == [1, 2, 3, 4]


@pytest.mark.parametrize(("policy", "first"), [("srjf", 2), ("sjf", 3)])
def test_only_srjf_follows_the_cache(policy: str, first: int) -> None:
    scheduler = make_scheduler(100, policy=policy, max_pass_jobs=1, fairness=0.0)
    engine = Engine(scheduler)
    scheduler.submit_group([make_job(1, 40 * BLOCK, path="p" * 39)], 0.0)
    running = scheduler.next_pass(0.0).start
    scheduler.submit_group([make_job(2, 41 * BLOCK, path="p" * 39)], 0.0)
    scheduler.submit_group([make_job(3, 10 * BLOCK)], 0.0)
    engine.run(running)  # and now 39 blocks of job 2 are cached
    (job,) = scheduler.next_pass(engine.now).start
    assert job.job_id == first


def test_a_group_over_one_prefix_computes_it_once_in_one_pass() -> None:
    scheduler = make_scheduler(0, saturation_tokens=4000)
    engine = Engine(scheduler)
    scheduler.submit_group([make_job(i, 1000 * BLOCK + 60, path="p" * 1000, group=1) for i in range(1, 51)], 0.0)
    engine.run_all()
    assert scheduler.stats()["passes_started"] == 1
    assert engine.now == pytest.approx(scheduler.model.predict_many([(1000 * BLOCK, 0), *[(60, 1000 * BLOCK)] * 50]))


def test_when_predictions_change_the_waiting_jobs_are_put_in_the_new_order() -> None:
    scheduler = make_scheduler(fairness=1.0, max_pass_jobs=1, model=JobTimeModel(0.0, 1e-3, 0.0, forgetting=0.5))
    scheduler.submit_group([make_job(1, 400, 0.0)], 0.0)  # key 0.4
    scheduler.submit_group([make_job(2, 100, 1.0)], 1.0)  # key 1.1; at ten times the price 4 and 2
    for i in range(40):
        view = scheduler.begin([make_job(100 + i, 1000)], [(1000, 0)], 0.0)
        scheduler.finished(view, 10.0, 0.0)
    assert scheduler.stats()["queue_rescored"] >= 1
    assert scheduler.next_pass(2.0).start[0].job_id == 2


def test_passes_that_were_not_computed_as_planned_teach_nothing() -> None:
    scheduler = make_scheduler()
    before = scheduler.model.coefficients
    view = scheduler.begin([make_job(1, 1000)], [(1000, 0)], 0.0)
    scheduler.finished(view, None, 0.0)
    assert scheduler.model.coefficients == before


def test_extra_time_is_predicted_but_not_learnt() -> None:
    scheduler = make_scheduler()
    before = scheduler.model.coefficients
    job = make_job(1, 1000, extra_s=5.0)
    scheduler.submit_group([job], 0.0)
    assert job.predicted_s == pytest.approx(5.0 + scheduler.model.predict(1000, 0))
    view = scheduler.begin(scheduler.next_pass(0.0).start, [(1000, 0)], 0.0)
    assert view.predicted_s == pytest.approx(job.predicted_s)
    scheduler.finished(view, view.predicted_s, 0.0)
    assert scheduler.model.coefficients == pytest.approx(before, rel=1e-6)


def test_what_must_begin_now_goes_before_what_is_shorter() -> None:
    scheduler = make_scheduler(max_pass_jobs=1)
    scheduler.submit_group([make_job(1, 1000, 0.0, deadline_s=2.0)], 0.0)
    scheduler.submit_group([make_job(2, 500, 0.0)], 0.0)
    assert scheduler.next_pass(0.8).start[0].job_id == 1, "behind the other it would be late"


def test_a_long_pass_is_left_for_what_must_begin_now() -> None:
    scheduler = make_scheduler(max_pass_jobs=1, fairness=0.0)
    scheduler.submit_group([make_job(1, 2000, 0.0)], 0.0)
    view = scheduler.begin(scheduler.next_pass(0.0).start, [(2000, 0)], 0.0)
    scheduler.set_running(view)
    scheduler.submit_group([make_job(2, 1500, 0.0, deadline_s=4.5)], 0.0)
    view.remaining_s = 1.0
    assert not scheduler.should_preempt(view, 1.0), "there is time for both"
    assert scheduler.should_preempt(view, 2.5)


def test_resuming_only_begins_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.submit_group([make_job(1, 10)], 0.0)
    decision = scheduler.next_pass(0.0, resume_only=True)
    assert decision.start == []
    assert decision.resume is None


def test_every_figure_is_a_finite_number_from_the_start() -> None:
    stats = make_scheduler(5).stats()
    assert all(isinstance(value, float) and value == value for value in stats.values())
    assert {"queue_jobs", "queue_tokens", "queue_seconds", "job_time_error_median", "prefix_hit_ratio"} <= set(stats)


@pytest.mark.parametrize(
    "wrong", [{"block_tokens": 0}, {"saturation_tokens": 0}, {"max_pass_jobs": 0}, {"tenant_weights": {"a": 0.0}}]
)
def test_senseless_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|greater than 0"):
        SchedulerConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"policy": "lifo"}, {"fairness": -1.0}, {"priority_s": -1.0}])
def test_senseless_orders_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"policy|negative"):
        Order(**wrong)  # type: ignore[arg-type]


def test_the_benchmark_prints_a_line_for_each_thing(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--jobs", "500", "--repeats", "3"])
    assert capsys.readouterr().out.count("median") == 6
