"""The engine thread: takes jobs, asks the scheduler what to run, and steps passes.

Submissions and cancellations come from any thread and take a lock that the engine holds only while it decides, never
while it computes, so a refusal is immediate whatever is running. Between two steps of a pass the engine looks whether
anything arrived and, if the scheduler says so, leaves the pass lying and runs a shorter one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from backends.base import (
    BackendError,
    BadLogits,
    DeadlineUnmeetable,
    OutOfMemory,
    PrefillRequest,
    PrefillResult,
    ShuttingDown,
    Timing,
)
from backends.prefill_only.block_hashes import block_hashes, salt_of
from backends.prefill_only.decoder import Decoder
from backends.prefill_only.forest import ForestJob, build_forest
from backends.prefill_only.metrics import EngineMetrics
from backends.prefill_only.prefill_pass import PassAnswer, PassJob, PrefillPass
from backends.prefill_only.readout import LmHead
from scheduler.job import Job
from scheduler.scheduler import RunningPass, Scheduler

__all__ = ["Engine", "EngineJob"]

log = logging.getLogger("onepass.engine")

Outcome = PrefillResult | BackendError
DoneCallback = Callable[[Sequence[tuple["EngineJob", Outcome]]], None]
Block = bytes | int

_IDLE_WAIT_S = 1.0  # how long the idle engine sleeps at most; whatever arrives wakes it
_EXPIRY_EVERY_S = 0.02  # how often a running pass looks for deadlines that went by


@dataclass(slots=True, eq=False)
class EngineJob:
    """One request on its way through the engine; ``job`` is the scheduler's view of it."""

    job: Job
    request: PrefillRequest
    on_done: DoneCallback
    pass_job: PassJob
    started_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Running:
    """A pass that has begun: computing, or parked."""

    view: RunningPass
    work: PrefillPass
    steps: Iterator[None]
    entries: list[EngineJob]
    cached_tokens: list[int]
    scratch: list[int]  # addresses, given back at the end
    pinned: list[Block]
    kept: dict[Block, int]  # blocks that become readable when the pass ends, and their addresses
    rows: int
    compute_s: float = 0.0


class Engine:
    """Owns the decoder, the KV pages and the scheduler while its thread runs."""

    def __init__(
        self,
        decoder: Decoder,
        head: LmHead | None,
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
        self._rows_held = 0  # hidden rows of passes that have begun
        self._parked: list[_Running] = []
        self._again: deque[list[EngineJob]] = deque()  # taken from the queue, but found no room
        self._jobs: dict[int, EngineJob] = {}
        self._expired_at = 0.0
        self._thread = threading.Thread(target=self._run, name="onepass-engine", daemon=True)
        self.failure: BaseException | None = None  # what ended the thread, if it died

    # --- from other threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.failure is None

    def stats(self) -> Mapping[str, float]:
        """The scheduler's figures and the engine's own, by metric name."""
        with self._lock:
            found = dict(self._scheduler.stats())
            found["jobs_in_engine"] = len(self._jobs)
            found["parked_passes"] = len(self._parked)
            found["parked_bytes"] = sum(r.view.bytes for r in self._parked)
            found["kv_scratch_pages_free"] = self._kv.free_scratch_pages
        return found

    def prepare(self, request: PrefillRequest, on_done: DoneCallback) -> EngineJob:
        """Everything about a job that needs no lock: its block hashes above all."""
        tokens, block = request.token_ids, self._kv.page_tokens
        pass_job = PassJob(tokens, request.readout)
        job = Job(
            job_id=0,
            total_tokens=len(tokens),
            arrival_s=0.0,
            block_hashes=block_hashes(tokens, block, salt_of(request.model, request.tenant, request.cache_salt)),
            max_cached_blocks=pass_job.first_position_read // block,
            tenant=request.tenant,
            priority=request.priority,
        )
        entry = EngineJob(job, request, on_done, pass_job)
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
        """Those that wait leave the queue; those that run are dropped at the next layer,
        and a pass of them alone at the next step. No callback follows."""
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
        now = self._clock()
        with self._lock:
            return self._scheduler.predicted_wait_s([e.job for e in entries], now)

    def begin_drain(self) -> None:
        """Waiting jobs fail with ShuttingDown; running and parked passes go on to their end."""
        with self._lock:
            self._draining = True
            waiting = [*self._scheduler.drain(), *(e.job for group in self._again for e in group)]
            self._again.clear()
            dropped = [self._jobs.pop(job.job_id, None) for job in waiting]
            self._arrived = True
            self._lock.notify()
        _deliver([(e, ShuttingDown("the server is shutting down")) for e in dropped if e is not None])

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
        _deliver([(e, ShuttingDown("the server shut down before this was finished")) for e in left])

    # --- the engine's thread: what to run ----------------------------------------------------------------------------

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
            _deliver([(e, BackendError("the engine failed")) for e in left])

    def _next(self) -> _Running | None:
        """Blocks until there is a pass to step; None when the engine is to end."""
        while True:
            with self._lock:
                self._arrived = False
                self._expire()
                dead = next((r for r in self._parked if r.work.all_cancelled), None)
                if dead is not None:  # what it holds is others' to use
                    self._parked.remove(dead)
                    return dead
                if self._again and not self._parked:
                    entries = self._again.popleft()
                else:
                    # Whoever found no room gets it when a parked pass ends.
                    decision = self._scheduler.next_pass(
                        self._clock(), [r.view for r in self._parked], resume_only=bool(self._again)
                    )
                    if decision.resume is not None:
                        running = next(r for r in self._parked if r.view is decision.resume)
                        self._parked.remove(running)
                        return running
                    entries = [self._jobs[job.job_id] for job in decision.start]
                entries = [e for e in entries if not e.pass_job.cancelled]
                if not entries:
                    if self._stopping and not self._parked:
                        return None
                    if not self._arrived:
                        self._lock.wait(_IDLE_WAIT_S)
                    continue
            started = self._begin(entries)
            if started is not None:
                return started

    def _expire(self) -> None:
        """Fails waiting jobs whose deadline has passed. The lock is held."""
        now = self._expired_at = self._clock()
        late = [self._jobs.pop(job.job_id, None) for job in self._scheduler.expire(now)]
        if late:
            error = DeadlineUnmeetable(
                "the deadline passed while the request waited", self._scheduler.retry_after_s(now)
            )
            _deliver([(e, error) for e in late if e is not None])

    def _begin(self, entries: list[EngineJob]) -> _Running | None:
        """Finds memory for a pass over ``entries`` and lays out its rows; None if there was no room."""
        begun = self._clock()
        pinned: list[Block] = []
        kept: dict[Block, int] = {}
        scratch: list[int] = []

        def scratch_page() -> int:
            scratch.extend(self._kv.take_scratch(1))
            return scratch[-1]

        with self._lock:
            jobs = [self._forest_job(entry, pinned, kept) for entry in entries]
        try:
            forest = build_forest(jobs, self._kv.page_tokens, kept.get, scratch_page)
            room = self._kv.scratch_pages * self._kv.page_tokens - self._rows_held
            if forest.num_rows > room:
                raise MemoryError(f"a pass of {forest.num_rows} rows, room for {room}")
        except MemoryError as error:
            self._kv.give_back(scratch)
            with self._lock:
                self._scheduler.index.abort(list(kept))
                self._scheduler.index.unpin(pinned)
            self._no_room(entries, error)
            return None
        with self._lock:
            view = self._scheduler.begin(
                [e.job for e in entries], [(s.num_rows, s.pos_start) for s in forest.segments], begun
            )
        work = PrefillPass(self._decoder, self._head, forest, [e.pass_job for e in entries])
        view.bytes = work.hidden_bytes
        for entry in entries:
            entry.started_s = begun
        self._rows_held += forest.num_rows
        cached = [rows.cached_tokens for rows in forest.jobs]
        self._metrics.computed_tokens.inc(forest.num_rows)
        self._metrics.cached_tokens.inc(sum(cached))
        self._metrics.shared_tokens.inc(sum(rows.shared_tokens for rows in forest.jobs))
        running = _Running(view, work, work.steps(), entries, cached, scratch, pinned, kept, forest.num_rows)
        running.compute_s = self._clock() - begun
        return running

    def _forest_job(self, entry: EngineJob, pinned: list[Block], kept: dict[Block, int]) -> ForestJob:
        """Pins what is cached and reserves pages for what is to be kept. The lock is held."""
        index, job = self._scheduler.index, entry.job
        hashes = job.block_hashes
        cached = index.match(hashes, job.max_cached_blocks)
        here = hashes[:cached]
        index.pin(here)
        pinned.extend(here)
        granted = index.allocate(hashes, cached, self._clock())
        kept.update((block, self._kv.pool_address(page)) for block, page in granted)
        pages = [self._kv.pool_address(page) for page in index.pages_of(here)]
        return ForestJob(entry.pass_job.token_ids, hashes, pages)

    def _no_room(self, entries: list[EngineJob], error: BaseException) -> None:
        """Several are tried again by halves; one alone waits for parked passes to end, or does not fit at all."""
        half = len(entries) // 2
        if half:
            with self._lock:
                self._again.extend((entries[:half], entries[half:]))
        elif self._parked:
            with self._lock:
                self._again.append(entries)
        else:
            self._metrics.out_of_memory.inc()
            log.warning("a prompt of %d tokens did not fit in memory: %s", entries[0].job.total_tokens, error)
            self._settle(
                [(entries[0], OutOfMemory("this prompt did not fit in memory; try again later or shorten it"))]
            )

    # --- the engine's thread: running a pass -------------------------------------------------------------------------

    def _drive(self, running: _Running) -> None:
        """Steps ``running`` until it ends or is parked."""
        view, work = running.view, running.work
        try:
            before = self._clock()
            with self._lock:
                self._scheduler.set_running(view)
            for _ in running.steps:
                now = self._clock()
                running.compute_s += now - before
                self._metrics.step_seconds.observe(now - before)
                view.remaining_s = view.predicted_s * (1.0 - work.done_fraction)
                if self._arrived or now - self._expired_at > _EXPIRY_EVERY_S:
                    with self._lock:
                        self._arrived = False
                        self._expire()
                        if not self._again and self._scheduler.should_preempt(view, now):
                            self._scheduler.park(view, now)
                            self._parked.append(running)
                            self._metrics.parked.inc()
                            return
                before = self._clock()
            running.compute_s += self._clock() - before
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._end(running, succeeded=False)
            self._no_room([e for e in running.entries if not e.pass_job.cancelled], error)
        except RuntimeError as error:
            self._end(running, succeeded=False)
            if _is_out_of_memory(error):
                self._no_room([e for e in running.entries if not e.pass_job.cancelled], error)
                return
            log.exception("a pass of %d jobs failed", len(running.entries))
            self._settle([(e, BackendError("the engine failed on this request")) for e in running.entries])
        else:
            self._end(running, succeeded=True)
            self._settle([(e, self._outcome(running, i)) for i, e in enumerate(running.entries)])

    def _end(self, running: _Running, *, succeeded: bool) -> None:
        """Gives memory back and makes what was kept readable."""
        view, work = running.view, running.work
        spoilt = any(a is not None and isinstance(a.error, BadLogits) for a in work.answers)
        if spoilt:
            self._kv.scrub([*running.scratch, *running.kept.values()])
        self._kv.give_back(running.scratch)
        self._rows_held -= running.rows
        readable: set[Block] = set()
        if succeeded and not spoilt:  # what only cancelled jobs wanted was not computed to the end
            for entry in running.entries:
                if not entry.pass_job.cancelled:
                    readable.update(h for h in entry.job.block_hashes if h in running.kept)
        index = self._scheduler.index
        now = self._clock()
        with self._lock:
            index.commit([h for h in running.kept if h in readable])
            index.abort([h for h in running.kept if h not in readable])
            index.unpin(running.pinned)
            complete = succeeded and not any(e.pass_job.cancelled for e in running.entries)
            self._scheduler.finished(view, running.compute_s if complete else None, now)
        log.debug(
            "pass: %d jobs, %d tokens computed, %d cached, parked %d times, %.1f ms predicted, %.1f ms taken",
            len(running.entries), running.rows, sum(running.cached_tokens), view.parked_times,
            view.predicted_s * 1e3, running.compute_s * 1e3,
        )  # fmt: skip
        self._metrics.passes.inc()
        self._metrics.pass_seconds.observe(running.compute_s)

    def _outcome(self, running: _Running, i: int) -> Outcome:
        answer, entry = running.work.answers[i], running.entries[i]
        if answer is None:  # cancelled; nobody listens
            return ShuttingDown("the request was cancelled")
        if answer.error is not None:
            return answer.error
        return _result(answer, entry, running.cached_tokens[i], running.compute_s)

    def _settle(self, outcomes: Sequence[tuple[EngineJob, Outcome]]) -> None:
        """Delivers to those that still wait."""
        with self._lock:
            waiting = [(e, o) for e, o in outcomes if self._jobs.pop(e.job.job_id, None) is not None]
        _deliver(waiting)


def _result(answer: PassAnswer, entry: EngineJob, cached_tokens: int, compute_s: float) -> PrefillResult:
    job, next_token = entry.job, answer.next_token
    timing = Timing((entry.started_s - job.arrival_s) * 1e3, job.predicted_s * 1e3, compute_s * 1e3)
    return PrefillResult(
        drawn=next_token.drawn if next_token else (),
        top=next_token.top if next_token else (),
        named=next_token.named if next_token else (),
        prompt=answer.prompt,
        pooled=answer.pooled,
        label_logits=answer.label_logits,
        cached_tokens=cached_tokens,
        timing=timing,
    )


def _deliver(outcomes: Sequence[tuple[EngineJob, Outcome]]) -> None:
    """One call for all that share a callback."""
    by_callback: dict[DoneCallback, list[tuple[EngineJob, Outcome]]] = {}
    for entry, outcome in outcomes:
        by_callback.setdefault(entry.on_done, []).append((entry, outcome))
    for callback, part in by_callback.items():
        callback(part)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """torch's CPU allocator raises a plain RuntimeError."""
    text = str(error)
    return "DefaultCPUAllocator" in text or "out of memory" in text
