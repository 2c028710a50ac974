"""Bare ASGI handlers: for routes where the request's own bytes may go upstream, and where every microsecond counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from litestar import asgi
from litestar.handlers import ASGIRouteHandler

from gateway.errors import ClientGone
from gateway.exchange import CLIENT_GONE_STATUS, Receive, Scope, Send, exchange_of
from gateway.routes.elsewhere import elsewhere
from gateway.routes.guards import admit
from gateway.runtime import Runtime

__all__ = ["Handler", "bare_mount", "bare_route"]

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def bare_route(path: str, method: str, handle: Handler, runtime: Runtime) -> ASGIRouteHandler:
    """Other methods of the path are the upstream's."""

    @asgi(path, copy_scope=False)
    async def route(scope: Any, receive: Any, send: Any) -> None:
        try:
            admit(runtime, scope)
            if scope["method"] == method:
                await handle(scope, receive, send)
            else:
                await elsewhere(runtime, scope, receive, send, allowed=(method,))
        except ClientGone:
            exchange_of(scope).status = CLIENT_GONE_STATUS

    return route


def bare_mount(handle: Handler, runtime: Runtime) -> ASGIRouteHandler:
    """Everything that no other route matches."""

    @asgi("/", is_mount=True, copy_scope=False)
    async def route(scope: Any, receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        scope["path"] = exchange.asked_path
        try:
            admit(runtime, scope)
            await handle(scope, receive, send)
        except ClientGone:
            exchange.status = CLIENT_GONE_STATUS

    return route
