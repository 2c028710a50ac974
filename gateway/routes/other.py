"""Every path without a handler of its own: a single model, or somebody else's business."""

from __future__ import annotations

from litestar.handlers import ASGIRouteHandler

from gateway.exchange import Receive, Scope, Send
from gateway.routes.bare import bare_mount
from gateway.routes.elsewhere import elsewhere
from gateway.routes.models import MODEL_PREFIX, show_model
from gateway.runtime import Runtime

__all__ = ["other_routes"]


def other_routes(runtime: Runtime) -> ASGIRouteHandler:
    """Litestar gives a mount at the root precedence over paths with parameters, so models are told apart here."""

    async def other(scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(MODEL_PREFIX):
            await elsewhere(runtime, scope, receive, send)
        elif scope["method"] == "GET":
            await show_model(runtime, scope, send)
        else:
            await elsewhere(runtime, scope, receive, send, allowed=("GET",))

    return bare_mount(other, runtime)
