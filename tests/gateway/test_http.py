"""Bodies, encodings, limits, keys, methods: everything about a request but what it asks."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import brotli
import httpx
import pytest
import zstandard

from gateway.app import Application
from gateway.errors import ClientGone, PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from gateway.http import DisconnectGuard, decoded_body, read_body
from tests.gateway.double import MODEL, DoublePrefill, double_app

BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi" * 40}], "max_tokens": 1}).encode()
JSON = {"content-type": "application/json"}
LIMIT = 4096


@pytest.fixture
def app(backend: DoublePrefill) -> Application:
    return double_app([backend], max_body_bytes=LIMIT)


async def post(http: httpx.AsyncClient, content: Any, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await http.post("/v1/chat/completions", content=content, headers={**JSON, **named})


def raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(data) + deflater.flush()


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "identity": bytes,
}


@pytest.mark.parametrize("coding", ENCODERS)
async def test_encoded_bodies_are_read(http: httpx.AsyncClient, coding: str) -> None:
    assert (await post(http, ENCODERS[coding](BODY), content_encoding=coding)).status_code == 200


async def test_stacked_and_bare_encodings(http: httpx.AsyncClient) -> None:
    twice = brotli.compress(gzip.compress(BODY))
    assert (await post(http, twice, content_encoding="gzip, br")).status_code == 200
    assert (await post(http, raw_deflate(BODY), content_encoding="deflate")).status_code == 200
    streamed = zstandard.ZstdCompressor().compressobj()
    unsized = streamed.compress(BODY) + streamed.flush()
    assert (await post(http, unsized, content_encoding="zstd")).status_code == 200


@pytest.mark.parametrize("coding", [c for c in ENCODERS if c != "identity"])
def test_a_bomb_stops_at_the_limit(coding: str) -> None:
    bomb = ENCODERS[coding](bytes(50_000_000))
    with pytest.raises(PayloadTooLarge):
        decoded_body(bomb, [(b"content-encoding", coding.encode())], 1_000_000)


def test_codings_on_top_of_each_other_have_a_bound() -> None:
    """A short header may name thousands, each of which may unpack to the whole limit."""
    body = b"{}"
    for layers in range(1, 5):
        body = zlib.compress(body)
        headers = [(b"content-encoding", b"identity, " + b", ".join([b"deflate"] * layers))]
        if layers <= 3:
            assert decoded_body(body, headers, 1000) == b"{}"
        else:
            with pytest.raises(UnsupportedMediaType, match="4 content encodings"):
                decoded_body(body, headers, 1000)


@pytest.mark.parametrize("coding", [c for c in ENCODERS if c != "identity"])
async def test_broken_encodings_are_the_clients_fault(http: httpx.AsyncClient, coding: str) -> None:
    rng = random.Random(1)
    for broken in (ENCODERS[coding](BODY)[:-9], rng.randbytes(50), b""):
        answer = await post(http, broken, content_encoding=coding)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


async def test_unknown_encoding(http: httpx.AsyncClient) -> None:
    answer = await post(http, BODY, content_encoding="compress")
    assert answer.status_code == 415 and "gzip" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_other_content_types_are_refused(http: httpx.AsyncClient, kind: str) -> None:
    assert (await post(http, BODY, content_type=kind)).status_code == 415


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"])
async def test_json_content_types_pass(http: httpx.AsyncClient, kind: str) -> None:
    assert (await post(http, BODY, content_type=kind)).status_code == 200


async def test_no_content_type_passes(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/chat/completions", content=BODY)).status_code == 200


BROKEN = {
    "empty": b"",
    "cut": BODY[:-2],
    "list": b"[1]",
    "string": b'"x"',
    "null": b"null",
    "number": b"5",
    "not utf-8": b'{"messages":"\xff\xfe"}',
    "lone surrogate": rb'{"messages":[{"role":"user","content":"\ud800"}],"max_tokens":1}',
    "infinity": b'{"temperature": Infinity}',
    "trailing": BODY + b"x",
    "deep": b'{"messages":' + b"[" * 1900,
    "deep and closed": b'{"messages":' + b"[" * 1900 + b"]" * 1900 + b"}",
    "deep where nobody looks": b'{"max_tokens":1,"messages":[],"x":' + b"[" * 1900 + b"]" * 1900 + b"}",
    "deep kwargs": BODY[:-1] + b',"chat_template_kwargs":{"a":' + b"[" * 1500 + b"]" * 1500 + b"}}",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_is_not_a_json_object(http: httpx.AsyncClient, name: str) -> None:
    answer = await post(http, BROKEN[name])
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["type"] == "invalid_request_error" and error["message"]


async def test_the_body_limit(http: httpx.AsyncClient) -> None:
    fits = BODY + b" " * (LIMIT - len(BODY))
    assert (await post(http, fits)).status_code == 200
    answer = await post(http, fits + b" ")
    assert answer.status_code == 413 and "ONEPASS_MAX_BODY_BYTES" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 1000

    assert (await post(http, chunks())).status_code == 413


async def test_a_body_that_never_ends_is_not_read_forever() -> None:
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": bytes(1000), "more_body": True}

    with pytest.raises(PayloadTooLarge):
        await read_body(receive, [], 10_000)
    assert read < 100
    # A client that waits to be told to go on is not made to send anything.
    read = 0
    with pytest.raises(PayloadTooLarge):
        await read_body(receive, [(b"content-length", b"99999"), (b"expect", b"100-continue")], 10_000)
    assert read == 0


async def test_a_body_that_stops_coming() -> None:
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    with pytest.raises(RequestTimeout) as caught:
        await read_body(receive, [], 100, timeout_s=0.01)
    assert caught.value.status == 408 and caught.value.headers["connection"] == "close"


async def test_hanging_up_while_sending() -> None:
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    with pytest.raises(ClientGone):
        await read_body(receive, [], 100)


async def test_hanging_up_cancels_the_work() -> None:
    gone = asyncio.Event()
    unwound = []

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        async with DisconnectGuard(receive):
            asyncio.get_running_loop().call_soon(gone.set)
            try:
                await asyncio.Event().wait()
            finally:
                unwound.append(True)

    task = asyncio.create_task(work())
    with pytest.raises(ClientGone):
        await task
    assert unwound and not task.cancelled()


async def test_being_cancelled_is_not_hanging_up() -> None:
    async def work() -> None:
        async with DisconnectGuard(asyncio.Event().wait):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_client_that_leaves_stops_its_prefill(app: Application, backend: DoublePrefill) -> None:
    backend.hold = asyncio.Event()
    gone = asyncio.Event()
    sent: list[Any] = []
    first = True

    async def receive() -> dict[str, Any]:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": BODY, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions",
        "query_string": b"", "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
        "scheme": "http", "server": ("x", 1), "client": ("x", 1), "root_path": "",
    }  # fmt: skip
    request = asyncio.create_task(app(scope, receive, send))
    while not backend.seen:
        await asyncio.sleep(0)
    assert app.in_flight == 1
    gone.set()
    await request
    assert backend.cancelled == 1 and not sent and app.in_flight == 0
    registry = app.runtime.metrics.registry
    assert registry.get_sample_value("onepass_disconnects_total", {"path": "local"}) == 1
    labels = {"route": "chat", "backend": "double", "reason": "one-token", "status": "499"}
    assert registry.get_sample_value("onepass_requests_total", labels) == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("DELETE", "/v1/completions", 405, "POST"),
        ("POST", "/v1/models", 405, "GET"),
        ("DELETE", "/v1/models/x", 405, "GET"),
        ("PUT", "/tokenize", 405, "POST"),
        ("POST", "/version", 405, None),
        ("GET", "/nowhere", 404, None),
        ("GET", "/", 404, None),
        ("POST", "/v1/embeddings", 501, None),
        ("POST", "/v1/responses/abc/cancel", 501, None),
    ],
)
async def test_paths_and_methods_without_an_upstream(
    http: httpx.AsyncClient, method: str, path: str, status: int, allow: str | None
) -> None:
    answer = await http.request(method, path)
    error = answer.json()["error"]
    assert answer.status_code == status and set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-onepass-backend"] == "gateway" and answer.headers["x-request-id"]
    if allow:
        assert answer.headers["allow"] == allow


class TestKeys:
    @pytest.fixture
    def app(self, backend: DoublePrefill) -> Application:
        return double_app([backend], api_keys=("alpha-key", "beta-key"))

    async def test_keys_are_needed_but_for_health(self, http: httpx.AsyncClient) -> None:
        for path in ("/health", "/health/live", "/health/ready", "/ping", "/version"):
            assert (await http.get(path)).status_code == 200
        for path in ("/v1/models", "/v1/models/x", "/metrics", "/nowhere", "/tokenizer_info"):
            answer = await http.get(path)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/embeddings"):
            assert (await http.post(path, json={})).status_code == 401

    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": "Bearer beta-key"},
            {"Authorization": "bearer  beta-key"},
            {"api-key": "beta-key"},
            {"x-api-key": "beta-key"},
        ],
    )
    async def test_a_key_names_the_tenant(
        self, http: httpx.AsyncClient, backend: DoublePrefill, headers: dict[str, str]
    ) -> None:
        assert (await http.post("/v1/chat/completions", content=BODY, headers=headers)).status_code == 200
        assert backend.seen[0].tenant == "key-2"

    @pytest.mark.parametrize(
        "value", ["Bearer gamma", "Bearer", "Bearer ", "Basic beta-key", "beta-key", "Bearer beta-keyx"]
    )
    async def test_wrong_keys(self, http: httpx.AsyncClient, value: str) -> None:
        answer = await http.get("/v1/models", headers={"authorization": value})
        assert answer.status_code == 401 and "beta" not in answer.text and "gamma" not in answer.text


async def test_an_open_server_takes_any_key(http: httpx.AsyncClient, backend: DoublePrefill) -> None:
    for value in ("Bearer ", "Bearer whatever"):
        answer = await http.post("/v1/chat/completions", content=BODY, headers={"authorization": value})
        assert answer.status_code == 200
    assert {request.tenant for request in backend.seen} == {""}


async def test_leaving_refuses_new_work_and_turns_readiness(
    http: httpx.AsyncClient, app: Application, backend: DoublePrefill
) -> None:
    assert (await http.get("/health/ready")).status_code == 200
    app.runtime.begin_drain()
    assert backend.drained
    ready = await http.get("/health/ready")
    assert ready.status_code == 503 and ready.json()["status"] == "draining"
    assert (await http.get("/health/live")).status_code == 200
    refused = await post(http, BODY)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
    assert "retry-after" in refused.headers and not backend.seen


async def test_deadlines_are_checked(http: httpx.AsyncClient) -> None:
    for value in ("soon", "0", "-5", "inf", "nan"):
        answer = await post(http, BODY, x_onepass_deadline_ms=value)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-onepass-deadline-ms"
