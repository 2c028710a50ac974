"""When the local engine does not answer: who does, and that headers and metrics say so."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from backends.base import (
    BackendError,
    BackendStatus,
    BadLogits,
    ContextLengthExceeded,
    DeadlineUnmeetable,
    InvalidInput,
    OutOfMemory,
    Overloaded,
    ShuttingDown,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.app import Application
from tests.gateway.double import MODEL, DoublePrefill, double_app
from tests.gateway.stub_proxy import StubProxy

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture
def proxy() -> StubProxy:
    return StubProxy([MODEL, "big-model"])


@pytest.fixture
def app(backend: DoublePrefill, proxy: StubProxy) -> Application:
    return double_app([backend, proxy], spill_after_ms=100.0)


@pytest.fixture
async def alone(backend: DoublePrefill) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(double_app([backend])), base_url="http://double"
    ) as client:
        yield client


async def ask(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={**ASK, **fields})


def sample(app: Application, name: str, **labels: str) -> float:
    return app.runtime.metrics.registry.get_sample_value(name, labels) or 0.0


FAULTS: list[tuple[Exception, str, int, str | None]] = [
    (Overloaded("the queue is full", 3.2), "local-overloaded", 429, "rate_limit_exceeded"),
    (DeadlineUnmeetable("too late", 1.0), "local-deadline", 429, "rate_limit_exceeded"),
    (OutOfMemory("no room"), "local-out-of-memory", 503, "overloaded"),
    (BadLogits("NaN"), "local-bad-logits", 500, None),
    (BackendError("broken"), "local-failed", 500, None),
    (ZeroDivisionError("a bug"), "local-failed", 500, None),
    (ContextLengthExceeded("too long"), "too-long-locally", 400, "context_length_exceeded"),
]


@pytest.mark.parametrize(("fault", "reason", "status", "code"), FAULTS, ids=[type(f[0]).__name__ for f in FAULTS])
async def test_local_failures_go_to_an_upstream_that_serves_the_model(
    http: httpx.AsyncClient,
    alone: httpx.AsyncClient,
    app: Application,
    backend: DoublePrefill,
    proxy: StubProxy,
    fault: Exception,
    reason: str,
    status: int,
    code: str | None,
) -> None:
    backend.fault = fault
    answer = await ask(http)
    assert answer.json()["from"] == "upstream"
    assert (answer.headers["x-onepass-backend"], answer.headers["x-onepass-reason"]) == ("upstream", reason)
    assert json.loads(proxy.seen[0][1]) == ASK
    assert sample(app, "onepass_spills_total", reason=reason) == 1

    proxy.model_names = ()
    app.runtime.catalog._upstream_fresh_until_s = float("-inf")
    for refused in (await ask(http), await ask(alone)):
        assert refused.status_code == status and refused.json()["error"]["code"] == code
        assert refused.headers["x-onepass-backend"] == "double"
        if status == 429:
            assert float(refused.headers["retry-after"]) >= 1
        if status == 500:
            assert "bug" not in refused.text
    assert len(proxy.seen) == 1


async def test_what_the_client_did_wrong_is_told_and_not_passed_on(
    http: httpx.AsyncClient, backend: DoublePrefill, proxy: StubProxy
) -> None:
    backend.fault = InvalidInput("token 9 is outside the vocabulary")
    answer = await ask(http)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
    assert (await ask(http, temperature=9)).status_code == 400
    assert not proxy.seen


async def test_leaving_is_503_even_with_an_upstream(
    http: httpx.AsyncClient, backend: DoublePrefill, proxy: StubProxy
) -> None:
    backend.fault = ShuttingDown("the server is shutting down")
    answer = await ask(http)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "overloaded" and not proxy.seen


async def test_a_long_predicted_wait_spills(
    http: httpx.AsyncClient, app: Application, backend: DoublePrefill, proxy: StubProxy
) -> None:
    backend.wait_s = 0.09
    assert (await ask(http)).headers["x-onepass-backend"] == "double"
    backend.wait_s = 0.11
    answer = await ask(http)
    assert (answer.headers["x-onepass-backend"], answer.headers["x-onepass-reason"]) == ("upstream", "spill")
    assert sample(app, "onepass_spills_total", reason="spill") == 1
    proxy.model_names = ()
    app.runtime.catalog._upstream_fresh_until_s = float("-inf")
    assert (await ask(http)).headers["x-onepass-backend"] == "double"


@pytest.mark.parametrize(
    "state", [BackendStatus(ready=False, message="loading"), BackendStatus(ready=False, alive=False)]
)
async def test_an_engine_that_is_not_there(
    http: httpx.AsyncClient, alone: httpx.AsyncClient, backend: DoublePrefill, state: BackendStatus
) -> None:
    backend.state = state
    assert (await ask(http)).json()["from"] == "upstream"
    refused = await ask(alone)
    assert refused.status_code == 503 and "retry-after" in refused.headers


async def test_a_choice_that_one_read_cannot_answer_goes_upstream(http: httpx.AsyncClient, proxy: StubProxy) -> None:
    answer = await ask(http, guided_choice=["one two", "one three"])
    assert answer.headers["x-onepass-reason"] == "closed-set-too-long"
    answer = await ask(http, guided_choice=["Yes", "No"], stop="x")
    assert answer.headers["x-onepass-reason"] == "closed-set-combination" and len(proxy.seen) == 2


async def test_bytes_go_up_as_they_came(http: httpx.AsyncClient, proxy: StubProxy) -> None:
    raw = b'{ "model":"big-model","messages":[], "big": 123456789012345678901234567890,"x":null}\n'
    answer = await http.post(
        "/v1/chat/completions?a=1&a=2", content=raw, headers={"content-type": "application/json; charset=utf-8"}
    )
    request, body = proxy.seen[0]
    assert body == raw and request.raw_query == b"a=1&a=2" and request.method == "POST"
    assert (answer.headers["x-onepass-backend"], answer.headers["x-onepass-reason"]) == ("upstream", "unknown-model")
    # Nothing of the upstream's is replaced.
    assert answer.headers["x-request-id"] == "theirs" and "openai-version" not in answer.headers
    assert "date" not in answer.headers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("GET", "/anything?x=%2F"),
        ("DELETE", "/v1/models/ft:a%2Fb"),
        ("GET", "/v1/chat/completions"),
        ("PUT", "/v1/completions"),
        ("POST", "/v1/models"),
        ("POST", "/v1/audio/transcriptions"),
    ],
)
async def test_other_routes_and_methods_are_the_upstreams(
    http: httpx.AsyncClient, proxy: StubProxy, method: str, path: str
) -> None:
    answer = await http.request(method, path, content=b"\x00\xff")
    [(request, body)] = proxy.seen
    assert (request.method, request.raw_path.decode(), body) == (method, path.partition("?")[0], b"\x00\xff")
    assert answer.headers["x-onepass-reason"] == "other-route"


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [(UpstreamUnreachable("refused"), 502, "upstream_unreachable"), (UpstreamTimeout("slow"), 504, "timeout")],
)
async def test_an_upstream_that_does_not_answer(
    http: httpx.AsyncClient, proxy: StubProxy, fault: Exception, status: int, code: str
) -> None:
    proxy.fault = fault
    answer = await ask(http, max_tokens=5)
    assert answer.status_code == status and answer.json()["error"]["code"] == code
    assert answer.headers["x-onepass-backend"] == "gateway" and answer.headers["x-request-id"]
    # The local models are listed all the same.
    assert [m["id"] for m in (await http.get("/v1/models")).json()["data"]] == [MODEL, "org/double"]


async def test_models_are_merged_and_read_once(http: httpx.AsyncClient, proxy: StubProxy) -> None:
    for _ in range(3):
        models = (await http.get("/v1/models")).json()
        assert [m["id"] for m in models["data"]] == [MODEL, "org/double", "big-model"]
    assert proxy.listed == 1
    assert (await http.get("/v1/models/big-model")).json()["owned_by"] == "them"
    assert (await http.get("/v1/models/org%2Fdouble")).json()["max_model_len"] == 4096
    missing = await http.get("/v1/models/nobody")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
