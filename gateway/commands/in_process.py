"""The application without a server: its lifespan, and requests handed to it as ASGI messages."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from gateway.app import Application

__all__ = ["InProcess"]

_POLL_S = 0.05


class InProcess:
    """``async with``: starts the application and stops it."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __aenter__(self) -> InProcess:
        await self._app.runtime.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._app.runtime.stop(0.0)

    async def wait_ready(self) -> str | None:
        """None once ready, else why that will never be."""
        while not self._app.runtime.ready():
            failure = self._app.runtime.failure()
            if failure is not None:
                return failure
            await asyncio.sleep(_POLL_S)
        return None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a JSON request."""
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
        }
        given = False
        status = 0
        chunks: list[bytes] = []

        async def receive() -> dict[str, Any]:
            nonlocal given
            if given:
                await asyncio.Event().wait()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            chunks.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(chunks)
