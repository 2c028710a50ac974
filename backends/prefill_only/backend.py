"""The prefill-only backend: the engine behind the gateway's contract.

Loads on a thread of its own, checks requests, turns them into jobs and waits for them on the event loop. What computes
is in ``engine``; how it is put together is in ``startup``.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from backends.base import (
    BackendError,
    BackendStatus,
    ContextLengthExceeded,
    DeadlineUnmeetable,
    InvalidInput,
    ModelInfo,
    Overloaded,
    PrefillBackend,
    PrefillRequest,
    PrefillResult,
    ShuttingDown,
    Tokenizer,
)
from backends.prefill_only.engine import EngineJob
from backends.prefill_only.metrics import EngineMetrics, SchedulerCollector
from backends.prefill_only.models.progress import ProgressDisplay
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.settings import EngineSettings
from backends.prefill_only.startup import Started, start_engine
from scheduler.admission import Refused

__all__ = ["PrefillOnlyBackend", "factory"]

log = logging.getLogger("onepass.engine")

_LONG_PROMPT = 16384  # ids; checking and hashing longer prompts goes to a thread


def factory(env: Mapping[str, str]) -> PrefillOnlyBackend:
    """Entry point ``prefill_only`` of the group ``onepass.backends``. Raises SettingsError."""
    return PrefillOnlyBackend(EngineSettings.from_env(env))


class PrefillOnlyBackend(PrefillBackend):
    name = "prefill-only"

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._metrics = EngineMetrics()
        self._started: Started | None = None
        self._failure: str | None = None
        self._progress = "not started"
        self._display = ProgressDisplay(sys.stderr, log.info)
        self._loaded = asyncio.Event()
        self._draining = False
        self._created = int(time.time())
        self._names = settings.served_model_names or _names_of(settings.model)

    # --- life cycle --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def load() -> None:
            try:
                started = start_engine(self._settings, self._metrics, self._report)
                self._display.close()
                self._started = started
            except Exception as error:
                log.debug("start failed", exc_info=True)
                self._failure = f"{type(error).__name__}: {error}"
                log.error("the engine could not start: %s", error)
            loop.call_soon_threadsafe(self._loaded.set)

        self._report(0.0, "loading")
        threading.Thread(target=load, name="onepass-load", daemon=True).start()

    async def stop(self, grace_s: float) -> None:
        self._draining = True
        if self._started is not None:
            await asyncio.to_thread(self._started.engine.stop, grace_s)

    def begin_drain(self) -> None:
        self._draining = True
        if self._started is not None:
            self._started.engine.begin_drain()

    def status(self) -> BackendStatus:
        if self._failure is not None:
            return BackendStatus(ready=False, alive=False, message=self._failure)
        if self._started is None:
            return BackendStatus(ready=False, message=self._progress)
        if not self._started.engine.alive:
            return BackendStatus(ready=False, alive=False, message="the engine thread died")
        if self._draining:
            return BackendStatus(ready=False, message="draining")
        return BackendStatus(ready=True, message="ready")

    def collectors(self) -> Sequence[Any]:
        return [*self._metrics.collectors(), SchedulerCollector(self._scheduler_stats)]

    # --- models ------------------------------------------------------------------------------------------------------

    def models(self) -> Sequence[ModelInfo]:
        started = self._started
        return [
            ModelInfo(
                id=self._names[0],
                aliases=tuple(self._names[1:]),
                created=self._created,
                max_model_len=started.memory.max_model_len if started else 0,
                fingerprint=started.fingerprint if started else "",
            )
        ]

    def tokenizer(self, model: str) -> Tokenizer:
        return self._ready().tokenizer

    # --- work --------------------------------------------------------------------------------------------------------

    async def prefill(self, requests: Sequence[PrefillRequest]) -> list[PrefillResult]:
        if not requests:
            return []
        engine = self._ready().engine
        if len(requests) > self._settings.max_queue:
            raise InvalidInput(
                f"{len(requests)} prompts at once can never be taken: at most {self._settings.max_queue} may wait "
                "(ONEPASS_MAX_QUEUE); send fewer in a request"
            )
        group = _Group(asyncio.get_running_loop(), len(requests))
        if sum(len(r.token_ids) for r in requests) > _LONG_PROMPT:
            entries = await asyncio.to_thread(self._prepare, requests, group)
        else:
            entries = self._prepare(requests, group)
        group.entries = entries
        try:
            engine.submit(entries)
        except Refused as refusal:
            raise _as_backend_error(refusal) from None
        try:
            return await group.results()
        except BaseException:  # a failure of one, or nobody waits any more
            engine.cancel(entries)
            raise

    def predicted_wait_s(self, requests: Sequence[PrefillRequest]) -> float:
        started = self._ready()
        group = _Group(asyncio.get_running_loop(), len(requests))
        return started.engine.predicted_wait_s([started.engine.prepare(r, group.done) for r in requests])

    def _prepare(self, requests: Sequence[PrefillRequest], group: _Group) -> list[EngineJob]:
        started = self._ready()
        for request in requests:
            _check(request, started.spec, started.memory.max_model_len)
        return [started.engine.prepare(request, group.done) for request in requests]

    def _ready(self) -> Started:
        if self._draining:
            raise ShuttingDown("the server is shutting down")
        if self._started is None:
            raise Overloaded(f"the model is not ready: {self._failure or self._progress}", retry_after_s=5.0)
        return self._started

    def _report(self, fraction: float, message: str) -> None:
        self._progress = f"{message} {fraction:.0%}"
        self._display(fraction, message)

    def _scheduler_stats(self) -> Mapping[str, float]:
        return {} if self._started is None else self._started.engine.stats()


class _Group:
    """Requests given together: done when all are, failed when one is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int) -> None:
        self._loop = loop
        self._left = size
        self._found: dict[EngineJob, PrefillResult] = {}
        self._future: asyncio.Future[None] = loop.create_future()
        self.entries: Sequence[EngineJob] = ()

    def done(self, finished: Sequence[tuple[EngineJob, PrefillResult | BackendError]]) -> None:
        """Called by the engine's thread, once a pass."""
        # A closed loop means that the server is gone, and with it whoever asked.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, finished)

    async def results(self) -> list[PrefillResult]:
        await self._future
        return [self._found[entry] for entry in self.entries]

    def _settle(self, finished: Sequence[tuple[EngineJob, PrefillResult | BackendError]]) -> None:
        for entry, outcome in finished:
            if self._future.done():
                return
            if isinstance(outcome, BackendError):
                self._future.set_exception(outcome)
                return
            self._found[entry] = outcome
        if len(self._found) == self._left:
            self._future.set_result(None)


def _check(request: PrefillRequest, spec: ModelSpec, longest: int) -> None:
    ids, vocab = request.token_ids, spec.vocab_size
    if not ids:
        raise InvalidInput("the prompt is empty: at least one token is needed")
    if len(ids) > longest:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {longest} tokens, but the prompt has {len(ids)}; shorten it"
        )
    if min(ids) < 0 or max(ids) >= vocab:
        wrong = next(i for i in ids if not 0 <= i < vocab)
        raise InvalidInput(f"token id {wrong} is outside the vocabulary: ids go from 0 to {vocab - 1}")
    readout = request.readout
    sampling = readout.sampling
    if readout.labels and spec.head != "classification":
        raise InvalidInput("this model has no classification head")
    reads_tokens = sampling is not None or readout.top_logprobs or readout.token_ids
    if spec.head != "lm" and (reads_tokens or readout.prompt_logprobs is not None):
        raise InvalidInput("this model has no language-model head: it gives no token probabilities")
    named = [*readout.token_ids]
    if sampling is not None:
        named += [*sampling.logit_bias, *(sampling.allowed_token_ids or ()), *sampling.banned_token_ids]
    for token_id in named:
        if not 0 <= token_id < vocab:
            raise InvalidInput(f"token id {token_id} is outside the vocabulary: ids go from 0 to {vocab - 1}")
    if sampling is not None and sampling.banned_token_ids:
        allowed = sampling.allowed_token_ids
        if allowed is not None and set(allowed) <= set(sampling.banned_token_ids):
            raise InvalidInput("every allowed token is also banned: no token can be drawn")


def _as_backend_error(refusal: Refused) -> BackendError:
    if refusal.reason == "deadline":
        return DeadlineUnmeetable(str(refusal), refusal.retry_after_s)
    return Overloaded(str(refusal), refusal.retry_after_s)


def _names_of(model: str) -> tuple[str, ...]:
    if model == "builtin":
        return ("smollm2-135m-instruct", "builtin")
    name = PurePath(model).name
    short = name.removesuffix(".gguf")
    return tuple(dict.fromkeys((model, short))) if "/" in model and not model.startswith(("/", ".")) else (short,)
