"""The engine thread with a real scheduler, around a small random model."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from backends.base import BackendError, BadLogits, OutOfMemory, PrefillRequest, PrefillResult, Readout, ShuttingDown
from backends.prefill_only import prefill_pass
from backends.prefill_only.direct import run_directly
from backends.prefill_only.engine import Engine, EngineJob
from backends.prefill_only.metrics import EngineMetrics
from backends.prefill_only.prefill_pass import PassJob
from scheduler.admission import Refused
from scheduler.job_time import JobTimeModel
from scheduler.prefix_index import PrefixIndex
from scheduler.scheduler import Scheduler, SchedulerConfig
from tests.backends.prefill_only.tiny import TINY, tiny_decoder, tiny_weights

WAIT_S = 60.0


class Harness:
    """Submits requests to an engine and collects what comes back."""

    def __init__(self, *, pool_pages: int = 64, scratch_pages: int = 256, weights=None, **config: object) -> None:
        self.decoder, self.head = tiny_decoder(pool_pages=pool_pages, scratch_pages=scratch_pages, weights=weights)
        self.metrics = EngineMetrics()
        self.scheduler = Scheduler(
            SchedulerConfig(block_tokens=32, **config),  # type: ignore[arg-type]
            JobTimeModel(1e-3, 1e-5, 0.0),
            PrefixIndex(pool_pages),
        )
        self.engine = Engine(self.decoder, self.head, self.scheduler, self.metrics)
        self._done: queue.Queue[tuple[EngineJob, PrefillResult | BackendError]] = queue.Queue()
        self._outcomes: dict[EngineJob, PrefillResult | BackendError] = {}

    def prepare(self, prompt: Sequence[int], salt: str = "", **more: object) -> EngineJob:
        readout = more.pop("readout", Readout(top_logprobs=5))
        request = PrefillRequest(model="m", token_ids=prompt, readout=readout, cache_salt=salt, **more)  # type: ignore[arg-type]
        return self.engine.prepare(request, self._collect)

    def submit(self, prompt: Sequence[int], salt: str = "", **more: object) -> EngineJob:
        entry = self.prepare(prompt, salt, **more)
        self.engine.submit([entry])
        return entry

    def outcome(self, entry: EngineJob) -> PrefillResult | BackendError:
        while entry not in self._outcomes:
            done, outcome = self._done.get(timeout=WAIT_S)
            assert done not in self._outcomes
            self._outcomes[done] = outcome
        return self._outcomes[entry]

    def result(self, entry: EngineJob) -> PrefillResult:
        outcome = self.outcome(entry)
        assert isinstance(outcome, PrefillResult), outcome
        return outcome

    def alone(self, prompt: Sequence[int], readout: Readout | None = None):
        """What a fresh decoder says; the engine's own must not be shared with its thread."""
        decoder, head = tiny_decoder(weights=self.decoder.weights)
        return run_directly(decoder, head, [PassJob(prompt, readout or Readout(top_logprobs=5))])[0]

    def _collect(self, finished: Sequence[tuple[EngineJob, PrefillResult | BackendError]]) -> None:
        for pair in finished:
            self._done.put(pair)


@contextmanager
def running(harness: Harness) -> Iterator[Harness]:
    harness.engine.start()
    try:
        yield harness
        assert harness.engine.failure is None
        free = harness.decoder.kv.free_scratch_pages
    finally:
        harness.engine.stop(WAIT_S)
    assert free == harness.decoder.kv.scratch_pages, "scratch pages leaked"


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY.vocab_size) for _ in range(length)]


@contextmanager
def held_at_first_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(reached, go on): the next pass stops after its first step until told to go on."""
    reached, go_on = threading.Event(), threading.Event()
    original = prefill_pass.PrefillPass.steps

    def steps(self: prefill_pass.PrefillPass) -> Iterator[None]:
        for i, step in enumerate(original(self)):
            if i == 0 and not reached.is_set():
                reached.set()
                assert go_on.wait(WAIT_S)
            yield step

    monkeypatch.setattr(prefill_pass.PrefillPass, "steps", steps)
    yield reached, go_on
    go_on.set()


@pytest.mark.parametrize("length", [31, 32, 33, 64, 65, 100])
def test_a_second_sending_reads_the_cache_and_says_the_same(length: int) -> None:
    with running(Harness()) as harness:
        prompt = prompt_of(length, length)
        first = harness.result(harness.submit(prompt))
        second = harness.result(harness.submit(prompt))
        assert (first.cached_tokens, second.cached_tokens) == (0, (length - 1) // 32 * 32)
        assert first.top == second.top == harness.alone(prompt).next_token.top


def test_prompt_scores_are_the_same_on_a_warm_cache() -> None:
    readout = Readout(top_logprobs=2, prompt_logprobs=2)
    with running(Harness()) as harness:
        for length in (31, 32, 33, 150):
            prompt = prompt_of(length, length)
            first = harness.result(harness.submit(prompt, readout=readout))
            harness.result(harness.submit(prompt[:40] + prompt_of(20, 1), readout=readout))
            harness.result(harness.submit(prompt))
            second = harness.result(harness.submit(prompt, readout=readout))
            assert first.prompt == second.prompt == harness.alone(prompt, readout).prompt
            assert second.cached_tokens == 0


def test_another_salt_or_tenant_shares_nothing() -> None:
    with running(Harness()) as harness:
        prompt = prompt_of(100, 0)
        harness.result(harness.submit(prompt, "a", tenant="alice"))
        assert harness.result(harness.submit(prompt, "b", tenant="alice")).cached_tokens == 0
        assert harness.result(harness.submit(prompt, "a", tenant="bob")).cached_tokens == 0
        assert harness.result(harness.submit(prompt, "a", tenant="alice")).cached_tokens == 96


@pytest.mark.parametrize("pool_pages", [0, 3, 12])
def test_many_random_requests_equal_their_solo_runs(pool_pages: int) -> None:
    """With eviction under way all the time, and memory for a few passes at once only."""
    rng = random.Random(pool_pages)
    stems = [prompt_of(n, n) for n in (40, 64, 150)]
    prompts = [rng.choice(stems)[: rng.randrange(1, 150)] + prompt_of(rng.randrange(1, 60), i) for i in range(60)]
    with running(Harness(pool_pages=pool_pages, scratch_pages=24, saturation_tokens=300)) as harness:
        entries = [harness.submit(prompt, tenant=f"t{i % 2}") for i, prompt in enumerate(prompts)]
        for entry, prompt in zip(entries, prompts, strict=True):
            assert harness.result(entry).top == harness.alone(prompt).next_token.top


def test_a_shorter_job_takes_over_a_running_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Harness(hysteresis_s=0.0)) as harness, held_at_first_step(monkeypatch) as (reached, go_on):
        long_prompt, short_prompt = prompt_of(1500, 1), prompt_of(10, 2)
        long = harness.submit(long_prompt)
        assert reached.wait(WAIT_S)
        short = harness.submit(short_prompt)
        go_on.set()
        assert harness.result(short).top == harness.alone(short_prompt).next_token.top
        assert harness.result(long).top == harness.alone(long_prompt).next_token.top
        assert harness.metrics.parked._value.get() == 1
        assert short.started_s + 1e-9 > long.started_s and harness.engine.stats()["preemptions"] == 1


def test_cancelled_jobs_never_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Harness(policy="fcfs")) as harness, held_at_first_step(monkeypatch) as (reached, go_on):
        runs = harness.submit(prompt_of(300, 1))
        assert reached.wait(WAIT_S)
        waits, stays = harness.submit(prompt_of(50, 2)), harness.submit(prompt_of(60, 3))
        harness.engine.cancel([runs, waits])
        go_on.set()
        harness.result(stays)
        assert harness.engine.stats()["jobs_in_engine"] == 0
        assert set(harness._outcomes) == {stays}
        # What the cancelled pass had begun to keep is not readable.
        assert harness.result(harness.submit(prompt_of(300, 1))).cached_tokens == 0


def test_a_parked_pass_that_nobody_waits_for_ends_before_others_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    original_end, original_steps = Engine._end, prefill_pass.PrefillPass.steps

    def end(self: Engine, running, *, succeeded: bool) -> None:
        original_end(self, running, succeeded=succeeded)
        ended.append(running.rows)

    def steps(self: prefill_pass.PrefillPass) -> Iterator[None]:
        for i, step in enumerate(original_steps(self)):
            if i == 0 and self.new_tokens == 10:  # the long one is parked
                harness.engine.cancel([long])
                later.append(harness.submit(prompt_of(12, 3)))
            yield step

    later: list[EngineJob] = []
    with running(Harness(hysteresis_s=0.0)) as harness, held_at_first_step(monkeypatch) as (reached, go_on):
        long = harness.submit(prompt_of(1500, 1))
        assert reached.wait(WAIT_S)
        monkeypatch.setattr(Engine, "_end", end)
        monkeypatch.setattr(prefill_pass.PrefillPass, "steps", steps)
        short = harness.submit(prompt_of(10, 2))
        go_on.set()
        harness.result(short)
        harness.result(later[0])
    assert ended == [10, 1500, 12]


def test_draining_fails_what_waits_and_finishes_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Harness(policy="fcfs")) as harness, held_at_first_step(monkeypatch) as (reached, go_on):
        runs = harness.submit(prompt_of(300, 1))
        assert reached.wait(WAIT_S)
        waits = harness.submit(prompt_of(50, 2))
        harness.engine.begin_drain()
        assert isinstance(harness.outcome(waits), ShuttingDown)
        with pytest.raises(ShuttingDown):
            harness.submit(prompt_of(5, 3))
        go_on.set()
        harness.result(runs)


def test_a_prompt_without_room_fails_alone() -> None:
    with running(Harness(pool_pages=0, scratch_pages=8)) as harness:
        too_long, fits = harness.submit(prompt_of(300, 1)), harness.submit(prompt_of(200, 2))
        assert isinstance(harness.outcome(too_long), OutOfMemory)
        harness.result(fits)
        assert harness.metrics.out_of_memory._value.get() == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out"), RuntimeError("DefaultCPUAllocator: can't allocate")])
def test_running_out_of_memory_costs_one_job(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The allocator fails whenever the long prompt takes part; its company is computed without it."""
    harness = Harness(saturation_tokens=4096)
    original = harness.decoder.embed

    def embed(token_ids: torch.Tensor, out: torch.Tensor) -> None:
        if token_ids.shape[0] >= 400:
            raise error
        original(token_ids, out)

    monkeypatch.setattr(harness.decoder, "embed", embed)
    prompts = [prompt_of(n, n) for n in (30, 400, 45)]
    entries = [harness.prepare(prompt) for prompt in prompts]
    with running(harness):
        harness.engine.submit(entries)
        assert isinstance(harness.outcome(entries[1]), OutOfMemory)
        for i in (0, 2):
            assert harness.result(entries[i]).top == harness.alone(prompts[i]).next_token.top


def test_a_failing_pass_costs_its_own_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    original, failed = harness.decoder.embed, []

    def embed(token_ids: torch.Tensor, out: torch.Tensor) -> None:
        if not failed:
            failed.append(1)
            raise RuntimeError("secret detail")
        original(token_ids, out)

    monkeypatch.setattr(harness.decoder, "embed", embed)
    with running(harness):
        outcome = harness.outcome(harness.submit(prompt_of(40, 1)))
        assert isinstance(outcome, BackendError) and "secret" not in str(outcome)
        harness.result(harness.submit(prompt_of(40, 1)))


def test_nan_reaches_neither_the_cache_nor_the_next_owner_of_its_pages() -> None:
    weights = tiny_weights()
    weights.embed[7] = float("nan")
    with running(Harness(weights=weights, pool_pages=4, scratch_pages=8)) as harness:
        bad = [7] * 100
        good = [t if t != 7 else 8 for t in prompt_of(100, 1)]
        for _ in range(2):
            assert isinstance(harness.outcome(harness.submit(bad)), BadLogits)
            assert harness.result(harness.submit(good)).top == harness.alone(good).next_token.top


def test_a_full_queue_refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Harness(max_queue=2, policy="fcfs")) as harness, held_at_first_step(monkeypatch) as (reached, go_on):
        runs = harness.submit(prompt_of(300, 1))
        assert reached.wait(WAIT_S)
        waiting = [harness.submit(prompt_of(50, i)) for i in range(2)]
        with pytest.raises(Refused) as caught:
            harness.submit(prompt_of(50, 9))
        assert caught.value.retry_after_s > 0
        go_on.set()
        for entry in (runs, *waiting):
            harness.result(entry)
        harness.result(harness.submit(prompt_of(50, 9)))
