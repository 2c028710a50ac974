"""HTTP/1.1 as uvicorn speaks it, with what it leaves open: how long and how large a request's head may be, and refusals
in the words of every other refusal."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import ApiError, InvalidRequest, RequestTimeout, envelope

__all__ = ["HEAD_S", "MAX_HEAD_BYTES", "Protocol"]

HEAD_S = 75.0  # as long as a connection may be idle between two requests
MAX_HEAD_BYTES = 1 << 20


class Protocol(HttpToolsProtocol):
    """One connection. Until its head is complete, a request is nothing that any later limit could see."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_done()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is None or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(InvalidRequest(f"The request's headers exceed {MAX_HEAD_BYTES} bytes.", status=431))

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(f"{msg} It is not HTTP/1.1 as this server reads it."))

    def _expect_head(self) -> None:
        self._head_done()
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_S, self._head_overdue)

    def _head_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_overdue(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # The request before this one is still being answered.
            self._expect_head()
        elif self._head_bytes:
            self._refuse(RequestTimeout(HEAD_S, "head"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        body = envelope(error)
        status = HTTPStatus(error.status)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\nx-onepass-backend: gateway\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
