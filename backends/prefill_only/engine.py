"""The engine thread: takes jobs, asks the scheduler what to run, and steps passes.

Submissions and cancellations come from any thread and take a lock that the engine holds only while it decides, never
while it computes, so a refusal is immediate whatever is running. Between two steps of a pass the engine looks whether
anything arrived and, if the scheduler says so, leaves the pass lying and runs a shorter one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from backends.base import BackendError, OutOfMemory, PrefillRequest, PrefillResult, ShuttingDown, Timing
from backends.prefill_only.block_hashes import block_hashes, salt_of
from backends.prefill_only.decoder import Decoder
from backends.prefill_only.forest import ForestJob, build_forest
from backends.prefill_only.metrics import EngineMetrics
from backends.prefill_only.prefill_pass import PassJob, PrefillPass
from backends.prefill_only.readout import LmHead
from scheduler.admission import Refused
from scheduler.job import Job
from scheduler.scheduler import RunningPass, Scheduler

__all__ = ["Engine", "EngineJob"]

log = logging.getLogger("onepass.engine")

DoneCallback = Callable[[Sequence[tuple["EngineJob", PrefillResult | BackendError]]], None]


@dataclass(slots=True, eq=False)
class EngineJob:
    """One request on its way through the engine; ``job`` is the scheduler's view of it."""

    job: Job
    request: PrefillRequest
    on_done: DoneCallback
    pass_job: PassJob
    started_s: float = 0.0
    alone: bool = False  # after a pass that did not fit in memory


@dataclass(slots=True, eq=False)
class _Running:
    """A pass that has begun: computing, or parked."""

    view: RunningPass
    work: PrefillPass
    steps: Iterator[None]
    jobs: list[EngineJob]
    scratch: list[int]
    pinned: list[int]
    kept: list[tuple[bytes | int, int]]  # blocks that become readable when the pass ends
    predicted_s: float
    compute_s: float = 0.0
    cached: list[int] = field(default_factory=list)


class Engine:
    """Owns the decoder, the KV pages and the scheduler while its thread runs."""

    def __init__(
        self,
        decoder: Decoder,
        head: LmHead,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder, self._head, self._scheduler, self._metrics = decoder, head, scheduler, metrics
        self._kv = decoder.kv
        self._clock = clock
        self._lock = threading.Condition()
        self._arrived = False  # something changed since the engine last asked the scheduler
        self._draining = False
        self._stopping = False
        self._next_id = 0
        self._parked: list[_Running] = []
        self._running: _Running | None = None
        self._jobs: dict[int, EngineJob] = {}
        self._thread = threading.Thread(target=self._run, name="onepass-engine", daemon=True)
        self.failure: BaseException | None = None  # what ended the thread, if it died

    # --- from other threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.failure is None

    def prepare(self, request: PrefillRequest, on_done: DoneCallback) -> EngineJob:
        """Everything about a job that needs no lock: its block hashes above all."""
        tokens, block = request.token_ids, self._kv.page_tokens
        readout = request.readout
        first_needed = len(tokens) - 1
        if readout.prompt_logprobs is not None:
            first_needed = min(first_needed, max(readout.prompt_logprobs_start, 1) - 1)
        job = Job(
            job_id=0,
            total_tokens=len(tokens),
            arrival_s=0.0,
            block_hashes=block_hashes(tokens, block, salt_of(request.model, request.tenant, request.cache_salt)),
            max_cached_blocks=first_needed // block,
            tenant=request.tenant,
            priority=request.priority,
        )
        entry = EngineJob(job, request, on_done, PassJob(tokens, readout))
        job.payload = entry
        return entry

    def submit(self, entries: Sequence[EngineJob]) -> None:
        """All or none. Raises scheduler.admission.Refused, ShuttingDown."""
        now = self._clock()
        with self._lock:
            if self._draining or self.failure is not None:
                raise ShuttingDown("the engine takes no new work")
            for entry in entries:
                self._next_id += 1
                entry.job.job_id = self._next_id
                entry.job.group = entries[0].job.job_id
                entry.job.arrival_s = now
                if entry.request.deadline_s is not None:
                    entry.job.deadline_s = now + entry.request.deadline_s
            self._scheduler.submit_group([e.job for e in entries], now)
            for entry in entries:
                self._jobs[entry.job.job_id] = entry
            self._arrived = True
            self._lock.notify()

    def cancel(self, entries: Sequence[EngineJob]) -> None:
        """Those that wait leave the queue; those that run are dropped at the next layer. No callback follows."""
        with self._lock:
            for entry in entries:
                if self._jobs.pop(entry.job.job_id, None) is None:
                    continue
                entry.pass_job.cancelled = True
                self._scheduler.cancel(entry.job.job_id)
                self._metrics.cancelled.inc()
            self._arrived = True
            self._lock.notify()

    def predicted_wait_s(self, entries: Sequence[EngineJob]) -> float:
        with self._lock:
            return self._scheduler.predicted_wait_s([e.job for e in entries], self._clock())

    def begin_drain(self) -> None:
        """Waiting jobs fail with ShuttingDown; running and parked passes go on to their end."""
        with self._lock:
            self._draining = True
            dropped = [self._jobs.pop(job.job_id, None) for job in self._scheduler.drain()]
            self._arrived = True
            self._lock.notify()
        self._deliver([(e, ShuttingDown("the server is shutting down")) for e in dropped if e is not None])

    def stop(self, grace_s: float) -> None:
        """Waits for running passes up to ``grace_s``, then drops them. Blocks: call it off the event loop."""
        self.begin_drain()
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join(grace_s)
        with self._lock:
            for entry in self._jobs.values():
                entry.pass_job.cancelled = True
        self._thread.join(5.0)
        with self._lock:
            left = list(self._jobs.values())
            self._jobs.clear()
        self._deliver([(e, ShuttingDown("the server shut down before this was finished")) for e in left])

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while (running := self._next()) is not None:
                    self._drive(running)
        except BaseException as error:  # the thread must not die in silence
            log.exception("the engine stopped")
            with self._lock:
                self.failure = error
                left = list(self._jobs.values())
                self._jobs.clear()
            self._deliver([(e, BackendError("the engine failed")) for e in left])

    def _next(self) -> _Running | None:
        """Blocks until there is a pass to step; None when the engine is to end."""
        with self._lock:
            while True:
                self._expire()
                decision = self._scheduler.next_pass(self._clock(), [r.view for r in self._parked])
                if decision.resume is not None:
                    running = next(r for r in self._parked if r.view is decision.resume)
                    self._parked.remove(running)
                    self._running = running
                    return running
                if decision.start:
                    entries = [e for j in decision.start if isinstance(e := j.payload, EngineJob)]
                    running = self._begin(entries)
                    if running is not None:
                        self._running = running
                        return running
                    continue
                if self._stopping and not self._parked:
                    return None
                self._arrived = False
                self._lock.wait()

    def _expire(self) -> None:
        late = [self._jobs.pop(job.job_id, None) for job in self._scheduler.expire(self._clock())]
        if late:
            message = "the deadline passed while the request waited"
            self._deliver([(e, self._scheduler.late(message)) for e in late if e is not None])

    def _begin(self, entries: list[EngineJob]) -> _Running | None:
        """Finds memory for a pass over ``entries`` and lays out its rows."""
        ...
