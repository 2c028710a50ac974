"""A request that somebody else answers: bytes out, bytes back, as they come, over plain ASGI.

Nothing is parsed and nothing is invented: an answer that breaks off is never made to look complete.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol
from urllib.parse import quote

from backends.base import BackendError, ProxyBackend, ProxyRequest, ProxyResponse, UpstreamTimeout, UpstreamUnreachable
from gateway.errors import ApiError, ClientGone, envelope, from_exception
from gateway.exchange import Headers, Receive, Scope, Send, header
from gateway.http import DisconnectGuard

__all__ = ["PassthroughMetrics", "passthrough"]

log = logging.getLogger("onepass.gateway")

_EVENT_STREAM = b"text/event-stream"
# Without these, proxies in front of the gateway hold events back. The upstream's own values win.
_EVENT_STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LONGEST_EVENT_END = 4


class PassthroughMetrics(Protocol):
    """What is counted here; who hung up and how the request ended is counted by its caller."""

    def upstream_first_byte(self, model: str, seconds: float) -> None: ...

    def upstream_failed(self, kind: str) -> None:
        """``kind``: ``unreachable``, ``timeout`` or ``broken`` (in the middle of the answer)."""


async def passthrough(
    scope: Scope,
    receive: Receive,
    send: Send,
    body: bytes | None,
    proxy: ProxyBackend,
    reason: str,
    metrics: PassthroughMetrics,
    extra_headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    model: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Forward one HTTP request and stream the answer back.

    ``body`` None: not read yet, streamed from ``receive``. ``extra_headers`` are added where the upstream sent none of
    that name. ``model`` is the label for metrics; ``clock`` returns seconds.

    Raises, before anything is sent, ApiError: 502 ``upstream_unreachable``, 504 ``timeout``, 503 while shutting down.
    Raises ClientGone, at any time, when the client hung up; the upstream's connection is then closed already. When the
    upstream breaks off later, an event stream ends with an ``error`` event if it stands between two events, and any
    other answer is left incomplete, upon which the ASGI server cuts the connection.
    """
    upload = None if body is not None else _Upload(scope["headers"], receive)
    request = ProxyRequest(
        method=scope["method"],
        raw_path=scope.get("raw_path") or quote(scope["path"]).encode(),
        raw_query=scope["query_string"],
        headers=scope["headers"],
        body=upload.body() if upload is not None else body or b"",
    )
    started_s = clock()
    async with DisconnectGuard(receive if upload is None else upload.receive_after):
        try:
            response = await proxy.forward(request)
        except BackendError as exc:
            if upload is not None and upload.client_gone:
                raise ClientGone from None
            if isinstance(exc, UpstreamTimeout | UpstreamUnreachable):
                metrics.upstream_failed("timeout" if isinstance(exc, UpstreamTimeout) else "unreachable")
            raise from_exception(exc) from exc
        async with response:
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status,
                    "headers": _answer_headers(response, proxy.name, reason, extra_headers),
                }
            )
            relay = _Relay(response, send)
            try:
                await relay.run(lambda: metrics.upstream_first_byte(model, clock() - started_s))
            except BackendError as exc:
                if upload is not None and upload.client_gone:
                    raise ClientGone from None
                metrics.upstream_failed("broken")
                log.warning("the answer to %s %s broke off: %s", scope["method"], scope["path"], exc)
                await relay.end_broken(from_exception(exc))


def _answer_headers(
    response: ProxyResponse, backend: str, reason: str, extra: Sequence[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    headers = list(response.headers)
    if response.status in (204, 304):
        # Nothing follows, and a server that is told a length waits for that many bytes.
        headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    sent = {name.lower() for name, _ in headers}
    if _is_event_stream(response.headers):
        extra = (*extra, *_EVENT_STREAM_HEADERS)
    headers.extend((name, value) for name, value in extra if name.lower() not in sent)
    headers.append((b"x-onepass-backend", backend.encode()))
    headers.append((b"x-onepass-reason", reason.encode()))
    return headers


def _is_event_stream(headers: Headers) -> bool:
    return any(
        name.lower() == b"content-type" and value.partition(b";")[0].strip().lower() == _EVENT_STREAM
        for name, value in headers
    )


class _Upload:
    """The request's body, streamed from the client while nobody else reads ``receive``."""

    def __init__(self, headers: Headers, receive: Receive) -> None:
        self._receive = receive
        self._read = asyncio.Event()
        self._empty = header(headers, b"content-length") is None and header(headers, b"transfer-encoding") is None
        self.client_gone = False
        if self._empty:
            self._read.set()

    def body(self) -> bytes | AsyncIterator[bytes]:
        return b"" if self._empty else self._chunks()

    async def _chunks(self) -> AsyncIterator[bytes]:
        """Raises ClientGone, so that what the upstream has got so far is not taken for the whole."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.client_gone = True
                raise ClientGone
            more = message.get("more_body", False)
            if not more:
                self._read.set()
            if chunk := message.get("body", b""):
                yield chunk
            if not more:
                return

    async def receive_after(self) -> dict[str, object]:
        """What ``receive`` says once the body has been read."""
        await self._read.wait()
        while True:
            message: dict[str, object] = await self._receive()
            if message["type"] == "http.disconnect":
                return message


class _Relay:
    """The answer's body on its way to the client."""

    def __init__(self, response: ProxyResponse, send: Send) -> None:
        self._response = response
        self._send = send
        self._tail = b""  # the last bytes sent

    async def run(self, on_first_byte: Callable[[], None]) -> None:
        """Raises UpstreamUnreachable if the upstream breaks off."""
        first = True
        async for chunk in self._response.body():
            if first:
                on_first_byte()
                first = False
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._tail = (self._tail + chunk[-_LONGEST_EVENT_END:])[-_LONGEST_EVENT_END:]
        if first:
            on_first_byte()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def end_broken(self, error: ApiError) -> None:
        """Half an answer must not look whole: an event that says so where one can stand, else no end at all."""
        if not self._takes_event():
            return
        event = b"data: " + envelope(error) + b"\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    def _takes_event(self) -> bool:
        headers = self._response.headers
        names = {name.lower() for name, _ in headers}
        plain = b"content-encoding" not in names and b"content-length" not in names
        return _is_event_stream(headers) and plain and (not self._tail or self._tail.endswith(_EVENT_ENDS))
