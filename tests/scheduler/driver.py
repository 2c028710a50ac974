"""Drives a scheduler as the engine does, under a clock that only moves when a pass is computed."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.job import Job
from scheduler.job_time import JobTimeModel
from scheduler.prefix_index import PrefixIndex
from scheduler.scheduler import RunningPass, Scheduler, SchedulerConfig

BLOCK = 16


def make_job(job_id: int, tokens: int, arrival_s: float = 0.0, path: str = "", **more: object) -> Job:
    """A prompt whose first blocks are named after ``path``: one character a block, then the job's own blocks."""
    blocks = tokens // BLOCK
    hashes = [f"{path[: i + 1]}".encode() if i < len(path) else f"{path}/{job_id}/{i}".encode() for i in range(blocks)]
    job = Job(job_id, tokens, arrival_s, hashes, (tokens - 1) // BLOCK, group=job_id)
    for name, value in more.items():
        setattr(job, name, value)
    return job


def make_scheduler(pages: int = 0, model: JobTimeModel | None = None, **config: object) -> Scheduler:
    config.setdefault("block_tokens", BLOCK)
    return Scheduler(
        SchedulerConfig(**config),  # type: ignore[arg-type]
        model or JobTimeModel(0.01, 1e-3, 1e-7),
        PrefixIndex(pages),
    )


class Engine:
    """Computes passes in no time of ours: ``run`` returns what a pass took on the simulated clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.finished: list[tuple[float, Job]] = []

    def begin(self, jobs: Sequence[Job]) -> tuple[RunningPass, list[bytes | int], list[bytes | int]]:
        index = self.scheduler.index
        pinned: list[bytes | int] = []
        kept: list[bytes | int] = []
        segments = self.scheduler.segments_of(jobs)
        for job in jobs:
            cached = index.match(job.block_hashes, job.max_cached_blocks)
            here = list(job.block_hashes[:cached])
            index.pin(here)
            pinned += here
            kept += [block for block, _ in index.allocate(job.block_hashes, cached, self.now)]
        return self.scheduler.begin(jobs, segments, self.now), pinned, kept

    def run(self, jobs: Sequence[Job]) -> float:
        view, pinned, kept = self.begin(jobs)
        self.scheduler.set_running(view)
        self.now += view.predicted_s
        self.scheduler.index.commit(kept)
        self.scheduler.index.unpin(pinned)
        self.scheduler.finished(view, view.predicted_s, self.now)
        self.finished += [(self.now, job) for job in jobs]
        return view.predicted_s

    def run_all(self) -> None:
        while (decision := self.scheduler.next_pass(self.now)).start:
            self.run(decision.start)
