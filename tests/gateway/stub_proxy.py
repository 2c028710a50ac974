"""An upstream in the same process: remembers what it was sent and answers what it was told to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from backends.base import BackendStatus, ProxyBackend, ProxyRequest, ProxyResponse


class StubResponse(ProxyResponse):
    def __init__(self, status: int, payload: bytes) -> None:
        self.status = status
        self.headers: Sequence[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(payload)),
            (b"x-request-id", b"theirs"),
        ]
        self._payload = payload

    async def body(self) -> AsyncIterator[bytes]:  # type: ignore[override]
        yield self._payload

    async def __aenter__(self) -> StubResponse:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass


class StubProxy(ProxyBackend):
    """``fault``, when set, is raised by every forward."""

    name = "upstream"

    def __init__(self, models: Sequence[str] = ()) -> None:
        self.model_names = models
        self.seen: list[tuple[ProxyRequest, bytes]] = []
        self.listed = 0
        self.fault: Exception | None = None

    async def start(self) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        pass

    def status(self) -> BackendStatus:
        return BackendStatus(ready=True)

    async def forward(self, request: ProxyRequest) -> ProxyResponse:
        if self.fault is not None:
            raise self.fault
        if (request.method, request.raw_path) == ("GET", b"/v1/models"):
            self.listed += 1
            data = [{"id": name, "object": "model", "created": 1, "owned_by": "them"} for name in self.model_names]
            return StubResponse(200, json.dumps({"object": "list", "data": data}).encode())
        body = request.body
        raw = body if isinstance(body, bytes) else b"".join([chunk async for chunk in body])
        self.seen.append((request, raw))
        answer: dict[str, Any] = {"from": "upstream", "path": request.raw_path.decode()}
        return StubResponse(200, json.dumps(answer).encode())
