"""One HTTP request and what becomes of it: the record that handlers fill and that accounting reads.

:class:`Accounting` is the outermost layer of the application: it names the request, counts it, adds the headers that
every answer carries, and writes the request log. It decides nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Any

from backends.base import Timing
from gateway.errors import ClientGone
from gateway.metrics import Metrics
from gateway.request_log import RequestLog

__all__ = ["GATEWAY", "UPSTREAM", "Accounting", "Exchange", "Receive", "Scope", "Send", "exchange_of", "header"]

Scope = Any  # Litestar and uvicorn type the same dictionaries and callables differently
Receive = Any
Send = Any
Headers = Sequence[tuple[bytes, bytes]]

GATEWAY = "gateway"  # answered by nobody behind the gateway
UPSTREAM = "upstream"
CLIENT_GONE_STATUS = 499

_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_KEY = "onepass.exchange"


@dataclass(slots=True)
class Exchange:
    """``path`` says who answered: ``local``, ``upstream`` or ``gateway``; times are the injected clock's seconds."""

    request_id: str
    started_s: float
    asked_path: str  # decoded; routing rewrites the scope's own
    route: str = "other"
    tenant: str = ""
    model: str = ""
    backend: str = GATEWAY
    path: str = GATEWAY
    reason: str = ""
    status: int = 0
    first_byte_s: float | None = None
    error_code: str | None = None
    prompt_tokens: list[int] = field(default_factory=list)  # one for each prompt
    cached_tokens: list[int] = field(default_factory=list)
    prefix_groups: list[str] = field(default_factory=list)
    timing: Timing | None = None

    def answered_by(self, backend: str, path: str, reason: str) -> None:
        self.backend, self.path, self.reason = backend, path, reason


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope[_KEY]
    return exchange


def header(headers: Headers, name: bytes) -> bytes | None:
    """The first value; ASGI servers send names in lower case."""
    for key, value in headers:
        if key == name:
            return value
    return None


class Accounting:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: Any,
        metrics: Metrics,
        request_log: RequestLog,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._log = request_log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        asked = header(headers, b"x-request-id")
        name = asked.decode() if asked and _SANE_ID.fullmatch(asked) else f"req-{getrandbits(128):032x}"
        exchange = scope[_KEY] = Exchange(name, self._clock(), scope["path"])

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
        except ClientGone:
            exchange.status = CLIENT_GONE_STATUS
        finally:
            self._metrics.in_flight -= 1
            self._settle(exchange)

    def _own_headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        elapsed_ms = (self._clock() - exchange.started_s) * 1000
        return [
            (b"x-request-id", exchange.request_id.encode()),
            (b"openai-processing-ms", b"%d" % round(elapsed_ms)),
            (b"openai-version", b"2020-10-01"),
        ]

    def _settle(self, exchange: Exchange) -> None:
        ended_s = self._clock()
        seconds = ended_s - exchange.started_s
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
        if self._log.enabled:
            self._log.write(exchange, seconds)
