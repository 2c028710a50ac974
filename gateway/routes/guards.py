"""What stands before a handler: who may ask, and whether work is still taken."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard

from gateway.errors import Unavailable
from gateway.exchange import Scope, exchange_of
from gateway.runtime import Runtime

__all__ = ["admit", "guard_of"]


def admit(runtime: Runtime, scope: Scope) -> None:
    """Raises Unauthorized, or Unavailable while the server is leaving."""
    exchange_of(scope).tenant = runtime.auth.tenant(scope["headers"])
    if runtime.draining:
        raise Unavailable("The server is shutting down.", retry_after_s=1.0)


def guard_of(runtime: Runtime) -> Guard:
    """:func:`admit` for Litestar's own handlers."""

    async def guard(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        admit(runtime, connection.scope)

    return guard
