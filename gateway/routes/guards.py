"""What stands before a handler: who may ask, and whether work is still taken."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard

from gateway.errors import Unavailable
from gateway.exchange import exchange_of
from gateway.runtime import Runtime

__all__ = ["guards_of"]


def guards_of(runtime: Runtime) -> list[Guard]:
    """For every route but those that say how the server is."""

    def accepts_work(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        if runtime.draining:
            raise Unavailable("The server is shutting down.", retry_after_s=1.0)

    def has_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        exchange_of(connection.scope).tenant = runtime.auth.tenant(connection.scope["headers"])

    return [has_key, accepts_work]
