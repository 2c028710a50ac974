"""Policies under simulated time: what the scheduler promises, seen from outside."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.job_time import JobTimeModel
from scheduler.prefix_index import Block, PrefixIndex
from scheduler.scheduler import Scheduler, SchedulerConfig
from scheduler.simulate import Setting, draw, main, run
from scheduler.simulator import Outcome, Result, best_hit_ratio, lognormal_noise, simulate
from scheduler.workloads import Prompt, Request, bursty, jobs_of, mixed, poisson, post_recommendation, read_trace

TIMES = JobTimeModel(0.005, 1e-4, 1e-9)
BLOCK = 32


def simulated(requests: Sequence[Request], pages: int = 0, sigma: float = 0.0, **config: object) -> Result:
    settings_ = SchedulerConfig(**{"max_queue": None, "block_tokens": BLOCK, **config})  # type: ignore[arg-type]
    scheduler = Scheduler(settings_, JobTimeModel(*TIMES.coefficients), PrefixIndex(pages))
    noise = lognormal_noise(random.Random(9), sigma)
    return simulate(jobs_of(requests, BLOCK), scheduler, TIMES, BLOCK, noise=noise)


def shorts(rate: float, seconds: float, tokens: int = 200, seed: int = 0) -> list[Request]:
    return poisson([Request((Prompt(tokens),))] * int(rate * seconds), rate, random.Random(seed))


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


# --- the simulator itself --------------------------------------------------------------------------------------------


def test_one_request_takes_its_job_time() -> None:
    result = simulated([Request((Prompt(1000),), arrival_s=2.0)])
    assert result.mean_s == pytest.approx(TIMES.predict(1000, 0))
    assert result.outcomes[0].started_s == 2.0


def test_fcfs_is_a_queue_of_the_textbook() -> None:
    """M/D/1 at 70 % load waits ρ/(2(1 − ρ)) service times on average (Pollaczek and Khinchine)."""
    service = TIMES.predict(200, 0)
    requests = shorts(0.7 / service, 10_000 * service / 0.7)
    result = simulated(requests, policy="fcfs", max_pass_jobs=1)
    waited = result.mean_s - service
    assert waited == pytest.approx(service * 0.7 / (2 * 0.3), rel=0.15)


def test_a_request_is_done_when_its_last_prompt_is() -> None:
    result = simulated([Request((Prompt(100), Prompt(8000)))])
    assert result.outcomes[0].finished_s > TIMES.predict(8000, 0)


def test_without_company_and_preemption_it_decides_as_the_papers_algorithm() -> None:
    requests = poisson(post_recommendation(random.Random(1), users=6, posts=12), 6.0, random.Random(2))
    setting = Setting(cache_tokens=40_000)
    ours, paper = run(requests, "srjf", setting), run(requests, "paper", setting)
    # The index knows what waits and keeps that, so ours may only be better.
    assert ours.mean_s <= paper.mean_s * 1.001


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=5), st.integers(0, 4))
def test_the_best_cache_in_hindsight_is_the_best(names: list[str], capacity: int) -> None:
    accesses: list[Sequence[Block]] = [[name[: i + 1].encode() for i in range(len(name))] for name in names]

    def exhaustive(i: int, cached: frozenset[Block]) -> int:
        if i == len(accesses):
            return 0
        hits = 0
        while hits < len(accesses[i]) and accesses[i][hits] in cached:
            hits += 1
        pool = sorted(cached | set(accesses[i]), key=repr)
        size = min(capacity, len(pool))
        return hits + max(exhaustive(i + 1, frozenset(kept)) for kept in itertools.combinations(pool, size))

    asked = sum(len(blocks) for blocks in accesses)
    assert best_hit_ratio(accesses, capacity) * asked == pytest.approx(exhaustive(0, frozenset()))


# --- what policies promise -------------------------------------------------------------------------------------------


def test_short_requests_do_not_wait_behind_a_long_one() -> None:
    long = Request((Prompt(60_000),))
    later = [Request((Prompt(200),), arrival_s=0.5 + 0.2 * i) for i in range(20)]
    result = simulated([long, *later])
    alone = TIMES.predict(200, 0)
    assert TIMES.predict(60_000, 0) > 50 * alone
    assert median([o.latency_s for o in result.outcomes[1:]]) < 3 * alone
    assert result.outcomes[0].latency_s < 1.3 * TIMES.predict(60_000, 0)
    assert 0 < result.parked <= 20


def test_fcfs_makes_them_wait() -> None:
    long = Request((Prompt(60_000),))
    later = [Request((Prompt(200),), arrival_s=0.5 + 0.2 * i) for i in range(20)]
    result = simulated([long, *later], policy="fcfs")
    assert median([o.latency_s for o in result.outcomes[1:]]) > 50 * TIMES.predict(200, 0)


@pytest.mark.parametrize("fairness", [0.1, 0.5])
@pytest.mark.parametrize("hostile", ["steady", "bursty", "growing"])
def test_a_long_job_waits_no_longer_than_the_bound(fairness: float, hostile: str) -> None:
    """Work that is there, plus what arrives within remaining/λ, and no more can go before it."""
    service = TIMES.predict(200, 0)
    rate = 0.9 / service
    rng = random.Random(4)
    one = Request((Prompt(200),))
    if hostile == "steady":
        stream = [Request((Prompt(200),), arrival_s=i / rate) for i in range(int(rate * 60))]
    elif hostile == "bursty":
        stream = bursty([one] * int(rate * 60), rate, rng, burst=40)
    else:  # each newcomer a little longer than the one before it, at a rate that keeps the load
        sizes = [200 + 5 * i for i in range(int(rate * 10))]
        times = itertools.accumulate(TIMES.predict(size, 0) / 0.9 for size in sizes)
        stream = [Request((Prompt(size),), arrival_s=t) for size, t in zip(sizes, times, strict=True)]
    victim = Request((Prompt(20_000),), arrival_s=1.0)
    requests = sorted([*stream, victim], key=lambda request: request.arrival_s)
    at = requests.index(victim)
    own = TIMES.predict(20_000, 0)
    window = own / fairness

    def work(low: float, high: float) -> float:
        return sum(TIMES.predict(r.prompts[0].tokens, 0) for r in requests if low <= r.arrival_s < high and r != victim)

    result = simulated(requests, fairness=fairness)
    before = work(0.0, 1.0)  # some of it is done by then: the bound is not the tighter for it
    outcome = result.outcomes[at]
    assert outcome.started_s - 1.0 <= before + work(1.0, 1.0 + window) + own * 0.1
    assert outcome.latency_s <= before + work(1.0, 1.0 + window) + 1.2 * own


def test_without_credit_for_waiting_a_long_job_starves() -> None:
    service = TIMES.predict(200, 0)
    requests = [Request((Prompt(20_000),)), *shorts(1.05 / service, 40.0)]
    credit = simulated(requests, fairness=0.5, max_parked=0, max_pass_jobs=1)
    none = simulated([Request((Prompt(200),)), *requests], fairness=0.0, max_parked=0, max_pass_jobs=1)
    assert none.outcomes[1].started_s > 1.5 * credit.outcomes[0].started_s


def test_at_ten_times_its_capacity_promises_are_kept_and_the_rest_is_refused_at_once() -> None:
    service = TIMES.predict(380, 0)
    deadline = 2.0
    requests = [
        Request(r.prompts, r.arrival_s, deadline_s=deadline)
        for r in poisson(
            [Request((Prompt(random.Random(i).randint(50, 700)),)) for i in range(int(600 / service))],
            10 / service,
            random.Random(5),
        )
    ]
    result = simulated(requests, sigma=0.05, saturation_tokens=256)
    refused = [o for o in result.outcomes if o.refused]
    accepted = [o for o in result.outcomes if not o.refused]
    assert len(refused) + len(accepted) == len(requests), "nothing is lost"
    assert {o.refused for o in refused} == {"deadline"}
    assert sum(o.in_time for o in accepted) >= 0.99 * len(accepted)
    assert len(accepted) >= 0.08 * len(requests), "the server is busy with what it accepted"
    assert result.most_waiting < 3 * deadline / service
    assert all(0 < o.retry_after_s < 60 for o in refused)


def test_with_a_bounded_queue_it_accepts_again_after_a_burst() -> None:
    burst = [Request((Prompt(400),), arrival_s=1.0)] * 100
    later = [Request((Prompt(400),), arrival_s=10.0)] * 10
    result = simulated([*burst, *later], max_queue=20, max_queue_tokens=6000)
    assert sum(bool(o.refused) for o in result.outcomes[:100]) >= 80
    assert not any(o.refused for o in result.outcomes[100:])


def test_priority_runs_earlier() -> None:
    requests = [Request((Prompt(500),), priority=0)] * 20 + [Request((Prompt(3000),), priority=-1)]
    result = simulated(requests)
    assert result.outcomes[-1].latency_s == pytest.approx(TIMES.predict(3000, 0), rel=0.2)


def test_the_papers_policy_sustains_a_multiple_of_fcfs_and_ours_no_less() -> None:
    requests = post_recommendation(random.Random(0), users=10, posts=20)
    timed = poisson(requests, 6.0, random.Random(1))
    setting = Setting(cache_tokens=70_000)
    fcfs, paper, ours = (run(timed, policy, setting) for policy in ("fcfs", "paper", "onepass"))
    assert fcfs.mean_s > 3 * paper.mean_s
    assert ours.mean_s <= 1.05 * paper.mean_s
    assert ours.quantile_s(0.99) <= 1.1 * paper.quantile_s(0.99)


def test_preemption_and_packing_each_pay_on_mixed_traffic() -> None:
    timed = poisson(mixed(random.Random(0), requests=400, long_share=0.03), 4.0, random.Random(1))
    setting = Setting(times=(0.02, 1e-4, 1e-9), cache_tokens=0)
    plain, preempt, both = (run(timed, policy, setting) for policy in ("srjf", "srjf+preempt", "onepass"))
    assert median(preempt.latencies_s) < 0.6 * median(plain.latencies_s)
    assert both.mean_s < preempt.mean_s
    assert preempt.parked > 0


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_cache_comes_close_to_the_best_in_hindsight(shuffled: bool) -> None:
    """Where no more profiles are current than fit. (With more, drawn at random, no cache without hindsight can.)"""
    users = 20
    rng = random.Random(3)
    requests = post_recommendation(
        rng, users=users, posts=20, profile_tokens=(1100, 1700), post_tokens=150, shuffled=False
    )
    if shuffled:  # five users at a time
        parts = [requests[i : i + 100] for i in range(0, len(requests), 100)]
        for part in parts:
            rng.shuffle(part)
        requests = [request for part in parts for request in part]
    timed = poisson(requests, 12.0, random.Random(1))
    pages = 12_000 // BLOCK
    result = simulated(timed, pages=pages)
    assert result.reuse_ratio >= 0.95 * best_hit_ratio(result.accesses, pages)


# --- traces and the command line -------------------------------------------------------------------------------------

LOG = """
{"arrival": 1700000000.5, "tenant": "a", "backend": "prefill-only", "status": 200, "tokens": [600, 610], \
"cached": [0, 512], "prefix_groups": ["x", "x"]}
{"arrival": 1700000000.2, "tenant": null, "backend": "upstream", "status": 200, "tokens": [], "cached": [], \
"prefix_groups": []}
{"arrival": 1700000000.0, "tenant": null, "backend": "prefill-only", "status": 200, "tokens": [90], "cached": [0], \
"prefix_groups": ["y"]}
"""


def test_the_request_log_is_a_trace() -> None:
    first, second = read_trace(LOG.splitlines())
    assert first == Request((Prompt(90, "y", 0),), 0.0, "")
    assert second.arrival_s == pytest.approx(0.5)
    assert second.prompts == (Prompt(600, "x", 512), Prompt(610, "x", 512))


def test_a_trace_of_ones_own() -> None:
    (request,) = read_trace(['{"arrival_s": 3.0, "prompts": [{"tokens": 10}], "deadline_s": 1.5}'])
    assert request == Request((Prompt(10),), 0.0, deadline_s=1.5)


@pytest.mark.parametrize("line", ["{", "[]", '{"prompts": [{"size": 3}]}', '{"arrival": 1}'])
def test_a_broken_trace_names_the_line(line: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        read_trace(["", line])


def test_the_command_replays_a_trace_and_prints_a_line_a_policy(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"  # type: ignore[operator]
    trace.write_text(LOG)
    main([str(trace), "--policies", "fcfs,onepass", "--best"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "fcfs", "onepass"]
    assert len(lines[1].split()) == len(lines[0].replace(" s ", "_s ").split())


def test_curves_are_drawn_as_png_and_svg(tmp_path: object) -> None:
    pytest.importorskip("matplotlib")
    result = Result([Outcome(0.0, None, 0.0, 1.0)], 1.0)
    png, svg = draw({"fcfs": [(1.0, result), (2.0, result)]}, tmp_path / "curves", "test")  # type: ignore[operator]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()


def test_bursts_keep_the_rate() -> None:
    timed = bursty([Request((Prompt(1),))] * 5000, 10.0, random.Random(1))
    assert 5000 / timed[-1].arrival_s == pytest.approx(10.0, rel=0.2)
    assert len({request.arrival_s for request in timed}) < 1000


def traffic(
    seed: int, load: float, *, tenants: int, priorities: bool, groups: bool, with_deadline: float
) -> list[Request]:
    """Everything mixed: short and long, alone and in groups, with shared prefixes, deadlines tight and loose."""
    rng = random.Random(seed)
    requests, now = [], 0.0
    while now < 40.0:
        tokens = rng.choice((100, 300, 800, 3000, 15_000)) if rng.random() < 0.5 else rng.randint(50, 500)
        prefix = rng.choice(("", "a", "b", "c"))
        count = rng.randint(1, 8) if groups and rng.random() < 0.3 else 1
        shared = 1000 if prefix else 0
        prompts = (Prompt(tokens + shared, prefix, shared),) * count
        work = sum(TIMES.predict(prompt.tokens, 0) for prompt in prompts)
        now += rng.expovariate(load / work)
        deadline = work + rng.choice((0.3, 1.0, 3.0, 10.0)) if rng.random() < with_deadline else None
        tenant = str(rng.randrange(tenants))
        requests.append(Request(prompts, now, tenant, rng.choice((-1, 0, 0, 1)) if priorities else 0, deadline))
    return requests


@pytest.mark.parametrize(
    ("pages", "sigma", "mix"),
    [
        (0, 0.0, {"tenants": 1, "priorities": False, "groups": True, "with_deadline": 1.0}),
        (300, 0.0, {"tenants": 1, "priorities": False, "groups": False, "with_deadline": 1.0}),
        (0, 0.05, {"tenants": 4, "priorities": False, "groups": False, "with_deadline": 1.0}),
        (200, 0.05, {"tenants": 3, "priorities": True, "groups": True, "with_deadline": 0.6}),
    ],
)
def test_promises_are_kept_whatever_comes(pages: int, sigma: float, mix: dict[str, object]) -> None:
    promised = late = 0
    for seed in range(4):
        result = simulated(traffic(seed, 3.0, **mix), pages=pages, sigma=sigma)  # type: ignore[arg-type]
        accepted = [o for o in result.outcomes if not o.refused and o.deadline_s is not None]
        promised += len(accepted)
        late += sum(not o.in_time for o in accepted)
    assert promised > 100
    assert late <= 0.01 * promised, f"{late} of {promised}"
