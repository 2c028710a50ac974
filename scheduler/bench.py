"""``python -m scheduler.bench``: what deciding and calibrating cost with many jobs waiting. Needs no model.

Times are CPU time of this thread: what else runs on the machine is not the scheduler's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

from scheduler.job import Job
from scheduler.job_time import JobTimeModel
from scheduler.prefix_index import PrefixIndex
from scheduler.scheduler import Scheduler, SchedulerConfig

__all__ = ["main"]

_BLOCK_TOKENS = 32
_PREFIX_BLOCKS = 64
_POSTS = 50


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scheduler.bench", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000, help="jobs waiting (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=300, help="times each thing is done (default: %(default)s)")
    options = parser.parse_args(arguments)
    alone, _ = _filled(options.jobs, max_pass_jobs=1)
    scheduler, index = _filled(options.jobs)
    print(f"{options.jobs} jobs waiting, {_POSTS} for each shared prefix of {_PREFIX_BLOCKS} blocks")
    rng = random.Random(1)

    ids = iter(range(options.jobs + 1, 10 * options.jobs))
    _report("submit one job", options.repeats, lambda: _submit_one(scheduler, rng, next(ids), options.jobs))
    _report("decide on a pass of one job", options.repeats, lambda: alone.next_pass(100.0))
    started = scheduler.stats()["queue_jobs"]
    _report("decide on a pass and pack it", options.repeats, lambda: scheduler.next_pass(100.0))
    packed = (started - scheduler.stats()["queue_jobs"]) / options.repeats
    print(f"  (such a pass took {packed:.1f} jobs from the queue)")
    running = scheduler.begin([_job(0, rng, 0)], [(4096, 0)], 100.0)
    _report("ask whether to preempt", options.repeats, lambda: scheduler.should_preempt(running, 100.0))

    users = options.jobs // _POSTS
    inserted: list[float] = []
    evicted: list[float] = []
    for i in range(options.repeats):
        user = rng.randrange(users)
        path = [_block(user, 0)]
        granted = index.allocate(path, index.match(path, 1), 100.0 + i)
        begun = time.thread_time()
        index.commit([block for block, _ in granted])
        if granted:
            inserted.append(time.thread_time() - begun)
        # The pool holds one page: allocating another block evicts this one, and its waiting jobs are told.
        other = [f"other {i}".encode()]
        index.demand = _Nobody()
        begun = time.thread_time()
        granted = index.allocate(other, 0, 100.0 + i)
        evicted.append(time.thread_time() - begun)
        index.abort([block for block, _ in granted])
    _print_times(f"insert a block that {_POSTS} jobs wait for", inserted)
    _print_times(f"evict a block that {_POSTS} jobs would read", evicted)


class _Nobody:
    """Lets wanted blocks be evicted, which is what is to be measured."""

    def wanted(self, block: int | bytes) -> bool:
        return False

    def wanted_depth(self, hashes: Sequence[int | bytes], start: int) -> int:
        return start


def _filled(jobs: int, max_pass_jobs: int = 256) -> tuple[Scheduler, PrefixIndex]:
    index = PrefixIndex(1)
    settings = SchedulerConfig(
        max_queue=None, block_tokens=_BLOCK_TOKENS, saturation_tokens=2048, max_pass_jobs=max_pass_jobs
    )
    scheduler = Scheduler(settings, JobTimeModel(0.005, 2.5e-4, 2e-8), index)
    rng = random.Random(0)
    for job_id in range(1, jobs + 1):
        scheduler.submit_group([_job(job_id, rng, rng.randrange(max(1, jobs // _POSTS)))], 100.0 * job_id / jobs)
    return scheduler, index


def _submit_one(scheduler: Scheduler, rng: random.Random, job_id: int, jobs: int) -> None:
    scheduler.submit_group([_job(job_id, rng, rng.randrange(jobs // _POSTS))], 100.0)


def _job(job_id: int, rng: random.Random, user: int) -> Job:
    blocks = [_block(user, i) for i in range(_PREFIX_BLOCKS)]
    tokens = _PREFIX_BLOCKS * _BLOCK_TOKENS + rng.randrange(20, 300)
    return Job(job_id, tokens, 100.0 * rng.random(), blocks, _PREFIX_BLOCKS, group=job_id)


def _block(user: int, i: int) -> bytes:
    return user.to_bytes(8, "big") + i.to_bytes(8, "big")


def _report(what: str, repeats: int, do: Callable[[], object]) -> None:
    taken = []
    for _ in range(repeats):
        begun = time.thread_time()
        do()
        taken.append(time.thread_time() - begun)
    _print_times(what, taken)


def _print_times(what: str, taken: Sequence[float]) -> None:
    ordered = sorted(taken)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    print(f"{what:45s} median {statistics.median(ordered) * 1e6:8.1f} µs   p99 {p99 * 1e6:8.1f} µs")


if __name__ == "__main__":
    main()
