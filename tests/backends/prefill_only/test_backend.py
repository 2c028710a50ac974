"""The backend behind the gateway's contract, on random weights in the built-in model's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from backends.base import (
    BackendStatus,
    ContextLengthExceeded,
    InvalidInput,
    PrefillRequest,
    Readout,
    Sampling,
    ShuttingDown,
)
from backends.prefill_only import startup
from backends.prefill_only.backend import PrefillOnlyBackend, factory

ENV = {
    "ONEPASS_LOAD_FORMAT": "dummy",
    "ONEPASS_DTYPE": "float32",
    "ONEPASS_DEVICE": "cpu",
    "ONEPASS_MAX_MODEL_LEN": "300",
    "ONEPASS_KV_CACHE_BYTES": "8M",
    "ONEPASS_MAX_QUEUE": "5",
    "ONEPASS_PROFILE_CACHE": "off",
}


async def status_of(backend: PrefillOnlyBackend) -> BackendStatus:
    """Once it is decided."""
    await backend.start()
    while True:
        status = backend.status()
        if status.ready or not status.alive:
            return status
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about times."""
    monkeypatch.setattr(startup, "_PROFILE_BUDGET_S", 0.0)
    for unneeded in ("warm_up", "_check_company"):
        monkeypatch.setattr(startup, unneeded, lambda *_: None)


@pytest.fixture
async def backend() -> AsyncIterator[PrefillOnlyBackend]:
    backend = factory(ENV)
    assert (await status_of(backend)).ready
    yield backend
    await backend.stop(10.0)


def request(ids: list[int], **readout: object) -> PrefillRequest:
    return PrefillRequest(model="builtin", token_ids=ids, readout=Readout(**(readout or {"top_logprobs": 3})))  # type: ignore[arg-type]


async def test_requests_are_checked_before_anything_waits(backend: PrefillOnlyBackend) -> None:
    vocab = backend.tokenizer("builtin").vocab_size
    for wrong, words in (
        (request([]), "empty"),
        (request([1, vocab]), str(vocab)),
        (request([-1]), "-1"),
        (request([1], token_ids=(vocab,)), str(vocab)),
        (request([1], sampling=Sampling(logit_bias={vocab + 3: 1.0})), str(vocab + 3)),
        (request([1], sampling=Sampling(allowed_token_ids=(1, 2), banned_token_ids=(1, 2, 3))), "banned"),
        (request([1], labels=True), "classification"),
    ):
        with pytest.raises(InvalidInput, match=words):
            await backend.prefill([request([5]), wrong])
    with pytest.raises(ContextLengthExceeded, match="300"):
        await backend.prefill([request([1] * 301)])
    with pytest.raises(InvalidInput, match="ONEPASS_MAX_QUEUE"):
        await backend.prefill([request([1])] * 6)
    results = await backend.prefill([request([1] * 300), request([2]), request([2])])
    assert [len(r.top) for r in results] == [3, 3, 3] and results[1].top == results[2].top
    assert await backend.prefill([]) == []


async def test_an_answer_nobody_waits_for_is_dropped(backend: PrefillOnlyBackend) -> None:
    task = asyncio.create_task(backend.prefill([request([i] * 300) for i in range(1, 6)]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # All five places of the queue are free again.
    assert len(await backend.prefill([request([i]) for i in range(1, 6)])) == 5


async def test_a_stopped_backend_takes_nothing() -> None:
    backend = factory(ENV)
    assert (await status_of(backend)).ready
    assert backend.predicted_wait_s([request([1, 2, 3])]) > 0
    backend.begin_drain()
    assert not backend.status().ready
    with pytest.raises(ShuttingDown):
        await backend.prefill([request([1])])
    await backend.stop(10.0)


async def test_a_model_that_cannot_be_loaded_is_told_in_one_line() -> None:
    status = await status_of(factory({**ENV, "ONEPASS_MODEL": "/nowhere/at/all.gguf"}))
    assert not status.alive and "/nowhere/at/all.gguf" in status.message and "\n" not in status.message
