"""The pass-through between a raw client and a scripted upstream: real sockets and a real ASGI server in between."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from backends.base import ProxyRequest
from backends.upstream import factory
from gateway.errors import ApiError, ClientGone, envelope
from gateway.http import read_body, send_answer
from gateway.passthrough import passthrough
from tests.backends.upstream.raw import Peer, RawRequest, RawUpstream, raw_upstream, within


class Counts:
    """What would become metrics."""

    def __init__(self) -> None:
        self.first_bytes: list[tuple[str, float]] = []
        self.failures: list[str] = []
        self.gone = 0
        self.gone_event = asyncio.Event()

    def upstream_first_byte(self, model: str, seconds: float) -> None:
        self.first_bytes.append((model, seconds))

    def upstream_failed(self, kind: str) -> None:
        self.failures.append(kind)


class Gateway:
    def __init__(self, port: int, upstream: RawUpstream, counts: Counts) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.upstream = upstream
        self.counts = counts

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def exchange(self, request: bytes) -> bytes:
        """All bytes of the answer to one raw request, up to the connection's end."""
        client = await self.connect()
        await client.send(request)
        answer = await within(client.rest())
        client.close()
        return answer


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def until(self, end: bytes) -> bytes:
        return await within(self._reader.readuntil(end))

    async def rest(self) -> bytes:
        return await self._reader.read()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def gateway(
    handler: Callable[[Peer], Awaitable[None]], *, stream_upload: bool = False, extra: Any = (), **env: str
) -> AsyncIterator[Gateway]:
    """``handler`` plays the upstream; ``stream_upload``: bodies are not read before they are passed on."""
    counts = Counts()
    async with raw_upstream(handler) as upstream:
        proxy = factory({"ONEPASS_UPSTREAM_BASE_URL": f"{upstream.url}/v1", **env})
        await proxy.start()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                body = None if stream_upload else await read_body(receive, scope["headers"], 1 << 24)
                await passthrough(scope, receive, send, body, proxy, "max-tokens", counts, extra, model="m")
            except ApiError as error:
                await send_answer(send, error.status, envelope(error))
            except ClientGone:
                counts.gone += 1
                counts.gone_event.set()

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            config = uvicorn.Config(
                app,
                log_level="critical",
                lifespan="off",
                http="httptools",
                date_header=False,
                server_header=False,
                timeout_graceful_shutdown=5,
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0.001)
            try:
                yield Gateway(listener.getsockname()[1], upstream, counts)
            finally:
                server.should_exit = True
                await serving
                await proxy.stop(0.0)


def post(body: bytes = b"{}", *headers: bytes, target: bytes = b"/v1/chat/completions") -> bytes:
    lines = [b"POST " + target + b" HTTP/1.1", b"host: gateway", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"connection: close", b"", body])


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
ADDED = b"x-onepass-backend: upstream\r\nx-onepass-reason: max-tokens\r\n"


def answering(raw: bytes, requests: list[RawRequest] | None = None) -> Callable[[Peer], Awaitable[None]]:
    async def handler(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if requests is not None:
                requests.append(request)
            await peer.send(raw)

    return handler


# --- bytes -----------------------------------------------------------------------------------------------------------


async def test_every_byte_both_ways() -> None:
    packed = gzip.compress(b'{"id":"chatcmpl-1"}', mtime=0)
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nX-Request-Id: up-1\r\n"
        b"Openai-Processing-Ms: 12\r\nX-Twice: a\r\nX-Twice: b\r\n"
        b"Server: stub\r\nDate: Tue, 01 Dec 2026 02:03:04 GMT\r\n"
        b"Content-Length: %d\r\n\r\n" % len(packed)
    ) + packed
    body = b'{"model":"m", "n":9007199254740993,"unknown":{"deep":null},"unknown":[1.0e2]}\n'
    sent = post(
        body,
        b"content-type: application/json; charset=utf-8",
        b"accept-encoding: gzip, br",
        b"authorization: Bearer client-secret",
        b"x-api-key: client-secret",
        b"api-key: client-secret",
        b"x-goog-api-key: client-secret",
        b"cookie: session=client-secret",
        b"proxy-authorization: Basic client-secret",
        b"x-stainless-retry-count: 0",
        b"x-dup: 1",
        b"x-dup: 2",
        target=b"/v1/models/org%2Fname/x?api-version=1&a=%20&a=+",
    )
    requests: list[RawRequest] = []
    async with gateway(answering(answer, requests), ONEPASS_UPSTREAM_API_KEY="sk-up") as gate:
        got = await gate.exchange(sent)
        port = gate.upstream.port
    assert requests[0].head == (
        b"POST /v1/models/org%%2Fname/x?api-version=1&a=%%20&a=+ HTTP/1.1\r\n"
        b"Host: 127.0.0.1:%d\r\n"
        b"content-length: %d\r\n"
        b"content-type: application/json; charset=utf-8\r\n"
        b"accept-encoding: gzip, br\r\n"
        b"x-stainless-retry-count: 0\r\n"
        b"x-dup: 1\r\nx-dup: 2\r\n"
        b"authorization: Bearer sk-up\r\n\r\n" % (port, len(body))
    )
    assert requests[0].raw_body == body
    head, _, payload = got.partition(b"\r\n\r\n")
    assert payload == packed
    assert (
        head + b"\r\n"
        == (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\nx-request-id: up-1\r\n"
            b"openai-processing-ms: 12\r\nx-twice: a\r\nx-twice: b\r\n"
            b"server: stub\r\ndate: Tue, 01 Dec 2026 02:03:04 GMT\r\n"
            b"content-length: %d\r\n" % len(packed)
        )
        + ADDED
        + b"connection: close\r\n"
    )


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (b"400 Bad Request", b"Content-Type: application/json\r\n", b'{"error":{"message":"no","code":42}}'),
        (b"403 Forbidden", b"Content-Type: text/html\r\nX-Trace: t\r\n", b"<html>no</html>"),
        (b"422 Unprocessable", b"Content-Type: application/json\r\n", b'{"detail":[]}'),
        (b"429 Slow Down", b"Retry-After: 7\r\nx-should-retry: true\r\nx-ratelimit-reset-requests: 1s\r\n", b"{}"),
        (b"500 Oops", b"Content-Type: text/plain\r\n", b"Internal Server Error"),
        (b"307 Moved", b"Location: http://elsewhere.example/v1\r\n", b""),
        (b"200 OK", b"Content-Type: audio/mpeg\r\n", bytes(range(256)) * 3),
    ],
)
@pytest.mark.parametrize("asked", [b'{"stream":false}', b'{"stream":true}'])
async def test_status_and_body_are_the_upstreams(status: bytes, headers: bytes, body: bytes, asked: bytes) -> None:
    raw = b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, headers, len(body), body)
    async with gateway(answering(raw)) as gate:
        got = await gate.exchange(post(asked))
    head, _, payload = got.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status.split(b" ")[0] and payload == body
    lines = [line.lower() for line in headers.split(b"\r\n") if line]
    assert [line.lower() for line in head.split(b"\r\n")[1 : 1 + len(lines)]] == lines
    assert ADDED in head + b"\r\n"


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 10\r\n\r\n"),
        (b"OPTIONS", b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nContent-Length: 0\r\n\r\n"),
        (b"DELETE", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("stream_upload", [False, True])
async def test_answers_without_a_body_leave_the_connection_usable(
    method: bytes, raw: bytes, stream_upload: bool
) -> None:
    requests: list[RawRequest] = []
    async with gateway(answering(raw, requests), stream_upload=stream_upload) as gate:
        client = await gate.connect()
        for _ in range(2):
            await client.send(method + b" /v1/files/1 HTTP/1.1\r\nhost: g\r\n\r\n")
            head = await client.until(b"\r\n\r\n")
            assert head.split(b"\r\n")[0].split(b" ")[1] == raw.split(b" ")[1]
            assert b"transfer-encoding" not in head
        client.close()
    assert [r.line for r in requests] == [method + b" /v1/files/1 HTTP/1.1"] * 2
    assert all(not r.values(b"transfer-encoding") for r in requests)


async def test_headers_of_ours_yield_to_the_upstreams() -> None:
    raw = b"HTTP/1.1 200 OK\r\nX-Request-Id: theirs\r\nContent-Length: 0\r\n\r\n"
    extra = [(b"x-request-id", b"ours"), (b"openai-version", b"2020-10-01")]
    async with gateway(answering(raw), extra=extra) as gate:
        got = await gate.exchange(post())
    assert b"x-request-id: theirs\r\n" in got and b"ours" not in got and b"openai-version: 2020-10-01\r\n" in got


# --- uploads ---------------------------------------------------------------------------------------------------------


async def test_a_multipart_upload_streams_through() -> None:
    """The upstream has the first part before the client sends the second."""
    first, second = asyncio.Event(), asyncio.Event()
    pieces = [b"--B\r\nContent-Disposition: form-data; name=file\r\n\r\n", bytes(range(256)) * 200, b"\r\n--B--\r\n"]

    async def handler(peer: Peer) -> None:
        head = await peer.head()
        assert b"content-type: multipart/form-data; boundary=B\r\n" in head
        assert await peer.read(len(pieces[0])) == pieces[0]
        first.set()
        assert await peer.read(len(pieces[1] + pieces[2])) == pieces[1] + pieces[2]
        second.set()
        await peer.answer(b'{"text":"hi"}')

    async with gateway(handler, stream_upload=True) as gate:
        client = await gate.connect()
        size = sum(map(len, pieces))
        await client.send(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: g\r\nconnection: close\r\n"
            b"content-type: multipart/form-data; boundary=B\r\ncontent-length: %d\r\n\r\n" % size
        )
        await client.send(pieces[0])
        await within(first.wait())
        await client.send(pieces[1])
        await client.send(pieces[2])
        assert (await within(client.rest())).endswith(b'{"text":"hi"}')
        client.close()


async def test_a_chunked_upload_stays_chunked() -> None:
    requests: list[RawRequest] = []
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    async with gateway(answering(raw, requests), stream_upload=True) as gate:
        got = await gate.exchange(
            b"POST /v1/files HTTP/1.1\r\nhost: g\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
        )
    assert got.endswith(b"\r\n\r\n{}")
    assert requests[0].values(b"transfer-encoding") == [b"chunked"] and requests[0].body == b"abcdefg"


async def test_the_client_is_told_to_continue() -> None:
    requests: list[RawRequest] = []
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    async with gateway(answering(raw, requests), stream_upload=True) as gate:
        client = await gate.connect()
        await client.send(
            b"POST /v1/files HTTP/1.1\r\nhost: g\r\nconnection: close\r\n"
            b"content-length: 3\r\nexpect: 100-continue\r\n\r\n"
        )
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"abc")
        assert (await within(client.rest())).startswith(b"HTTP/1.1 200 OK")
        client.close()
    assert requests[0].raw_body == b"abc" and not requests[0].values(b"expect")


async def test_an_upload_refused_early() -> None:
    async def handler(peer: Peer) -> None:
        await peer.head()
        await peer.answer(b"too much", status=b"413 Too Large")
        await peer.rest()

    async with gateway(handler, stream_upload=True) as gate:
        client = await gate.connect()
        await client.send(b"POST /v1/files HTTP/1.1\r\nhost: g\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1000)
        assert b" 413 " in await client.until(b"\r\n\r\n")
        assert await client.until(b"much") == b"too much"
        client.close()


async def test_hanging_up_within_an_upload_reaches_the_upstream() -> None:
    begun, closed = asyncio.Event(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.head()
        assert await peer.read(10) == b"x" * 10
        begun.set()
        assert await peer.rest() == b""
        closed.set()

    async with gateway(handler, stream_upload=True) as gate:
        client = await gate.connect()
        await client.send(b"POST /v1/files HTTP/1.1\r\nhost: g\r\ncontent-length: 1000\r\n\r\n" + b"x" * 10)
        await within(begun.wait())
        client.abort()
        await within(closed.wait())
        await within(gate.counts.gone_event.wait())
        assert gate.counts.failures == []


# --- streams ---------------------------------------------------------------------------------------------------------


async def test_each_event_arrives_before_the_next_is_sent() -> None:
    gates = [asyncio.Event() for _ in range(5)]
    events = [b": keep-alive\n\n", b"data: 1\n\n", b"data: par", b"tial\r\n\r\n", b"data: [DONE]\n\n"]

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD)
        for event, gate in zip(events, gates, strict=True):
            await peer.chunk(event)
            await gate.wait()
        await peer.send(b"0\r\n\r\n")

    async with gateway(handler) as gate:
        client = await gate.connect()
        await client.send(post(b'{"stream":true}'))
        head = await client.until(b"\r\n\r\n")
        assert b"content-type: text/event-stream; charset=utf-8\r\n" in head and ADDED in head
        assert b"cache-control: no-cache\r\n" in head and b"x-accel-buffering: no\r\n" in head
        for event, event_gate in zip(events, gates, strict=True):
            framed = b"%x\r\n%s\r\n" % (len(event), event)
            assert await client.until(framed) == framed
            event_gate.set()
        assert await within(client.rest()) == b"0\r\n\r\n"
        client.close()
        assert [model for model, _ in gate.counts.first_bytes] == ["m"]


async def test_the_upstreams_own_caching_headers_win() -> None:
    raw = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
        b"X-Accel-Buffering: yes\r\nContent-Length: 0\r\n\r\n"
    )
    async with gateway(answering(raw)) as gate:
        head = await gate.exchange(post())
    assert head.count(b"cache-control:") == 1 and b"cache-control: no-store\r\n" in head
    assert head.count(b"x-accel-buffering:") == 1 and b"x-accel-buffering: yes\r\n" in head


async def test_the_sdk_reads_the_stream_and_the_error_in_it() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD)
        chunk = {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": {"content": "Hel"}, "finish_reason": None}],
        }
        await peer.chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    async with (
        gateway(handler) as gate,
        openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="k", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        assert (await within(anext(stream))).choices[0].delta.content == "Hel"
        with pytest.raises(openai.APIError, match="broke off"):
            await within(anext(stream))
        assert gate.counts.failures == ["broken"]


async def broken_answer(head: bytes, sent: bytes) -> tuple[bytes, Counts]:
    """What a client gets of an answer whose connection is reset after ``sent``."""
    proceed = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(head + sent)
        await proceed.wait()
        peer.reset()

    async with gateway(handler) as gate:
        client = await gate.connect()
        await client.send(post())
        got = await client.until(b"\r\n\r\n")
        if sent:
            got += await client.until(sent[-3:])
        proceed.set()
        got += await within(client.rest())
        client.close()
        return got, gate.counts


async def test_a_stream_that_breaks_between_events_ends_with_an_error() -> None:
    got, counts = await broken_answer(SSE_HEAD, b"9\r\ndata: 1\n\n\r\n")
    events = b"".join(line for line in got.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]).split(b"\n\n")
    assert events[0] == b"data: 1"
    error = json.loads(events[1].removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_unreachable" and error["type"] == "server_error"
    assert b"[DONE]" not in got and got.endswith(b"0\r\n\r\n")
    assert counts.failures == ["broken"]


@pytest.mark.parametrize(
    ("head", "sent"),
    [
        (SSE_HEAD, b"8\r\ndata: {x\r\n"),
        (SSE_HEAD.replace(b"Transfer", b"Content-Encoding: gzip\r\nTransfer"), b"4\r\nab\n\n\r\n"),
        (SSE_HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 100"), b"data: 1\n\n"),
        (SSE_HEAD.replace(b"text/event-stream", b"application/json"), b'3\r\n{"a\r\n'),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", b"half of it"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", b""),
    ],
    ids=["within-an-event", "compressed-events", "events-with-a-length", "chunked-json", "sized", "nothing-yet"],
)
async def test_an_answer_that_breaks_off_does_not_look_whole(head: bytes, sent: bytes) -> None:
    got, counts = await broken_answer(head, sent)
    length = b"content-length: 100\r\n" in got
    assert length or b"transfer-encoding: chunked\r\n" in got
    body = got.partition(b"\r\n\r\n")[2]
    assert not body.endswith(b"0\r\n\r\n") and (not length or len(body) < 100)
    assert b"error" not in body
    assert counts.failures == ["broken"]


async def test_a_common_client_notices_the_break() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(SSE_HEAD.replace(b"text/event-stream", b"application/json"))
        await peer.chunk(b'{"half":')

    async with gateway(handler) as gate, httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await within(client.post(f"{gate.url}/v1/chat/completions", content=b"{}"))


# --- hanging up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream_upload", [False, True])
@pytest.mark.parametrize("head", [None, b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", SSE_HEAD])
async def test_hanging_up_closes_the_upstreams_connection(head: bytes | None, stream_upload: bool) -> None:
    """Before the head, in the middle of an answer, and in a stream that has not said anything."""
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        if head is not None:
            await peer.send(head)
        arrived.set()
        await peer.rest()
        closed.set()

    async with gateway(handler, stream_upload=stream_upload) as gate:
        client = await gate.connect()
        await client.send(post())
        await within(arrived.wait())
        if head is not None:
            await client.until(b"\r\n\r\n")
        client.close()
        await within(closed.wait())
        await within(gate.counts.gone_event.wait())
        assert gate.counts.gone == 1 and gate.counts.failures == []


async def test_a_whole_answer_is_not_a_hang_up() -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    async with gateway(answering(raw)) as gate:
        client = await gate.connect()
        for _ in range(20):
            await client.send(post().replace(b"connection: close\r\n", b""))
            await client.until(b"{}")
        client.close()
        assert gate.counts.gone == 0 and len(gate.counts.first_bytes) == 20 and gate.upstream.connections == 1


# --- no answer -------------------------------------------------------------------------------------------------------


async def test_an_upstream_that_closes_is_a_502() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()

    async with gateway(handler) as gate:
        got = await gate.exchange(post())
        assert gate.counts.failures == ["unreachable"]
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 502 ")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "upstream_unreachable", None)


async def test_an_upstream_that_does_not_answer_is_a_504() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.rest()

    async with gateway(handler, ONEPASS_UPSTREAM_TIMEOUT_S="0.1") as gate:
        got = await gate.exchange(post())
        assert gate.counts.failures == ["timeout"]
    assert got.startswith(b"HTTP/1.1 504 ") and json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


async def test_a_proxy_that_shuts_down_is_a_503() -> None:
    proxy = factory({"ONEPASS_UPSTREAM_BASE_URL": "http://127.0.0.1:1"})
    with pytest.raises(ApiError) as caught:
        await passthrough(
            {"method": "GET", "path": "/v1/models", "raw_path": b"/v1/models", "query_string": b"", "headers": []},
            asyncio.Event().wait,
            None,
            None,
            proxy,
            "model",
            Counts(),
        )
    assert caught.value.status == 503


async def test_a_scope_without_a_raw_path_is_quoted() -> None:
    seen: list[ProxyRequest] = []

    class Stop(Exception):
        pass

    class Proxy:
        name = "upstream"

        async def forward(self, request: ProxyRequest) -> None:
            seen.append(request)
            raise Stop

    scope = {"method": "GET", "path": "/v1/models/a b/é", "query_string": b"x=1", "headers": []}
    with pytest.raises(Stop):
        await passthrough(scope, asyncio.Event().wait, None, None, Proxy(), "model", Counts())  # type: ignore[arg-type]
    assert (seen[0].raw_path, seen[0].raw_query, seen[0].body) == (b"/v1/models/a%20b/%C3%A9", b"x=1", b"")
