"""Reading requests and writing answers over plain ASGI: bodies with a limit, content encodings, disconnects."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import brotli
import msgspec
import zstandard

from gateway.errors import ClientGone, InvalidRequest, PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from gateway.exchange import Headers, Receive, Send, header

__all__ = ["DisconnectGuard", "check_json_content_type", "decoded_body", "encode_json", "read_body", "send_answer"]

_DISCARD_FACTOR = 4  # how many times the limit is read and thrown away, so that the client gets to see the refusal
_CHUNK_BYTES = 1 << 20
_MOST_CODINGS = 3  # each may unpack to the whole limit, and the header that names them is short
_BODY_TIMEOUT_S = 120.0  # for a body that is read here; what is streamed to the upstream has no limit

encode_json = msgspec.json.Encoder().encode


async def read_body(receive: Receive, headers: Headers, limit_bytes: int, timeout_s: float = _BODY_TIMEOUT_S) -> bytes:
    """Raises PayloadTooLarge, RequestTimeout, or ClientGone when the connection ends before the body does."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_all(receive, headers, limit_bytes)
    except TimeoutError:
        raise RequestTimeout(timeout_s) from None


async def _read_all(receive: Receive, headers: Headers, limit_bytes: int) -> bytes:
    declared = header(headers, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        if header(headers, b"expect") is None:
            await _discard(receive, limit_bytes * _DISCARD_FACTOR)
        raise PayloadTooLarge(limit_bytes)
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if message.get("more_body", False):
        chunks, size = [body], len(body)
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit_bytes:
                chunks.clear()
                await _discard(receive, limit_bytes * _DISCARD_FACTOR)
                raise PayloadTooLarge(limit_bytes)
            chunks.append(chunk)
        body = b"".join(chunks)
    if len(body) > limit_bytes:
        raise PayloadTooLarge(limit_bytes)
    return body


async def _discard(receive: Receive, budget_bytes: int) -> None:
    """A client that is still sending does not read an answer yet, and would see a reset connection in its place."""
    while budget_bytes > 0:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        budget_bytes -= len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def check_json_content_type(headers: Headers) -> None:
    """An absent content type passes. Raises UnsupportedMediaType."""
    value = header(headers, b"content-type")
    if value is None or value == b"application/json":
        return
    kind = value.partition(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        shown = kind[:64].decode("ascii", "replace")
        raise UnsupportedMediaType(f"The content type must be application/json, not {shown!r}.")


def decoded_body(body: bytes, headers: Headers, limit_bytes: int) -> bytes:
    """Undoes ``Content-Encoding``: gzip, deflate, br, zstd, or several in a row. The limit holds for the result too.
    Raises UnsupportedMediaType, InvalidRequest, PayloadTooLarge."""
    value = header(headers, b"content-encoding")
    if value is None:
        return body
    codings = [c.strip().lower() for c in value.split(b",")]
    applied = [coding for coding in codings if coding not in (b"", b"identity")]
    if len(applied) > _MOST_CODINGS:
        raise UnsupportedMediaType(
            f"The body has {len(applied)} content encodings on top of each other; at most {_MOST_CODINGS} are undone."
        )
    for coding in reversed(applied):
        decode = _DECODERS.get(coding)
        if decode is None:
            shown = coding[:32].decode("ascii", "replace")
            raise UnsupportedMediaType(f"The content encoding {shown!r} is not read here: gzip, deflate, br, zstd are.")
        try:
            body = decode(body, limit_bytes)
        except (zlib.error, brotli.error, zstandard.ZstdError, EOFError):
            raise InvalidRequest(f"The body is not valid {coding.decode()}.") from None
    return body


def _inflate(body: bytes, limit_bytes: int, window_bits: int) -> bytes:
    inflater = zlib.decompressobj(window_bits)
    out = inflater.decompress(body, limit_bytes + 1)
    if len(out) > limit_bytes:
        raise PayloadTooLarge(limit_bytes)
    if not inflater.eof:
        raise EOFError
    return out


def _gzip(body: bytes, limit_bytes: int) -> bytes:
    return _inflate(body, limit_bytes, 16 + zlib.MAX_WBITS)


def _deflate(body: bytes, limit_bytes: int) -> bytes:
    """Both readings of the name: zlib's format, and the bare stream that some clients send."""
    try:
        return _inflate(body, limit_bytes, zlib.MAX_WBITS)
    except zlib.error:
        return _inflate(body, limit_bytes, -zlib.MAX_WBITS)


def _brotli(body: bytes, limit_bytes: int) -> bytes:
    decompressor = brotli.Decompressor()
    out: list[bytes] = []
    size = 0
    piece: bytes = decompressor.process(body, output_buffer_limit=_CHUNK_BYTES)
    while True:
        size += len(piece)
        if size > limit_bytes:
            raise PayloadTooLarge(limit_bytes)
        out.append(piece)
        if decompressor.is_finished():
            return b"".join(out)
        if decompressor.can_accept_more_data():
            raise EOFError
        piece = decompressor.process(b"", output_buffer_limit=_CHUNK_BYTES)


def _zstd(body: bytes, limit_bytes: int) -> bytes:
    with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body, read_across_frames=True) as reader:
        out: bytes = reader.read(limit_bytes + 1)
    if len(out) > limit_bytes:
        raise PayloadTooLarge(limit_bytes)
    return out


_DECODERS = {b"gzip": _gzip, b"x-gzip": _gzip, b"deflate": _deflate, b"br": _brotli, b"zstd": _zstd}


async def send_answer(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: bytes = b"application/json",
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})


class DisconnectGuard:
    """Cancels the body of ``async with`` when the client's connection closes, which then raises ClientGone.

    Enter it only once the request's body has been read: what ``receive`` says next is the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.ensure_future(self._receive())
        self._watch.add_done_callback(self._on_message)

    def _on_message(self, watch: asyncio.Future[Any]) -> None:
        if watch.cancelled() or watch.exception() is not None:
            return
        if watch.result()["type"] == "http.disconnect":
            self._gone = True
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.remove_done_callback(self._on_message)
        self._watch.cancel()
        if self._gone:
            self._task.uncancel()
            # Answered or failed in the very moment: nobody is left to read it either way.
            raise ClientGone from None
