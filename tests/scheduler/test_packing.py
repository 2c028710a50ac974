from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.job import Job
from scheduler.job_time import JobTimeModel
from scheduler.packing import PackLimits, pack, segments_of
from tests.scheduler.driver import BLOCK, make_job

TIMES = JobTimeModel(0.02, 1e-4, 0.0)  # the fixed part is 200 tokens' worth
WIDE = PackLimits(saturation_tokens=1000, block_tokens=BLOCK, delay_share=100.0)


def keyed(jobs: list[Job]) -> list[Job]:
    for job in jobs:
        job.remaining_s = TIMES.predict(job.total_tokens, 0)
        job.key = job.remaining_s
    return sorted(jobs, key=lambda job: (job.key, job.job_id))


def test_short_jobs_fill_a_pass_in_order_up_to_the_saturation_point() -> None:
    jobs = keyed([make_job(i, 300) for i in range(6)])
    packed = pack(jobs[0], [], jobs, TIMES, WIDE, 0.0)
    assert packed == jobs[:3]


def test_a_job_that_saturates_the_device_runs_alone() -> None:
    jobs = keyed([make_job(1, 1200), make_job(2, 20), make_job(3, 20)])
    large = next(job for job in jobs if job.job_id == 1)
    assert pack(large, [], [large, *jobs], TIMES, WIDE, 0.0) == [large]


def test_siblings_join_even_a_large_head_because_they_add_only_their_ends() -> None:
    jobs = [make_job(i, 100 * BLOCK + 50, path="p" * 100) for i in range(5)]
    stranger = make_job(9, 30)
    packed = pack(jobs[0], jobs[1:], [stranger], TIMES, WIDE, 0.0)
    assert packed == jobs
    assert sum(new for new, _ in segments_of(packed, BLOCK)) == 100 * BLOCK + 5 * 50


def test_siblings_go_before_others() -> None:
    head = make_job(1, 10 * BLOCK, path="ppppp")
    sibling = make_job(2, 10 * BLOCK, path="ppppp")
    others = keyed([make_job(i, 5 * BLOCK) for i in range(3, 20)])
    packed = pack(head, [sibling], others, TIMES, WIDE, 0.0)
    assert packed[:2] == [head, sibling]
    assert sum(new for new, _ in segments_of(packed, BLOCK)) <= 1000


def test_sharing_a_few_tokens_is_no_reason_to_overtake() -> None:
    head, distant = make_job(1, 10 * BLOCK, path="s"), make_job(3, 20 * BLOCK, path="s")
    second = make_job(2, 12 * BLOCK)
    assert pack(head, [distant], [head, second, distant], TIMES, WIDE, 0.0) == [head, second, distant]


def test_nobody_is_passed_over() -> None:
    jobs = [make_job(1, 100), make_job(2, 990), make_job(3, 100)]
    assert pack(jobs[0], [], jobs, TIMES, WIDE, 0.0) == jobs[:1]


def test_company_delays_the_head_by_no_more_than_its_share() -> None:
    limits = PackLimits(saturation_tokens=10_000, block_tokens=BLOCK, delay_share=0.5)
    jobs = keyed([make_job(i, 100, arrival_s=10.0) for i in range(50)])
    fresh = pack(jobs[0], [], jobs, TIMES, limits, 10.0)
    alone = TIMES.predict(100, 0)
    assert 1 < len(fresh) < 50
    assert TIMES.predict_many(segments_of(fresh, BLOCK)) <= 1.5 * alone
    waited = pack(jobs[0], [], jobs, TIMES, limits, 11.0)
    assert len(waited) > len(fresh), "a head that has waited a second can spare more"
    assert TIMES.predict_many(segments_of(waited, BLOCK)) - alone <= 0.5 * (1.0 + alone)


def test_its_own_group_may_delay_the_head() -> None:
    limits = PackLimits(saturation_tokens=10_000, block_tokens=BLOCK, delay_share=0.0)
    group = keyed([make_job(i, 100, group=7) for i in range(20)])
    assert pack(group[0], group[1:], group, TIMES, limits, 0.0) == group


def test_company_makes_nobody_late() -> None:
    jobs = keyed([make_job(i, 300) for i in range(3)])
    jobs[0].deadline_s = TIMES.predict(300, 0) + 0.001
    assert pack(jobs[0], [], jobs, TIMES, WIDE, 0.0) == jobs[:1]
    jobs[0].deadline_s = None
    jobs[1].deadline_s = TIMES.predict(300, 0) + 0.001
    assert pack(jobs[0], [], jobs, TIMES, WIDE, 0.0) == jobs[:1]


def test_a_pass_has_so_many_jobs_at_most() -> None:
    jobs = keyed([make_job(i, 1) for i in range(30)])
    limits = PackLimits(saturation_tokens=1000, block_tokens=BLOCK, delay_share=10.0, max_jobs=4)
    assert len(pack(jobs[0], jobs[1:5], jobs, TIMES, limits, 0.0)) == 4


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.text("ab", max_size=6), st.integers(0, 8), st.integers(1, BLOCK)), min_size=1, max_size=8))
def test_a_pass_computes_each_block_once(shapes: list[tuple[str, int, int]]) -> None:
    jobs = [make_job(i, blocks * BLOCK + spare, path=name) for i, (name, blocks, spare) in enumerate(shapes)]
    computed = 0
    seen: set[int | bytes] = set()
    for job in jobs:
        whole = (job.total_tokens - 1) // BLOCK  # the last token is computed for each job
        new = [block for block in job.block_hashes[:whole] if block not in seen]
        seen.update(new)
        computed += len(new) * BLOCK + job.total_tokens - whole * BLOCK
    assert sum(new for new, _ in segments_of(jobs, BLOCK)) == computed


def test_jobs_share_only_behind_the_same_cached_part() -> None:
    one, other = make_job(1, 6 * BLOCK, path="ppppp"), make_job(2, 6 * BLOCK, path="ppppp")
    one.cached_blocks = 3
    assert segments_of([one, other], BLOCK) == [(3 * BLOCK, 3 * BLOCK), (6 * BLOCK, 0)]
