"""The backend that passes requests on, over pooled keep-alive connections.

It never repeats a request that may have reached the upstream, follows no redirect, keeps no cookie and decodes no body.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
from multidict import CIMultiDict

from backends.base import (
    BackendError,
    BackendStatus,
    InvalidInput,
    ProxyBackend,
    ProxyRequest,
    ProxyResponse,
    ShuttingDown,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from backends.upstream.headers import Headers, to_client, to_upstream
from backends.upstream.settings import UpstreamSettings
from backends.upstream.target import Target

__all__ = ["UpstreamBackend", "factory"]

log = logging.getLogger("onepass.upstream")

# Below the 5 s after which uvicorn and others close an idle connection: a request that meets such a close half-way is
# lost, and a POST must not be repeated.
_KEEPALIVE_S = 4.0
_HEAD_LINE_BYTES = 64 * 1024
# Larger bodies go out piece by piece, so that hanging up stops the upload at once.
_PIECE_BYTES = 64 * 1024


def factory(env: Mapping[str, str]) -> UpstreamBackend:
    """Entry point ``upstream`` of the group ``onepass.backends``. Raises SettingsError."""
    return UpstreamBackend(UpstreamSettings.from_env(env))


class UpstreamBackend(ProxyBackend):
    name = "upstream"

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        self._target = Target(settings.base_url)
        self._session: aiohttp.ClientSession | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def start(self) -> None:
        settings = self._settings
        self._session = aiohttp.ClientSession(
            # As many connections as there are requests: a limit would make them wait where nobody sees it.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=settings.connect_timeout_s),
            trust_env=settings.trust_env,
            auto_decompress=False,
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            max_line_size=_HEAD_LINE_BYTES,
            max_field_size=_HEAD_LINE_BYTES,
        )

    async def stop(self, grace_s: float) -> None:
        self.begin_drain()
        session, self._session = self._session, None
        if session is None:
            return
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d upstream requests were cut off after %g s", self._in_flight, grace_s)
        await session.close()

    def begin_drain(self) -> None:
        self._draining = True

    def status(self) -> BackendStatus:
        """Ready once started: whether the upstream answers is each request's own experience."""
        if self._draining:
            return BackendStatus(ready=False, message="stopping")
        if self._session is None:
            return BackendStatus(ready=False, message="not started")
        return BackendStatus(ready=True, message="ready")

    async def forward(self, request: ProxyRequest) -> ProxyResponse:
        """Raises UpstreamUnreachable, UpstreamTimeout, ShuttingDown, and InvalidInput for what HTTP cannot carry."""
        session = self._session
        if session is None or self._draining:
            raise ShuttingDown("The gateway is shutting down.")
        settings = self._settings
        headers = to_upstream(request.headers, api_key=settings.api_key, forward_auth=settings.forward_auth)
        try:
            url = self._target.url(request.raw_path, request.raw_query)
            fields = _fields(headers)
        except ValueError as exc:
            raise InvalidInput(f"This request cannot be passed on: {exc}.") from None
        self._enter()
        try:
            async with asyncio.timeout(settings.head_timeout_s):
                response = await session.request(
                    request.method,
                    url,
                    headers=fields,
                    data=_payload(request.body, fields),
                    allow_redirects=False,
                )
        except BaseException as exc:
            self._leave()
            if (translated := _translated(exc, settings)) is None:
                raise
            raise translated from exc
        answer = _UpstreamResponse(response, self._leave)
        if not 200 <= response.status <= 599:
            async with answer:
                raise UpstreamUnreachable(f"The upstream server answered with status {response.status}, which is none.")
        return answer

    def _enter(self) -> None:
        self._in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()


class _UpstreamResponse(ProxyResponse):
    def __init__(self, response: aiohttp.ClientResponse, on_exit: Callable[[], None]) -> None:
        self._response = response
        self._on_exit = on_exit
        self.status = response.status
        self.headers: Headers = to_client(response.raw_headers)
        # Without a length the answer ends with its connection, and then it matters how that ended.
        self._sized = bool(response.headers.keys() & {"Content-Length", "Transfer-Encoding"})
        # None once the whole answer is there: the connection is back in the pool, or gone.
        self._connection_end: asyncio.Future[None] | None = None
        connection = response.connection
        if connection is not None and connection.protocol is not None:
            self._connection_end = connection.protocol.closed
            if self._connection_end is not None:
                self._connection_end.add_done_callback(self._on_connection_end)

    async def body(self) -> AsyncIterator[bytes]:
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
            end = self._connection_end
            if not self._sized and end is not None and end.done() and (lost := end.exception()) is not None:
                raise lost
        except (aiohttp.ClientError, OSError, RuntimeError) as exc:  # RuntimeError: the session was closed
            log.warning("the upstream's answer broke off: %s", _details(exc))
            raise UpstreamUnreachable("The upstream server broke off its answer.") from exc

    def _on_connection_end(self, end: asyncio.Future[None]) -> None:
        """aiohttp tells a reader of a connection that ended early, but not of one it closed over malformed framing."""
        content = self._response.content
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the answer's framing is malformed"))

    async def __aenter__(self) -> ProxyResponse:
        return self

    async def __aexit__(self, *exc: object) -> None:
        end = self._connection_end
        if end is not None:
            end.remove_done_callback(self._on_connection_end)
            # The connection may live on in the pool; how it ends there is nobody's concern.
            end.remove_done_callback(_unconcerned)
            end.add_done_callback(_unconcerned)
        try:
            # Set as long as the answer has not been read to its end.
            connection = self._response.connection
            if connection is not None and connection.transport is not None:
                connection.transport.abort()
            self._response.close()
        finally:
            self._on_exit()


def _unconcerned(end: asyncio.Future[None]) -> None:
    if not end.cancelled():
        end.exception()


def _fields(headers: Headers) -> CIMultiDict[str]:
    """One spelling for a name: aiohttp would let a repeated one in another case replace the first."""
    spelling: dict[bytes, str] = {}
    return CIMultiDict(
        (spelling.setdefault(name.lower(), name.decode("latin-1")), _field_text(value)) for name, value in headers
    )


def _field_text(value: bytes) -> str:
    """aiohttp writes header values as UTF-8: those that are UTF-8 already stay what they are, others are read as
    Latin-1, HTTP's old default, and change their encoding on the way."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _payload(body: bytes | AsyncIterator[bytes], fields: CIMultiDict[str]) -> bytes | AsyncIterator[bytes] | None:
    """``fields`` says how long the body is; a stream of unknown length goes out chunked."""
    if not isinstance(body, bytes):
        return body
    if body and "content-length" not in fields:
        fields["content-length"] = str(len(body))
    if len(body) > _PIECE_BYTES:
        return _pieces(body)
    return body or None


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(body), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]  # type: ignore[misc]


def _translated(exc: BaseException, settings: UpstreamSettings) -> BackendError | None:
    """The contract's error for what the HTTP client raised; None for what is none of its failures. Host names and
    addresses stay in the log."""
    match exc:
        case aiohttp.ConnectionTimeoutError():
            why = f"no connection within {settings.connect_timeout_s:g} s"
        case TimeoutError() if not isinstance(exc, aiohttp.ClientError):
            log.warning("the upstream sent no answer within %g s", settings.head_timeout_s)
            return UpstreamTimeout(f"The upstream server sent no answer within {settings.head_timeout_s:g} s.")
        case aiohttp.ClientConnectorDNSError():
            why = "its name does not resolve"
        case aiohttp.ClientSSLError():
            why = "the TLS handshake failed"
        case aiohttp.ClientConnectorError():
            why = "the connection was refused"
        case aiohttp.ServerDisconnectedError():
            why = "it closed the connection without an answer"
        case aiohttp.ClientResponseError():
            why = "its answer is not HTTP"
        case aiohttp.ClientError() | OSError():
            why = "the connection failed"
        case ValueError():
            return InvalidInput(f"This request cannot be passed on: {exc}")
        case _:
            return None
    log.warning("the upstream cannot be reached: %s", _details(exc))
    return UpstreamUnreachable(f"The upstream server cannot be reached: {why}.")


def _details(exc: BaseException) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split())
