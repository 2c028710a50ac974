"""How the server is: health, readiness and version, open to all; metrics and tokenizer facts for those with a key."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from litestar import MediaType, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.types import Guard

from gateway.errors import RouteNotFound
from gateway.metrics import CONTENT_TYPE
from gateway.runtime import Runtime
from gateway.wire.tokenization import tokenizer_info

__all__ = ["guarded_status_routes", "status_routes", "version"]


def version() -> str:
    try:
        return importlib.metadata.version("onepass")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def status_routes(runtime: Runtime) -> list[HTTPRouteHandler]:
    @get("/health/live", sync_to_thread=False)
    def live() -> Response[dict[str, Any]]:
        """The process answers, and its engine has not died."""
        failure = runtime.failure()
        if failure is not None:
            return Response({"status": "dead", "message": failure}, status_code=503)
        return Response({"status": "live"})

    @get("/health/ready", sync_to_thread=False)
    def ready() -> Response[dict[str, Any]]:
        """Work is taken, and is answered as fast as it ever will be."""
        statuses = {backend.name: backend.status() for backend in runtime.catalog.backends}
        backends = {name: {"ready": status.ready, "message": status.message} for name, status in statuses.items()}
        if runtime.ready():
            return Response({"status": "ready", "backends": backends})
        word = "draining" if runtime.draining else "not ready"
        return Response({"status": word, "backends": backends}, status_code=503, headers={"retry-after": "1"})

    @get(["/health", "/ping"], sync_to_thread=False)
    def health() -> Response[str]:
        """As vLLM: an empty body, and 503 when the engine is dead."""
        return Response("", media_type=MediaType.TEXT, status_code=200 if runtime.failure() is None else 503)

    @get("/version", sync_to_thread=False)
    def show_version() -> dict[str, str]:
        return {"version": version()}

    @get("/load", sync_to_thread=False)
    def load() -> dict[str, float]:
        """Requests being answered, this one apart."""
        return {"server_load": max(runtime.metrics.in_flight - 1, 0)}

    return [live, ready, health, show_version, load]


def guarded_status_routes(runtime: Runtime, guard: Guard) -> list[HTTPRouteHandler]:
    @get("/metrics", sync_to_thread=False, guards=[guard])
    def metrics() -> Response[bytes]:
        return Response(runtime.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @get("/tokenizer_info", guards=[guard], sync_to_thread=False)
    def info() -> dict[str, Any]:
        """What evaluation harnesses ask for to build prompts themselves."""
        served = runtime.catalog.find(None)
        if served is None:
            raise RouteNotFound("No model is served locally.")
        served.require_ready()
        return tokenizer_info(served)

    return [metrics, info]
