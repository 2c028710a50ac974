"""GET /v1/models and /v1/models/{id}: the local models first, then the upstream's."""

from __future__ import annotations

from typing import Any

from litestar.handlers import ASGIRouteHandler

from backends.base import ModelInfo
from gateway.errors import ModelNotFound
from gateway.exchange import Receive, Scope, Send, exchange_of
from gateway.http import encode_json, send_answer
from gateway.routes.bare import bare_route
from gateway.runtime import Runtime

__all__ = ["MODEL_PREFIX", "models_route", "show_model"]

MODEL_PREFIX = "/v1/models/"


def models_route(runtime: Runtime) -> ASGIRouteHandler:
    async def list_models(scope: Scope, receive: Receive, send: Send) -> None:
        exchange_of(scope).route = "models"
        local = [_entry(served.info, name) for served in runtime.catalog.models for name in served.names]
        mine = {entry["id"] for entry in local}
        theirs = [entry for entry in await runtime.catalog.upstream_models() if entry["id"] not in mine]
        await send_answer(send, 200, encode_json({"object": "list", "data": [*local, *theirs]}))

    return bare_route("/v1/models", "GET", list_models, runtime)


async def show_model(runtime: Runtime, scope: Scope, send: Send) -> None:
    """Names may hold slashes. Raises ModelNotFound."""
    exchange = exchange_of(scope)
    exchange.route = "models"
    name = exchange.asked_path.removeprefix(MODEL_PREFIX)
    served = runtime.catalog.find(name)
    if served is not None:
        await send_answer(send, 200, encode_json(_entry(served.info, name)))
        return
    for entry in await runtime.catalog.upstream_models():
        if entry["id"] == name:
            await send_answer(send, 200, encode_json(entry))
            return
    raise ModelNotFound(name)


def _entry(info: ModelInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": info.owned_by,
        "max_model_len": info.max_model_len or None,
    }
