"""The backend against a scripted server over real sockets: what goes over the wire, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from backends.base import (
    InvalidInput,
    ProxyRequest,
    ShuttingDown,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from backends.upstream import UpstreamBackend, factory
from tests.backends.upstream.raw import Peer, RawRequest, RawUpstream, raw_upstream, within

Handler = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def backend_for(url: str, **env: str) -> AsyncIterator[UpstreamBackend]:
    backend = factory({"ONEPASS_UPSTREAM_BASE_URL": url, **env})
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop(0.0)


@asynccontextmanager
async def upstream_and_backend(handler: Handler, **env: str) -> AsyncIterator[tuple[RawUpstream, UpstreamBackend]]:
    async with raw_upstream(handler) as upstream, backend_for(f"{upstream.url}/v1", **env) as backend:
        yield upstream, backend


def post(body: bytes | AsyncIterator[bytes] = b"{}", *headers: tuple[bytes, bytes]) -> ProxyRequest:
    fixed = [] if any(name == b"accept-encoding" for name, _ in headers) else [(b"accept-encoding", b"identity")]
    return ProxyRequest(
        method="POST", raw_path=b"/v1/chat/completions", raw_query=b"", headers=[*headers, *fixed], body=body
    )


def get(path: bytes = b"/v1/models", method: str = "GET") -> ProxyRequest:
    return ProxyRequest(
        method=method, raw_path=path, raw_query=b"", headers=[(b"accept-encoding", b"identity")], body=b""
    )


async def whole(backend: UpstreamBackend, request: ProxyRequest) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    async with await within(backend.forward(request)) as response:
        body = b"".join([chunk async for chunk in response.body()])
    return response.status, list(response.headers), body


class Recorder:
    """Answers every request alike and keeps what came."""

    def __init__(self, answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") -> None:
        self.requests: list[RawRequest] = []
        self.answer = answer

    async def __call__(self, peer: Peer) -> None:
        while True:
            self.requests.append(await peer.request())
            await peer.send(self.answer)


# --- the request, byte for byte --------------------------------------------------------------------------------------


async def test_the_request_goes_out_as_it_came_in() -> None:
    recorder = Recorder()
    body = b'{"b":1, "a":12345678901234567890123,"a":null,\n"x":"\\u00e9 \xf0\x9f\x99\x82"}'
    request = ProxyRequest(
        method="POST",
        raw_path=b"/v1/models/a%2Fb/x",
        raw_query=b"api-version=1&tag=a&tag=%62+c&flag",
        headers=[
            (b"host", b"gateway.example"),
            (b"user-agent", b"OpenAI/Python 3.57.0"),
            (b"content-type", b"application/json"),
            (b"X-Mixed-Case", b"One"),
            (b"x-utf8", "naïve".encode()),
            (b"accept-encoding", b"gzip, deflate, br"),
            (b"content-length", b"%d" % len(body)),
            (b"x-mixed-case", b"two"),
            (b"connection", b"keep-alive"),
        ],
        body=body,
    )
    async with upstream_and_backend(recorder) as (upstream, backend):
        assert await whole(backend, request) == (200, [(b"Content-Length", b"2")], b"{}")
    assert recorder.requests[0].head == (
        b"POST /v1/models/a%%2Fb/x?api-version=1&tag=a&tag=%%62+c&flag HTTP/1.1\r\n"
        b"Host: 127.0.0.1:%d\r\n"
        b"user-agent: OpenAI/Python 3.57.0\r\n"
        b"content-type: application/json\r\n"
        b"X-Mixed-Case: One\r\n"
        b"x-utf8: na\xc3\xafve\r\n"
        b"accept-encoding: gzip, deflate, br\r\n"
        b"content-length: %d\r\n"
        b"X-Mixed-Case: two\r\n\r\n" % (upstream.port, len(body))
    )
    assert recorder.requests[0].raw_body == body


async def test_nothing_is_added_to_a_bare_request() -> None:
    recorder = Recorder()
    async with upstream_and_backend(recorder) as (upstream, backend):
        await whole(backend, get())
        await whole(backend, post(b"{}"))
    first, second = recorder.requests
    host = b"Host: 127.0.0.1:%d\r\naccept-encoding: identity\r\n" % upstream.port
    assert first.head == b"GET /v1/models HTTP/1.1\r\n" + host + b"\r\n"
    assert second.head == b"POST /v1/chat/completions HTTP/1.1\r\n" + host + b"content-length: 2\r\n\r\n"


async def test_a_latin1_header_value_arrives_as_utf8() -> None:
    recorder = Recorder()
    async with upstream_and_backend(recorder) as (_, backend):
        await whole(backend, post(b"{}", (b"x-name", b"na\xefve")))
    assert recorder.requests[0].values(b"x-name") == ["naïve".encode()]


async def test_a_header_that_would_inject_is_refused() -> None:
    recorder = Recorder()
    async with upstream_and_backend(recorder) as (_, backend):
        with pytest.raises(InvalidInput, match="cannot be passed on"):
            await within(backend.forward(post(b"{}", (b"x-bad", b"a\r\nx-evil: 1"))))
        assert (await whole(backend, post()))[0] == 200
    assert len(recorder.requests) == 1


async def test_the_key_is_sent_and_the_clients_credentials_are_not() -> None:
    names = [b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"cookie", b"proxy-authorization"]
    recorder = Recorder()
    async with upstream_and_backend(recorder, ONEPASS_UPSTREAM_API_KEY="sk-up") as (_, backend):
        await whole(backend, post(b"{}", *((name, b"client-secret") for name in names)))
    assert b"client-secret" not in recorder.requests[0].head
    assert recorder.requests[0].values(b"authorization") == [b"Bearer sk-up"]


async def test_the_clients_key_passes_where_that_is_configured() -> None:
    recorder = Recorder()
    async with upstream_and_backend(recorder, ONEPASS_UPSTREAM_FORWARD_AUTH="1") as (_, backend):
        await whole(backend, post(b"{}", (b"authorization", b"Bearer mine"), (b"cookie", b"c=1")))
    assert recorder.requests[0].values(b"authorization") == [b"Bearer mine"]
    assert not recorder.requests[0].values(b"cookie")


async def test_a_large_body_arrives_whole() -> None:
    recorder = Recorder()
    body = random.Random(0).randbytes(5 * 1024 * 1024 + 17)
    async with upstream_and_backend(recorder) as (_, backend):
        await whole(backend, post(body, (b"content-type", b"audio/wav")))
    assert recorder.requests[0].values(b"content-length") == [b"%d" % len(body)]
    assert recorder.requests[0].raw_body == body


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_a_streamed_body_keeps_its_length() -> None:
    recorder = Recorder()
    async with upstream_and_backend(recorder) as (_, backend):
        await whole(backend, post(pieces(b"ab", b"c\x00d"), (b"content-length", b"5")))
    (request,) = recorder.requests
    assert request.values(b"content-length") == [b"5"] and not request.values(b"transfer-encoding")
    assert request.raw_body == b"abc\x00d"


async def test_a_streamed_body_of_unknown_length_goes_out_chunked() -> None:
    recorder = Recorder()
    async with upstream_and_backend(recorder) as (_, backend):
        await whole(backend, post(pieces(b"abc", b"defg"), (b"transfer-encoding", b"chunked")))
    (request,) = recorder.requests
    assert request.values(b"transfer-encoding") == [b"chunked"] and not request.values(b"content-length")
    assert request.raw_body == b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"


async def test_a_streamed_body_goes_out_as_it_comes() -> None:
    got_first, answered = asyncio.Event(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.head()
        assert await peer.read(8) == b"3\r\nabc\r\n"
        got_first.set()
        assert await peer.read(13) == b"3\r\ndef\r\n0\r\n\r\n"
        await peer.answer()

    async def body() -> AsyncIterator[bytes]:
        yield b"abc"
        await within(got_first.wait())
        yield b"def"
        answered.set()

    async with upstream_and_backend(handler) as (_, backend):
        assert (await whole(backend, post(body())))[0] == 200
    assert answered.is_set()


async def test_a_body_that_fails_is_not_ended() -> None:
    seen = asyncio.get_running_loop().create_future()

    async def handler(peer: Peer) -> None:
        await peer.head()
        seen.set_result(await peer.rest())

    async def body() -> AsyncIterator[bytes]:
        yield b"abc"
        raise RuntimeError("the client hung up")

    async with upstream_and_backend(handler) as (_, backend):
        with pytest.raises(UpstreamUnreachable):
            await within(backend.forward(post(body())))
        assert b"0\r\n\r\n" not in await within(seen)


# --- the answer, byte for byte ---------------------------------------------------------------------------------------


async def test_the_answer_comes_back_as_it_was() -> None:
    packed = gzip.compress(b'{"object":"list"}', mtime=0)
    head = (
        b"HTTP/1.1 203 Fine\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nX-Twice: 1\r\n"
        b"x-ratelimit-reset-tokens: 6m0s\r\nX-twice: 2\r\nX-Raw: na\xefve\r\nSet-Cookie: a=b\r\n"
        b"Content-Length: %d\r\nConnection: keep-alive\r\n\r\n" % len(packed)
    )
    recorder = Recorder(head + packed)
    async with upstream_and_backend(recorder) as (_, backend):
        status, headers, body = await whole(backend, post(b"{}", (b"accept-encoding", b"gzip")))
        await whole(backend, post())
    assert (status, body) == (203, packed)
    assert headers == [
        (b"Content-Type", b"application/json"),
        (b"Content-Encoding", b"gzip"),
        (b"X-Twice", b"1"),
        (b"x-ratelimit-reset-tokens", b"6m0s"),
        (b"X-twice", b"2"),
        (b"X-Raw", b"na\xefve"),
        (b"Set-Cookie", b"a=b"),
        (b"Content-Length", b"%d" % len(packed)),
    ]
    assert not recorder.requests[1].values(b"cookie")


@pytest.mark.parametrize(
    ("method", "head", "status"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n", 200),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n", 304),
        ("GET", b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere.example/\r\nContent-Length: 0\r\n\r\n", 302),
        ("GET", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200),
        ("OPTIONS", b"HTTP/1.1 200 OK\r\nAllow: GET\r\nContent-Length: 0\r\n\r\n", 200),
        ("DELETE", b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", 500),
    ],
)
async def test_answers_without_a_body(method: str, head: bytes, status: int) -> None:
    recorder = Recorder(head)
    async with upstream_and_backend(recorder) as (upstream, backend):
        assert [(s, b) for s, _, b in [await whole(backend, get(method=method)) for _ in range(2)]] == [
            (status, b"")
        ] * 2
        assert upstream.connections == 1, "the connection is used again"


async def test_chunks_come_back_when_they_are_sent() -> None:
    gates = [asyncio.Event() for _ in range(4)]

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i, gate in enumerate(gates):
            await peer.chunk(b"data: %d\n\n" % i)
            await gate.wait()
        await peer.send(b"0\r\n\r\n")

    async with (
        upstream_and_backend(handler) as (_, backend),
        await within(backend.forward(post())) as response,
    ):
        body = response.body()
        for i, gate in enumerate(gates):
            assert await within(anext(body)) == b"data: %d\n\n" % i
            gate.set()
        with pytest.raises(StopAsyncIteration):
            await within(anext(body))


async def test_large_and_many_answer_headers() -> None:
    lines = b"".join(b"X-%d: %d\r\n" % (i, i) for i in range(100)) + b"X-Long: " + b"a" * 30_000 + b"\r\n"
    recorder = Recorder(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + lines + b"\r\n{}")
    async with upstream_and_backend(recorder) as (_, backend):
        _, headers, _ = await whole(backend, post())
    assert len(headers) == 102 and headers[-1] == (b"X-Long", b"a" * 30_000)


async def test_connections_are_kept_and_used_again() -> None:
    async with upstream_and_backend(Recorder()) as (upstream, backend):
        for _ in range(5):
            await whole(backend, post())
        assert upstream.connections == 1


async def test_an_answer_before_the_body_is_through() -> None:
    """An upstream that refuses a large upload does not wait for its end."""
    answered = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.head()
        await peer.answer(b"too much", status=b"413 Too Large")
        answered.set()
        await peer.rest()

    async def body() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        await asyncio.Event().wait()

    async with upstream_and_backend(handler) as (_, backend):
        status, _, answer = await whole(backend, post(body(), (b"content-length", b"100000000")))
    assert answered.is_set() and (status, answer) == (413, b"too much")


async def test_the_environments_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with upstream_and_backend(Recorder()) as (_, backend):
        assert (await whole(backend, post()))[0] == 200
    async with upstream_and_backend(Recorder(), ONEPASS_UPSTREAM_TRUST_ENV="1") as (_, backend):
        with pytest.raises(UpstreamUnreachable):
            await within(backend.forward(post()))


# --- hanging up ------------------------------------------------------------------------------------------------------


async def test_cancelling_the_wait_for_the_head_closes_the_connection() -> None:
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        arrived.set()
        await peer.rest()
        closed.set()

    async with upstream_and_backend(handler) as (_, backend):
        waiting = asyncio.create_task(backend.forward(post()))
        await within(arrived.wait())
        waiting.cancel()
        await within(closed.wait())
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_leaving_early_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await peer.chunk(b"data: 1\n\n")
        await peer.rest()
        closed.set()

    async with upstream_and_backend(handler) as (_, backend):
        async with await within(backend.forward(post())) as response:
            assert await within(anext(response.body())) == b"data: 1\n\n"
        await within(closed.wait())


async def test_hanging_up_stops_a_large_upload() -> None:
    """What the upstream has not yet read is dropped, not delivered first."""
    arrived, proceed = asyncio.Event(), asyncio.Event()
    received = asyncio.get_running_loop().create_future()

    async def handler(peer: Peer) -> None:
        await peer.head()
        arrived.set()
        await proceed.wait()
        received.set_result(len(await peer.rest()))

    size = 64 * 1024 * 1024
    async with upstream_and_backend(handler) as (_, backend):
        waiting = asyncio.create_task(backend.forward(post(bytes(size))))
        await within(arrived.wait())
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        proceed.set()
        assert await within(received) < size


# --- failures --------------------------------------------------------------------------------------------------------


async def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with backend_for(f"http://127.0.0.1:{unused.getsockname()[1]}") as backend:
            with pytest.raises(UpstreamUnreachable, match="refused") as caught:
                await within(backend.forward(post()))
    assert "127.0.0.1" not in str(caught.value), "addresses are for the log"


async def test_a_name_that_does_not_resolve() -> None:
    async with backend_for("http://onepass.invalid/v1") as backend:
        with pytest.raises(UpstreamUnreachable, match="resolve"):
            await within(backend.forward(post()))


async def test_tls_to_a_server_that_has_none() -> None:
    async def handler(peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with raw_upstream(handler) as upstream, backend_for(f"https://127.0.0.1:{upstream.port}") as backend:
        with pytest.raises(UpstreamUnreachable, match="TLS"):
            await within(backend.forward(post()))


async def test_a_connection_that_is_never_accepted() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = []
        try:
            for _ in range(4):  # more than the backlog holds
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(address)
                fillers.append(filler)
            async with backend_for(
                f"http://127.0.0.1:{address[1]}", ONEPASS_UPSTREAM_CONNECT_TIMEOUT_S="0.2"
            ) as backend:
                with pytest.raises(UpstreamUnreachable, match=r"no connection within 0\.2 s"):
                    await within(backend.forward(post()))
        finally:
            for filler in fillers:
                filler.close()


async def test_no_answer_in_time() -> None:
    closed = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.rest()
        closed.set()

    async with upstream_and_backend(handler, ONEPASS_UPSTREAM_TIMEOUT_S="0.2") as (_, backend):
        with pytest.raises(UpstreamTimeout, match=r"within 0\.2 s"):
            await within(backend.forward(post()))
        await within(closed.wait())


async def test_the_time_limit_ends_with_the_head() -> None:
    gate = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{")
        await gate.wait()
        await peer.send(b"}")

    async with (
        upstream_and_backend(handler, ONEPASS_UPSTREAM_TIMEOUT_S="0.2") as (_, backend),
        await within(backend.forward(post())) as response,
    ):
        body = response.body()
        assert await within(anext(body)) == b"{"
        with pytest.raises(TimeoutError):  # longer than the limit: the stream is merely slow
            await asyncio.wait_for(asyncio.Event().wait(), 0.4)
        gate.set()
        assert await within(anext(body)) == b"}"


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "not HTTP"),
        (b"HTTP/1.1 200", "closed the connection without an answer"),
        (b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n", "999"),
    ],
)
async def test_no_answer_that_is_one(sent: bytes, why: str) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)

    async with upstream_and_backend(handler) as (_, backend):
        with pytest.raises(UpstreamUnreachable, match=why):
            await within(backend.forward(post()))


@pytest.mark.parametrize(
    ("head", "sent", "then", "reset"),
    [
        (b"Content-Length: 100", b"only this", b"", False),
        (b"Transfer-Encoding: chunked", b"5\r\nhello\r\n", b"", False),
        (b"Transfer-Encoding: chunked", b"5\r\nhel", b"", False),
        (b"Transfer-Encoding: chunked", b"5\r\nhello\r\n", b"zz\r\nhello", False),
        (b"Transfer-Encoding: chunked", b"5\r\nhello\r\n", b"", True),
        (b"Content-Length: 100", b"only this", b"", True),
        (b"Connection: close", b"until the end", b"", True),
    ],
)
async def test_an_answer_that_breaks_off(head: bytes, sent: bytes, then: bytes, reset: bool) -> None:
    read = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + sent)
        await read.wait()
        await peer.send(then)
        if reset:
            peer.reset()

    async with (
        upstream_and_backend(handler) as (_, backend),
        await within(backend.forward(post())) as response,
    ):
        body = response.body()
        assert await within(anext(body)) in sent
        read.set()
        with pytest.raises(UpstreamUnreachable, match="broke off"):
            await within(anext(body))


async def test_an_answer_that_ends_with_its_connection() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.0 200 OK\r\nServer: old\r\n\r\nuntil ")
        await peer.send(b"the end")

    async with upstream_and_backend(handler) as (_, backend):
        assert await whole(backend, post()) == (200, [(b"Server", b"old")], b"until the end")


async def test_a_post_that_may_have_arrived_is_not_repeated() -> None:
    """The first answer leaves a connection in the pool, on which the second request is lost."""
    requests: list[RawRequest] = []

    async def handler(peer: Peer) -> None:
        requests.append(await peer.request())
        await peer.answer()
        requests.append(await peer.request())

    async with upstream_and_backend(handler) as (upstream, backend):
        await whole(backend, post())
        with pytest.raises(UpstreamUnreachable):
            await within(backend.forward(post()))
        assert len(requests) == 2 and upstream.connections == 1


async def test_a_get_is_repeated_once_on_a_new_connection() -> None:
    requests: list[RawRequest] = []

    async def handler(peer: Peer) -> None:
        requests.append(await peer.request())
        await peer.answer()
        requests.append(await peer.request())

    async with upstream_and_backend(handler) as (upstream, backend):
        await whole(backend, get())
        assert (await whole(backend, get()))[0] == 200
        assert len(requests) == 3 and upstream.connections == 2


async def test_a_connection_that_the_upstream_closed_meanwhile_is_not_used() -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.answer()

    async with upstream_and_backend(handler) as (upstream, backend):
        for expected in (1, 2, 3):
            assert (await whole(backend, post()))[0] == 200
            assert upstream.connections == expected
            await asyncio.sleep(0.05)  # for the FIN


# --- stopping --------------------------------------------------------------------------------------------------------


async def test_status_follows_life() -> None:
    backend = factory({"ONEPASS_UPSTREAM_BASE_URL": "http://127.0.0.1:1"})
    assert not backend.status().ready
    with pytest.raises(ShuttingDown):
        await backend.forward(get())
    await backend.start()
    assert backend.status().ready
    backend.begin_drain()
    assert not backend.status().ready
    with pytest.raises(ShuttingDown):
        await backend.forward(get())
    await backend.stop(0.0)
    await backend.stop(0.0)


async def test_what_runs_may_finish_within_the_grace_time() -> None:
    gate = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{")
        await gate.wait()
        await peer.send(b"}")

    async with raw_upstream(handler) as upstream:
        backend = factory({"ONEPASS_UPSTREAM_BASE_URL": upstream.url})
        await backend.start()
        async with await within(backend.forward(post())) as response:
            stopping = asyncio.create_task(backend.stop(60.0))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown):
                await backend.forward(post())
            gate.set()
            assert b"".join([chunk async for chunk in response.body()]) == b"{}"
        await within(stopping)


async def test_what_still_runs_after_the_grace_time_is_cut() -> None:
    closed = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{")
        await peer.rest()
        closed.set()

    async with raw_upstream(handler) as upstream:
        backend = factory({"ONEPASS_UPSTREAM_BASE_URL": upstream.url})
        await backend.start()
        async with await within(backend.forward(post())) as response:
            body = response.body()
            assert await within(anext(body)) == b"{"
            await within(backend.stop(0.01))
            await within(closed.wait())
            with pytest.raises(UpstreamUnreachable):
                await within(anext(body))
