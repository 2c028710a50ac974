"""The one place where the gateway is put together: settings, backends, routes, error shapes, life cycle."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException

from gateway.accounting import Accounting
from gateway.catalog import load_backends
from gateway.errors import ApiError, InvalidRequest, MethodNotAllowed, RouteNotFound, envelope, from_exception
from gateway.exchange import GATEWAY, UPSTREAM, exchange_of
from gateway.routes.guards import guard_of
from gateway.routes.models import models_route
from gateway.routes.other import other_routes
from gateway.routes.service import guarded_status_routes, status_routes
from gateway.routes.text import text_routes
from gateway.runtime import Runtime
from gateway.settings import Settings, SettingsError

__all__ = ["STOP_S", "Application", "create_app"]

# Running requests have had their grace time by then; this is for engine threads to come to a boundary.
STOP_S = 1.0

log = logging.getLogger("onepass.gateway")


class Application:
    """The ASGI application, with what a server process needs besides: its runtime, and how much is being answered."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._accounting = Accounting(_litestar(runtime), runtime)

    @property
    def in_flight(self) -> int:
        return self.runtime.metrics.in_flight

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._accounting(scope, receive, send)


def create_app(env: Mapping[str, str]) -> Application:
    """Raises SettingsError. Backends start with the application's lifespan."""
    settings = Settings.from_env(env)
    try:
        return Application(Runtime(settings, load_backends(settings, env)))
    except OSError as exc:
        raise SettingsError(f"ONEPASS_REQUEST_LOG: {exc}") from None


def _litestar(runtime: Runtime) -> Litestar:

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await runtime.start()
        try:
            yield
        finally:
            await runtime.stop(STOP_S)

    return Litestar(
        route_handlers=[
            *text_routes(runtime),
            models_route(runtime),
            *status_routes(runtime),
            *guarded_status_routes(runtime, guard_of(runtime)),
            other_routes(runtime),
        ],
        exception_handlers={Exception: _error_response},
        lifespan=[lifespan],
        openapi_config=None,
        logging_config=None,
        # Routes that read bodies do it themselves, under ONEPASS_MAX_BODY_BYTES.
        request_max_body_size=None,
    )


def _error_response(request: Request[Any, Any, Any], exc: Exception) -> Response[bytes]:
    """OpenAI's envelope, whatever was raised and wherever."""
    exchange = exchange_of(request.scope)
    error = _as_api_error(exc, request)
    if error.status >= 500 and not isinstance(exc, ApiError) and error.code is None:
        log.error("request %s failed", exchange.request_id, exc_info=exc)
    if exchange.path == UPSTREAM:
        exchange.answered_by(GATEWAY, GATEWAY, exchange.reason)
    exchange.error_code = error.code or error.type
    exchange.reason = exchange.reason or exchange.error_code.replace("_", "-")
    headers = {**error.headers, "x-onepass-backend": exchange.backend, "x-onepass-reason": exchange.reason}
    return Response(envelope(error), status_code=error.status, media_type="application/json", headers=headers)


def _as_api_error(exc: Exception, request: Request[Any, Any, Any]) -> ApiError:
    if isinstance(exc, HTTPException):
        if exc.status_code == 404:
            return RouteNotFound(
                f"There is no route {request.method} {exchange_of(request.scope).asked_path[:200]} here."
            )
        if exc.status_code == 405:
            allowed = (exc.headers or {}).get("Allow", "GET")
            return MethodNotAllowed(request.method, tuple(part.strip() for part in allowed.split(",")))
        if exc.status_code < 500:
            return InvalidRequest(exc.detail, status=exc.status_code)
    return from_exception(exc)
