"""Every path without a handler of its own: a single model, or somebody else's business."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import asgi
from litestar.handlers import ASGIRouteHandler
from litestar.types import Guard

from gateway.errors import ClientGone
from gateway.exchange import CLIENT_GONE_STATUS, exchange_of
from gateway.routes.elsewhere import elsewhere
from gateway.routes.models import MODEL_PREFIX, show_model
from gateway.runtime import Runtime

__all__ = ["other_routes"]


def other_routes(runtime: Runtime, guards: Sequence[Guard]) -> ASGIRouteHandler:
    """Litestar gives a mount at the root precedence over paths with parameters, so models are told apart here."""

    @asgi("/", is_mount=True, copy_scope=False, guards=list(guards))
    async def other(scope: Any, receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        scope["path"] = exchange.asked_path
        try:
            if scope["method"] == "GET" and exchange.asked_path.startswith(MODEL_PREFIX):
                await show_model(runtime, scope, send)
            elif exchange.asked_path.startswith(MODEL_PREFIX):
                await elsewhere(runtime, scope, receive, send, allowed=("GET",))
            else:
                await elsewhere(runtime, scope, receive, send)
        except ClientGone:
            exchange.status = CLIENT_GONE_STATUS

    return other
