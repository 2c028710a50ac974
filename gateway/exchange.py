"""One HTTP request and what becomes of it: the record that handlers fill and that accounting reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.base import Timing

__all__ = ["GATEWAY", "UPSTREAM", "Exchange", "Headers", "Receive", "Scope", "Send", "exchange_of", "header"]

Scope = Any  # Litestar and uvicorn type the same dictionaries and callables differently
Receive = Any
Send = Any
Headers = Sequence[tuple[bytes, bytes]]

GATEWAY = "gateway"  # answered by nobody behind the gateway
UPSTREAM = "upstream"
CLIENT_GONE_STATUS = 499

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


def open_exchange(scope: Scope, request_id: str, started_s: float) -> Exchange:
    exchange = scope[_KEY] = Exchange(request_id, started_s, scope["path"])
    return exchange


def header(headers: Headers, name: bytes) -> bytes | None:
    """The first value; ASGI servers send names in lower case."""
    for key, value in headers:
        if key == name:
            return value
    return None
