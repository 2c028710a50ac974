"""The application's outermost layer: names each request, counts it, adds the headers that every answer carries, and
writes the request log. It decides nothing.
"""

from __future__ import annotations

import asyncio
import re
from email.utils import formatdate
from random import getrandbits
from typing import Any

from gateway.errors import Unavailable, envelope
from gateway.exchange import (
    CLIENT_GONE_STATUS,
    GATEWAY,
    UPSTREAM,
    Exchange,
    Receive,
    Scope,
    Send,
    header,
    open_exchange,
)
from gateway.runtime import Runtime

__all__ = ["Accounting"]

_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Accounting:
    """ASGI middleware around the whole application."""

    def __init__(self, app: Any, runtime: Runtime) -> None:
        self._app = app
        self._runtime = runtime
        self._metrics = runtime.metrics
        self._log = runtime.request_log
        self._clock = runtime.clock
        self._date_second = -1
        self._date_text = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = header(scope["headers"], b"x-request-id")
        # Random, but not secret: the system's generator would cost a call into the kernel.
        request_id = asked.decode() if asked and _SANE_ID.fullmatch(asked) else f"req-{getrandbits(128):032x}"
        exchange = open_exchange(scope, request_id, self._clock())

        async def counting_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                if exchange.path != UPSTREAM:
                    message["headers"] = [*message["headers"], *self._own_headers(exchange)]
            elif exchange.first_byte_s is None and message.get("body"):
                exchange.first_byte_s = self._clock()
            await send(message)

        self._metrics.in_flight += 1
        try:
            await self._app(scope, receive, counting_send)
        except asyncio.CancelledError:
            if not self._runtime.draining:
                raise
            await self._cut_off(exchange, counting_send)
        finally:
            self._metrics.in_flight -= 1
            self._settle(exchange)

    async def _cut_off(self, exchange: Exchange, send: Send) -> None:
        """The server ends what outlasts its grace time. An answer that has begun stays as incomplete as it is."""
        if exchange.status:
            return
        exchange.answered_by(GATEWAY, GATEWAY, exchange.reason)
        error = Unavailable("The server is shutting down.")
        exchange.error_code = error.code
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": envelope(error)})

    def _own_headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        elapsed_ms = (self._clock() - exchange.started_s) * 1000
        return [
            (b"date", self._date()),
            (b"x-request-id", exchange.request_id.encode()),
            (b"openai-processing-ms", b"%d" % round(elapsed_ms)),
            (b"openai-version", b"2020-10-01"),
        ]

    def _date(self) -> bytes:
        second = int(self._runtime.wall_clock())
        if second != self._date_second:
            self._date_second, self._date_text = second, formatdate(second, usegmt=True).encode()
        return self._date_text

    def _settle(self, exchange: Exchange) -> None:
        seconds = self._clock() - exchange.started_s
        metrics = self._metrics
        metrics.request_finished(
            route=exchange.route,
            backend=exchange.backend,
            reason=exchange.reason,
            status=exchange.status,
            model=exchange.model,
            path=exchange.path,
            seconds=seconds,
        )
        if exchange.status == CLIENT_GONE_STATUS:
            metrics.disconnected(exchange.path)
        elif exchange.error_code is not None:
            metrics.refused(exchange.status, exchange.error_code)
        elif exchange.first_byte_s is not None and exchange.path != GATEWAY:
            metrics.first_token(exchange.model, exchange.path, exchange.first_byte_s - exchange.started_s)
        # Probes and scrapes would drown the work.
        if self._log.enabled and (exchange.path != GATEWAY or exchange.error_code is not None):
            self._log.write(exchange, seconds)
